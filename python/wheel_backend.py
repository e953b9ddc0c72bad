"""Builds the wheel: the package, libtuttifs and the command. A backend of PEP 517 without dependencies.

  wheel_backend.py DIRECTORY     builds it there and prints its path: make wheel

The library and the command are those of `make build lib`, or what TUTTIFS_LIBRARY and TUTTIFS_BINARY name. One wheel
serves all versions of Python, since it holds no extension module; its tag says which libc its parts need. Equal
contents give equal bytes.
"""

import base64
import glob
import hashlib
import os
import platform
import re
import stat
import sys
import zipfile
from typing import Any, Dict, List, Optional, Tuple

try:
    import tomllib
except ImportError:  # before Python 3.11
    import tomli as tomllib  # type: ignore[no-redef,import-not-found,unused-ignore]

HERE = os.path.dirname(os.path.abspath(__file__))
EPOCH = (1980, 1, 1, 0, 0, 0)  # the first that a zip file knows


class UnsupportedOperation(Exception):
    """What PEP 517 lets a backend say."""


def project() -> Dict[str, Any]:
    with open(os.path.join(HERE, "pyproject.toml"), "rb") as f:
        values: Dict[str, Any] = tomllib.load(f)["project"]
    with open(os.path.join(HERE, "tuttifs/__init__.py"), encoding="utf-8") as g:
        found = re.search(r'^__version__ = "(.+)"$', g.read(), re.M)
    if not found:
        raise SystemExit("tuttifs/__init__.py has no __version__")
    return {**values, "version": found.group(1)}


def native() -> List[Tuple[str, bytes]]:
    """The built parts, by their names in the wheel."""
    with open(os.path.join(HERE, "tuttifs/_lib.py"), encoding="utf-8") as f:
        major = re.search(r"^MAJOR = (\d+)$", f.read(), re.M)
    assert major is not None
    soname = f"libtuttifs.so.{major.group(1)}"
    parts = []
    for name, variable, built in ((soname, "TUTTIFS_LIBRARY", f"build/lib/{soname}"),
                                  ("tuttifs", "TUTTIFS_BINARY", "bin/tuttifs")):
        path = os.environ.get(variable) or os.path.join(os.path.dirname(HERE), built)
        try:
            with open(path, "rb") as f:
                parts.append((f"tuttifs/_native/{name}", f.read()))
        except OSError as e:
            raise SystemExit(f"{e.strerror}: {path}: run make build lib first, or set {variable}") from e
    return parts


def tag(parts: List[Tuple[str, bytes]]) -> str:
    """The wheel's tag: the newest version of libc that a part refers to."""
    versions = {(int(a), int(b)) for _, data in parts for a, b in re.findall(rb"\0GLIBC_(\d+)\.(\d+)", data)}
    major, minor = max(versions | {(2, 17)})
    return f"py3-none-manylinux_{major}_{minor}_{platform.machine()}"


def metadata(p: Dict[str, Any]) -> str:
    lines = ["Metadata-Version: 2.1", f"Name: {p['name']}", f"Version: {p['version']}", f"Summary: {p['description']}",
             f"Requires-Python: {p['requires-python']}", *[f"Classifier: {c}" for c in p["classifiers"]]]
    for extra, needs in p.get("optional-dependencies", {}).items():
        lines.append(f"Provides-Extra: {extra}")
        lines.extend(f'Requires-Dist: {n}; extra == "{extra}"' for n in needs)
    return "\n".join(lines) + "\n"


def build_wheel(wheel_directory: str, config_settings: Optional[Dict[str, Any]] = None,
                metadata_directory: Optional[str] = None) -> str:
    p, parts = project(), native()
    label, stem = tag(parts), f"{p['name']}-{p['version']}"
    info = f"{stem}.dist-info"
    files: List[Tuple[str, bytes]] = []
    for path in sorted(glob.glob(os.path.join(HERE, "tuttifs/**"), recursive=True)):
        name = os.path.relpath(path, HERE)
        if path.endswith((".py", "py.typed")) and "_native" not in name:
            with open(path, "rb") as f:
                files.append((name, f.read()))
    files += parts
    scripts = "".join(f"{name} = {target}\n" for name, target in p["scripts"].items())
    files += [(f"{info}/METADATA", metadata(p).encode()),
              (f"{info}/WHEEL", ("Wheel-Version: 1.0\nGenerator: tuttifs\nRoot-Is-Purelib: false\n"
                                 f"Tag: {label}\n").encode()),
              (f"{info}/entry_points.txt", f"[console_scripts]\n{scripts}".encode())]
    record = ""
    for name, data in files:
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(data)}\n"
    files.append((f"{info}/RECORD", (record + f"{info}/RECORD,,\n").encode()))
    wheel = f"{stem}-{label}.whl"
    with zipfile.ZipFile(os.path.join(wheel_directory, wheel), "w", zipfile.ZIP_DEFLATED) as z:
        for name, data in files:
            entry = zipfile.ZipInfo(name, EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (stat.S_IFREG | (0o755 if "_native/" in name else 0o644)) << 16
            z.writestr(entry, data)
    return wheel


def build_sdist(sdist_directory: str, config_settings: Optional[Dict[str, Any]] = None) -> str:
    raise UnsupportedOperation("what the package is made of is the whole tree, not this directory")


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    os.makedirs(sys.argv[1], exist_ok=True)
    print(os.path.join(sys.argv[1], build_wheel(sys.argv[1])))


if __name__ == "__main__":
    main()
