"""Schedules, programs and traces in a notebook."""

from __future__ import annotations

from importlib import import_module

_RENDERER = "treadle.notebook"
"""The module that makes HTML. Figures are a layer above `ir`, so it is named here and imported when it is needed."""


class ShownInNotebooks:
    """A value that a notebook shows as a figure, or as rows of text where there is no matplotlib."""

    def _repr_html_(self) -> str:
        """Return HTML."""
        html: str = import_module(_RENDERER).html(self)
        return html
