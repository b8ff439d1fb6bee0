"""`treadle.draw`: figures and pages of schedules, programs, traces and update plans, in files and in notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from treadle.costs import Costs, durations, load_costs
from treadle.host.extras import brought_by
from treadle.ir import Schedule
from treadle.ir.program import Program
from treadle.ir.trace import Trace
from treadle.passes.cells import lower_cells
from treadle.passes.cut import common_layers
from treadle.plan import LoweringOptions, lower
from treadle.simulate import simulate
from treadle.verify import Finding, verify_program, verify_schedule
from treadle.view.described import described
from treadle.view.hang import Hang, run_to_hang
from treadle.view.style import SUFFIXES, FigureStyle, checked_path
from treadle.weights.lower import lower_update
from treadle.weights.plan import UpdatePlan
from treadle.weights.rates import simulate_update
from treadle.weights.stream import stream_of

if TYPE_CHECKING:
    from treadle.view.figure import FigureContent
    from treadle.view.sheet import Sheet

PAGE = ".html"

Drawable = Schedule | Program | Trace | UpdatePlan


@dataclass(frozen=True)
class Picture:
    """A figure as SVG, which a notebook shows."""

    svg: str

    def _repr_html_(self) -> str:
        return self.svg


@dataclass(frozen=True, eq=False)
class Shown:
    """What is drawn of an object: its trace, its title, and where it hangs if it does not finish."""

    name: str
    title: str
    trace: Trace
    hang: Hang | None = None


def draw(
    shown: Drawable | Sequence[Drawable],
    path: str | Path | None = None,
    *,
    costs: Costs | str | None = None,
    names: Sequence[str] | None = None,
    width: float | str | None = None,
    fold: int | None = None,
    font_size: float | None = None,
    title: str | None = None,
    palette: str = "kimi",
    grain: str | None = None,
    memory: bool = False,
    ranks: Iterable[int] | None = None,
    window: tuple[float, float] | None = None,
) -> Path | Picture:
    """Draw schedules, programs, traces or update plans; several stand above each other on one time axis.

    Several schedules get one model, the smallest that all of them cut evenly, as `treadle compare` gives them.
    A schedule that does not finish is drawn up to where it hangs, with the ops that wait for each other in red.

    Args:
        shown: what to draw, or a list.
        path: a figure (.svg, .png, .pdf) or a page to explore (.html); None for a picture that a notebook shows.
        costs: how long ops take, where that is not known: costs, a preset's name or a file. None is one unit an
            action; for a program of layers, the preset deepseek-v3-h800.
        names: of each, where there are several.
        width: inches, or column (3.3), text (5.5), slide (13.33); None is as wide as labels need, up to 10.
        fold: strips of time below each other; None is as many as labels need.
        font_size: of names, in points; None is 8, 7 in a column and 14 on a slide.
        title: None is what is drawn and its size, "" is none.
        palette: kimi, dualpipe, colourblind or grey.
        grain: cells or lanes; None is that of the program.
        memory: draw what each rank holds below.
        ranks: only these, without gaps.
        window: only from one time to another, in units of the trace's clock: units or microseconds.

    Returns:
        The path of the file, or the picture.

    Raises:
        ValueError: it cannot be drawn that way.
        ImportError: a figure needs matplotlib.

    Example:
        >>> schedules = [treadle.generate(name, pp=4, microbatches=8) for name in ("1f1b", "zb-h1")]
        >>> treadle.draw(schedules, "figure.svg", width="column", title="").name
        'figure.svg'

    """
    target = checked_path(path, (*SUFFIXES, PAGE)) if path is not None else None
    style = FigureStyle(width, fold, font_size, title, palette)
    several = isinstance(shown, Iterable) and not isinstance(shown, Drawable)
    listed: list[object] = list(shown) if several else [shown]  # type: ignore[arg-type]
    layers = _common_layers(listed)
    found = [prepared(each, costs, layers) for each in listed]
    if names is not None:
        found = [replace(each, name=name, title=name) for each, name in zip(found, names, strict=True)]
    if target is not None and target.suffix == PAGE:
        given = (width, fold, font_size, grain, ranks, window)
        if any(option is not None for option in given):
            raise ValueError("a page shows all of a step in its own size; width, fold and the like are for figures")
        return _page(found, target, style)
    chosen = _range(ranks)
    require_matplotlib()
    from treadle.view.figure import FigureContent

    sheet = _sheet(found, FigureContent(grain, memory, chosen, window), style)
    if target is None:
        return Picture(_svg(sheet))
    sheet.save(target)
    return target


def require_matplotlib() -> None:
    """Raise a MissingPackageError if figures cannot be drawn; pages need nothing."""
    with brought_by("view", needed_by="a figure (not a page, .html)"):
        if find_spec("matplotlib") is None:
            raise ModuleNotFoundError(name="matplotlib")


def picture(shown: Shown) -> Picture:
    """The figure of one object, as a notebook shows it."""
    return Picture(_svg(_sheet([shown], None, FigureStyle())))


def prepared(shown: object, costs: Costs | str | None = None, model_layers: int | None = None) -> Shown:
    """Find the times of an object: its own, or predicted ones. `model_layers` are those of a schedule's model."""
    if isinstance(shown, Trace):
        return Shown("", described(shown), shown)
    if isinstance(shown, UpdatePlan):
        shown = lower_update(stream_of(shown))
    if isinstance(shown, Program) and shown.layout.is_update:
        trace = simulate_update(shown)
        return Shown("update", described(trace), trace)
    if not isinstance(shown, Schedule | Program):
        raise ValueError(
            f"draw takes a Schedule, a Program, a Trace, an UpdatePlan or a list of them, got {type(shown).__name__}"
        )
    return _predicted(shown, costs, model_layers)


