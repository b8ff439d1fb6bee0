"""Schedules, programs and traces in a notebook. Figures are a layer above `ir`, so their renderer is registered."""

from __future__ import annotations

from collections.abc import Callable

_renderers: list[Callable[[object], str]] = []


def set_renderer(render: Callable[[object], str]) -> None:
    """Set the function that makes HTML of a Schedule, a Program or a Trace."""
    _renderers[:] = [render]


class ShownInNotebooks:
    """A value that a notebook shows as a figure, or as rows of text where there is no matplotlib."""

    def _repr_html_(self) -> str | None:
        """Return HTML, or None where nothing makes it; the notebook then shows the repr."""
        return _renderers[0](self) if _renderers else None
