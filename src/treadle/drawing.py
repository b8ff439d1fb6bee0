"""`treadle.draw`: figures and pages of schedules, programs, traces and update plans, in files and in notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.api.verbs import checked_costs, checked_options, names_of
from treadle.costs import Costs
from treadle.host.extras import brought_by
from treadle.ir import Schedule
from treadle.ir.trace import Trace
from treadle.lowering.options import LoweringOptions
from treadle.step import SharedHang, Step, Target, steps_of
from treadle.verifier import Finding
from treadle.verifier.communicator_checks import SHARED
from treadle.view.described import described
from treadle.view.hang import Hang
from treadle.view.style import SUFFIXES, FigureStyle, checked_path

if TYPE_CHECKING:
    from treadle.view.figure import FigureContent
    from treadle.view.sheet import FigureSize, Sheet

PAGE = ".html"


@dataclass(frozen=True)
class Picture:
    """A figure as SVG, which a notebook shows."""

    svg: str

    def _repr_html_(self) -> str:
        return self.svg


@dataclass(frozen=True, eq=False)
class Shown:
    """What is drawn of a step: its trace and its title; and where it hangs and why, if it does not finish."""

    name: str
    title: str
    trace: Trace
    hang: Hang | None = None
    finding: Finding | None = None

    @classmethod
    def of(cls, step: Step) -> Shown:
        """Find the times of a step: its own, or predicted ones, up to where it hangs.

        Raises:
            ValueError: it is a schedule that finishes and is not sound.

        """
        try:
            trace = _with_assumptions(step)
        except ValueError:
            if step.hanging is None:
                raise
            trace, hang, finding = step.hanging
            return cls(step.name, _titled(step.name, finding.message), trace, hang, finding)
        return cls(step.name, _titled(step.name, described(trace)), trace)


def _titled(name: str, what: str) -> str:
    return f"{name}: {what}" if name else what


def _with_assumptions(step: Step) -> Trace:
    """Return the trace; a predicted one with what the costs assume, in the line that a figure ends with."""
    trace = step.trace
    if trace is step.target or step.is_update or not step.costs.about:
        return trace
    layout = trace.program.layout
    of = "of a layer, " if layout.model_layers and not layout.by_layer else ""
    return replace(trace, about=f"{trace.about}: {of}{step.costs.about}")


def draw(
    shown: Target | Sequence[Target],
    path: str | Path | None = None,
    *,
    costs: Costs | str = "unit",
    options: LoweringOptions | None = None,
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
        costs: how long ops take, where that is not known: costs, a preset's name or a file.
        options: of schedules: how they are lowered; by default to whole cells.
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
        TypeError: something else is to be drawn.
        ValueError: it cannot be drawn that way.
        ImportError: a figure needs matplotlib.

    Example:
        >>> schedules = [treadle.generate(name, pp=4, microbatches=8) for name in ("1f1b", "zb-h1")]
        >>> treadle.draw(schedules, "figure.svg", width="column", title="").name
        'figure.svg'

    """
    target = checked_path(path, (*SUFFIXES, PAGE)) if path is not None else None
    style = FigureStyle(width, fold, font_size, title, palette)
    several = isinstance(shown, Iterable) and not isinstance(shown, Target)
    listed: list[Any] = list(shown) if several else [shown]  # type: ignore[arg-type]
    for each in listed:
        if not isinstance(each, Target):
            raise TypeError(
                f"draw takes a Schedule, a Program, a Trace, an UpdatePlan or a list of them, got {type(each).__name__}"
            )
    if names is not None and len(names) != len(listed):
        raise ValueError(f"names are one for each of {len(listed)}, got {len(names)}")
    named = list(zip(names_of(listed), listed, strict=True))
    steps = steps_of(named, checked_costs(costs), checked_options(options))
    found = [Shown.of(replace(step, name=_own_name(step))) for step in steps]
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


def draw_circle(hang: SharedHang, path: Path) -> FigureSize:
    """Draw the ops that wait for each other on shared communicators, with what their ranks issue around them."""
    target = checked_path(path, SUFFIXES)
    require_matplotlib()
    from treadle.view.circle_figure import circle_sheet

    shared = SHARED[hang.judgement.communicators]
    return circle_sheet(hang.program, hang.issued, hang.judgement, f"Hangs with {shared}").save(target)


def require_matplotlib() -> None:
    """Raise a MissingPackageError if figures cannot be drawn; pages need nothing."""
    with brought_by("view", needed_by="a figure (not a page, .html)"):
        if find_spec("matplotlib") is None:
            raise ModuleNotFoundError(name="matplotlib")


def picture(shown: Shown) -> Picture:
    """Return the figure of one object, as a notebook shows it."""
    return Picture(_svg(_sheet([shown], None, FigureStyle())))


def _own_name(step: Step) -> str:
    """Return the name of a schedule; programs and traces have none."""
    return step.name if isinstance(step.target, Schedule) else ""


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
