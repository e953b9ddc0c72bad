"""What the connector counts. Each side's counts since the last step go to vLLM, which sums them up and shows them."""

from __future__ import annotations

import threading
from typing import Dict

COUNTS: Dict[str, str] = {
    "hit_tokens": "Tokens of prompts whose KV was to be loaded",
    "refused_tokens": "Tokens that were stored, and computed all the same because that was faster",
    "loaded_files": "Files loaded",
    "loaded_bytes": "Bytes loaded",
    "load_seconds": "Time of loads, from their step to their last block, summed over requests",
    "failed_files": "Files that could not be loaded: gone, damaged, or the mount lost",
    "stored_files": "Files stored, and durable",
    "stored_bytes": "Bytes stored",
    "existing_files": "Files that were stored already, or by another engine meanwhile",
    "declined_files": "Files that the mount's admission policy did not want",
    "unstored_files": "Files for which there was no space, or whose store failed",
    "tainted_files": "Files not stored because a load of their step had failed",
    "store_wait_seconds": "Time that steps waited for room in the staging memory",
    "lookup_errors": "Lookups that failed",
}


class Counts:
    """Sums, taken and begun anew at each step. It may be used from all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: Dict[str, float] = {}

    def add(self, name: str, value: float) -> None:
        assert name in COUNTS, name
        with self._lock:
            self._values[name] = self._values.get(name, 0) + value

    def take(self) -> Dict[str, float]:
        with self._lock:
            values, self._values = self._values, {}
        return values
