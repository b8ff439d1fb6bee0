"""HTML of a Schedule, a Program or a Trace for a notebook: the figure inline as SVG, else rows of text."""

from __future__ import annotations

from html import escape
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from treadle.costs import load_costs
from treadle.export import FORMATS
from treadle.ir import Schedule
from treadle.ir.program import Program
from treadle.ir.trace import Trace
from treadle.passes.cells import lower_cells
from treadle.simulate import simulate

_MOST_OPS = 20_000
"""A figure of more ops is too large for a page."""

_WIDTH = 120
"""Characters of a row of text."""


def html(shown: object) -> str:
    """Return the figure of a Schedule, a Program or a Trace as HTML; schedules and programs are simulated for it."""
    trace = _trace(shown)
    if trace is not None and find_spec("matplotlib") is not None and trace.program.num_ops <= _MOST_OPS:
        return _svg(trace)
    return f"<pre>{escape(_text(shown, trace))}</pre>"


def _trace(shown: object) -> Trace | None:
    """When the ops run: as it is, or with unit costs; None for what does not come to its end."""
    if isinstance(shown, Trace):
        return shown
    program = lower_cells(shown) if isinstance(shown, Schedule) else shown
    assert isinstance(program, Program)
    by_cell = not program.layout.is_update and not program.layout.by_layer
    try:
        return simulate(program, load_costs("unit" if by_cell else "deepseek-v3-h800"))
    except ValueError:
        return None


def _svg(trace: Trace) -> str:
    from treadle.view.figure import draw

    with TemporaryDirectory() as directory:
        path = Path(directory) / "figure.svg"
        draw(trace, path)
        text = path.read_text(encoding="utf-8")
    return text[text.index("<svg") :]


def _text(shown: object, trace: Trace | None) -> str:
    if isinstance(shown, Schedule):
        return FORMATS["text"].dump(shown)
    if trace is None:
        return str(shown)
    from treadle.view.terminal import terminal_rows

    return "\n".join(row.plain for row in terminal_rows(trace, _WIDTH, colour=False))
