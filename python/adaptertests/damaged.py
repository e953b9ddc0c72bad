"""Damage on a drive."""

import os

from volume import Volume


def damage(volume: Volume, pool: str, key: bytes) -> None:
    """Turns over a byte of a file's first object."""
    path = os.path.join(volume.path, pool, "blocks", key.hex()[:2], key.hex())
    _, drive, unit, _ = os.getxattr(path, "user.tuttifs.extents").decode().split("\n")[0].split()
    with open(volume.drives[int(drive)], "r+b") as f:
        f.seek(int(unit) * 4096 + 100)
        byte = f.read(1)
        f.seek(-1, os.SEEK_CUR)
        f.write(bytes([byte[0] ^ 0xff]))
