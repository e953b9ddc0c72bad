"""The set-ups of docs/engines.md, as they stand there."""

import os

PAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../docs/engines.md")


def block(heading: str, path: str, model: str = "MODEL") -> str:
    """The block of code below a heading, with what a user puts in its place."""
    with open(PAGE, encoding="utf-8") as f:
        text = f.read().split(f"\n{heading}\n")[1].split("```\n")[1]
    assert "/mnt/kv" in text
    return text.replace("/mnt/kv", path).replace("MODEL", model)
