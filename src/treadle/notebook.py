"""HTML of a Schedule, a Program, a Trace or an UpdatePlan for a notebook: the figure as SVG, else rows of text."""

from __future__ import annotations

from html import escape
from importlib.util import find_spec

from treadle.drawing import Shown, picture, prepared
from treadle.export import FORMATS
from treadle.host.extras import install_command
from treadle.ir import Schedule

_MOST_OPS = 20_000
"""A figure of more ops is too large for a page."""

_WIDTH = 120
"""Characters of a row of text."""


def html(shown: object) -> str:
    """Return the figure of an object as HTML; what has no times yet is simulated for it."""
    found = prepared(shown)
    drawable = found.trace.program.num_ops > 0
    if drawable and find_spec("matplotlib") is not None and found.trace.program.num_ops <= _MOST_OPS:
        return picture(found).svg
    why = f"figures need matplotlib: {install_command('view')}" if find_spec("matplotlib") is None else ""
    if drawable and not why:
        why = f"{found.trace.program.num_ops:,} ops are too many for a figure here; treadle.draw(x, 'page.html')"
    return f"<pre>{escape(_text(shown, found))}</pre>" + (f"<p>{escape(why)}</p>" if why else "")


def _text(shown: object, found: Shown) -> str:
    if isinstance(shown, Schedule):
        return FORMATS["text"].dump(shown)
    if not found.trace.program.num_ops:
        return str(shown)
    from treadle.view.terminal import terminal_rows

    return "\n".join(row.plain for row in terminal_rows(found.trace, _WIDTH, colour=False, hang=found.hang))
