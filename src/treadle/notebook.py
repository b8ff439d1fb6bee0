"""HTML of a Schedule, a Program, a Trace or an UpdatePlan for a notebook: the figure as SVG, else rows of text."""

from __future__ import annotations

from html import escape
from importlib.util import find_spec

from treadle.drawing import Shown, picture
from treadle.files import FORMATS
from treadle.host.extras import install_command
from treadle.ir import Schedule
from treadle.step import Step, Target

_MOST_OPS = 20_000
"""A figure of more ops is too large for a page."""

_WIDTH = 120
"""Characters of a row of text."""


def html(shown: Target) -> str:
    """Return the figure of an object as HTML; what has no times yet is simulated for it."""
    try:
        found = Shown.of(Step(shown, name=shown.name if isinstance(shown, Schedule) else ""))
    except ValueError as error:  # a schedule in the making
        return f"<pre>{escape(str(shown))}</pre><p>{escape(str(error))}</p>"
    num_ops = found.trace.program.num_ops
    why = f"figures need matplotlib: {install_command('view')}" if find_spec("matplotlib") is None else ""
    if num_ops > _MOST_OPS and not why:
        why = f"{num_ops:,} ops are too many for a figure here; treadle.draw(x, 'page.html')"
    if num_ops and not why:
        return picture(found).svg
    return f"<pre>{escape(_text(shown, found))}</pre>" + (f"<p>{escape(why)}</p>" if why else "")


def _text(shown: Target, found: Shown) -> str:
    if isinstance(shown, Schedule):
        return FORMATS["text"].dump(shown)
    if not found.trace.program.num_ops:
        return str(shown)
    from treadle.view.character_rows import terminal_rows

    return "\n".join(row.plain for row in terminal_rows(found.trace, _WIDTH, colour=False, hang=found.hang))