def _common_layers(listed: Sequence[object]) -> int | None:
    """The layers of a model that schedules of different numbers of stages share; None where chunks are alike."""
    stages = {each.placement.num_stages for each in listed if isinstance(each, Schedule)}
    return common_layers(stages) if len(stages) > 1 else None


def _predicted(shown: Schedule | Program, costs: Costs | str | None, model_layers: int | None) -> Shown:
    name = shown.name if isinstance(shown, Schedule) else ""
    program = lower_cells(shown) if isinstance(shown, Schedule) else shown
    if costs is None:
        costs = "deepseek-v3-h800" if program.layout.by_layer else "unit"
    taken = load_costs(costs) if isinstance(costs, str) else costs
    hangs = stopped(shown, taken)
    if hangs is not None:
        trace, hang, finding = hangs
        return Shown(name, f"{name}: {finding.message}" if name else finding.message, trace, hang)
    if isinstance(shown, Schedule) and model_layers is not None:
        program = lower(shown, taken, LoweringOptions(model_layers=model_layers))
    trace = simulate(program, taken)
    trace = with_assumptions(trace, taken)
    return Shown(name, f"{name}: {described(trace)}" if name else described(trace), trace)


def stopped(shown: Schedule | Program, costs: Costs) -> tuple[Trace, Hang, Finding] | None:
    """Run what does not finish up to where it hangs, with the finding that says why; None for what finishes."""
    program = lower_cells(shown) if isinstance(shown, Schedule) else shown
    found = run_to_hang(program, costs)
    if found is None:
        return None
    if isinstance(shown, Schedule):
        report = verify_schedule(shown)
    else:
        report = verify_program(program, durations(program, costs))
    return *found, report.findings[0]


def with_assumptions(trace: Trace, costs: Costs) -> Trace:
    """Add what the costs say about themselves to the line that a figure ends with."""
    if not costs.about:
        return trace
    layout = trace.program.layout
    of = "of a layer, " if layout.model_layers and not layout.by_layer else ""
    return replace(trace, about=f"{trace.about}: {of}{costs.about}")


def _sheet(found: Sequence[Shown], content: FigureContent | None, style: FigureStyle) -> Sheet:
    from treadle.view.figure import WHOLE, sheet_of

    many = len(found) > 1
    if style.title is None and not many and found:
        style = replace(style, title=found[0].title)
    names = [each.title for each in found]
    hangs = [each.hang for each in found]
    return sheet_of([each.trace for each in found], content or WHOLE, style, names=names, hangs=hangs)


def _svg(sheet: Sheet) -> str:
    """The SVG element, as wide as the page has room for."""
    file = BytesIO()
    sheet.save(file, "svg")
    text = file.getvalue().decode()
    return text[text.index("<svg") :].replace("<svg ", '<svg style="max-width: 100%; height: auto" ', 1)


def _page(found: Sequence[Shown], target: Path, style: FigureStyle) -> Path:
    from treadle.view.page import page

    if any(each.hang is not None for each in found):
        raise ValueError("a page shows a step that finishes; a figure (.svg) draws it up to where it hangs")
    named = [(each.name or ("measured" if each.trace.measured else "predicted"), each.trace) for each in found]
    target.write_text(page(named, style.palette, title=style.title), "utf-8")
    return target


def _range(ranks: Iterable[int] | None) -> range | None:
    if ranks is None or isinstance(ranks, range):
        return ranks
    listed = sorted(ranks)
    if not listed or listed != list(range(listed[0], listed[-1] + 1)):
        raise ValueError(f"ranks of a figure have no gaps, as range(0, 4), got {listed}")
    return range(listed[0], listed[-1] + 1)
