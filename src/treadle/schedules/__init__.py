"""The schedules, by name. A new one is a file beside these, a line here, and a golden text in tests/."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, wraps
from importlib.metadata import entry_points
from typing import ParamSpec

from treadle.fields.nearest import did_you_mean
from treadle.ir import Schedule
from treadle.schedules import (
    dualpipe,
    dualpipev,
    gpipe,
    interleaved,
    interleaved_overlap,
    one_f_one_b,
    v_half,
    v_min,
    zb_h1,
    zb_v,
)
from treadle.schedules.family import Family, Size

SCHEDULES: dict[str, Family] = {
    "gpipe": gpipe.FAMILY,
    "1f1b": one_f_one_b.FAMILY,
    "interleaved": interleaved.FAMILY,
    "interleaved-overlap": interleaved_overlap.FAMILY,
    "zb-h1": zb_h1.FAMILY,
    "zb-v": zb_v.FAMILY,
    "v-half": v_half.FAMILY,
    "v-min": v_min.FAMILY,
    "dualpipe": dualpipe.FAMILY,
    "dualpipev": dualpipev.FAMILY,
}

_P = ParamSpec("_P")

ENTRY_POINT = "treadle.schedules"
"""Packages outside add a Family under this entry point."""


@cache
def known() -> dict[str, Family]:
    """Return the schedules here and those that installed packages bring."""
    found = dict(SCHEDULES)
    for point in entry_points(group=ENTRY_POINT):
        try:
            loaded = point.load()
        except Exception as error:  # whatever a foreign package does on import, the schedules here still work
            warnings.warn(f"schedule {point.name!r} of {point.value!r} does not load: {error!r}", stacklevel=2)
            continue
        if isinstance(loaded, Family) and point.name not in found:
            found[point.name] = loaded
        else:
            warnings.warn(
                f"schedule {point.name!r} of {point.value!r} is no Family, or its name is taken", stacklevel=2
            )
    return found


TORCH_NAMES = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved1f1b": "interleaved",
    "zbvzerobubble": "zb-v",
    "dualpipev": "dualpipev",
}
"""Schedules by the names that torch.distributed.pipelining gives them, in lower case and without "Schedule"."""


def is_known(name: str) -> bool:
    """Return True if there is a schedule of this name, in upper or lower case."""
    return name in known() or name.lower() in known()


def family(name: str) -> Family:
    """Return the schedule of this name, in upper or lower case.

    Raises:
        ValueError: there is none; the message names the nearest, also that of one of torch's, and all there are.

    """
    found = known().get(name) or known().get(name.lower())
    if found is None:
        way_out = did_you_mean(TORCH_NAMES.get(name.lower().removeprefix("schedule"), name), known())
        raise ValueError(f"{name!r} is not a schedule; {way_out} ('treadle schedules' describes them)")
    return found


def default_schedule(vpp: int = 1) -> str:
    """Return the name of the schedule that is meant where none is named: 1F1B, interleaved for several chunks a rank.

    Example:
        >>> default_schedule(), default_schedule(vpp=2)
        ('1f1b', 'interleaved')

    """
    return (interleaved.FAMILY if vpp > 1 else one_f_one_b.FAMILY).name


_MEANT = {
    **dict.fromkeys(("m", "mb", "num_mb", "num_microbatches", "n_microbatches", "micro_batches"), "microbatches"),
    **dict.fromkeys(("p", "ranks", "num_ranks", "stages", "num_stages", "pp_size"), "pp"),
    **dict.fromkeys(("v", "chunks", "num_chunks", "vp", "vpp_size"), "vpp"),
}
"""Keywords of `generate` by what is written for them by mistake."""


def _checks_keywords(function: Callable[_P, Schedule]) -> Callable[_P, Schedule]:
    """Give a function of sizes an error that names the right keyword."""

    @wraps(function)
    def checked(*args: _P.args, **sizes: _P.kwargs) -> Schedule:
        for name, value in sizes.items():
            if name not in ("name", *_MEANT.values()):
                meant = f"; write {_MEANT[name]}={value}" if name in _MEANT else ""
                raise TypeError(f"generate takes pp, vpp and microbatches, got {name}={value!r}{meant}")
        return function(*args, **sizes)

    return checked


@_checks_keywords
def generate(name: str, *, pp: int, vpp: int | None = None, microbatches: int) -> Schedule:
    """Generate a schedule.

    Args:
        name: one of those that `treadle schedules` lists.
        pp: ranks of the pipeline.
        vpp: chunks on each rank, where the schedule leaves a choice; None for its default.
        microbatches: of a step; with two pipes, of both together.

    Returns:
        The Schedule of all ranks.

    Raises:
        TypeError: a size is not a whole number.
        ValueError: there is no such schedule, or it cannot do this size; the message names the nearest size it can.

    Example:
        >>> generate("1f1b", pp=4, microbatches=8).num_cells
        64

    """
    chosen = family(name)
    for what, size in (("pp", pp), ("vpp", vpp), ("microbatches", microbatches)):
        if not isinstance(size, int) and not (what == "vpp" and size is None):
            raise TypeError(f"{what} is a whole number, an int, got {type(size).__name__} {size!r}")
    return chosen.generate(chosen.size(pp, vpp, microbatches))


__all__ = ["ENTRY_POINT", "SCHEDULES", "Family", "Size", "default_schedule", "family", "generate", "is_known", "known"]
