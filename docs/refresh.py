"""Writes the outputs that commands have now into pages: `python docs/refresh.py docs/compare.md`.

An output that still matches stays as it is, with its `...`; read the diff before you commit it.
Commands that start ranks (`torchrun`) are passed over.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pages


def main() -> None:
    for name in sys.argv[1:]:
        text = Path(name).read_text("utf-8")
        with tempfile.TemporaryDirectory() as directory:
            console = [block for block in pages.blocks(text) if block.language == "console"]
            ranks = {c.line for block in console for c in block.commands() if c.line.startswith("torchrun")}
            for ran in pages.replay(text, Path(directory), ranks):
                if ran.is_right:
                    continue
                if f"$ {ran.what}\n{ran.expected}" not in text:
                    sys.exit(f"{name}: {ran.what}\n{ran.printed}")
                text = text.replace(f"$ {ran.what}\n{ran.expected}", f"$ {ran.what}\n{ran.printed}", 1)
                Path(name).write_text(text, "utf-8")


if __name__ == "__main__":
    main()
