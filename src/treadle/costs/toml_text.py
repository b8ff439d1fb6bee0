"""Text as a string of TOML."""

from __future__ import annotations

import json


def quoted(text: str) -> str:
    r"""Return a text in quotes, as every TOML file here has it.

    Example:
        >>> print(quoted('a "b" \\ c'))
        "a \"b\" \\ c"

    """
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
