"""Lets mkdocstrings show the `Example:` of a docstring as code."""

from __future__ import annotations

from typing import Any

import griffe


class Examples(griffe.Extension):
    """Renames `Example:` to `Examples:`, the section that Google's style knows."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("Example:\n", "Examples:\n")
