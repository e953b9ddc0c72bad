"""python -m tuttifs ARGUMENTS: the command that the wheel brings along."""

import os
import sys

from . import binary


def main() -> None:
    """Becomes the command, with this process's arguments."""
    try:
        path = binary()
    except FileNotFoundError as e:
        sys.exit(f"tuttifs: {e}")
    os.execv(path, ["tuttifs", *sys.argv[1:]])


if __name__ == "__main__":
    main()
