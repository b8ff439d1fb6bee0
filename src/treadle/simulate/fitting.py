"""Costs fitted to a Trace: what was measured, as a table to predict other programs with."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from treadle.costs import Costs
from treadle.costs.costs import CELLS, ENDS, LAYER, MESSAGE, WEIGHTS
from treadle.ir.program import Longs, OpKind, Program
from treadle.ir.trace import Trace
from treadle.simulate.grouping import WORK, tally, work_of
from treadle.simulate.waiting import shortest

_MESSAGES = (OpKind.SEND_F, OpKind.SEND_B, OpKind.RECV_F, OpKind.RECV_B)
_MOVED = {
    "send": _MESSAGES,
    "counts": (OpKind.COUNTS,),
    "dispatch": (OpKind.DISPATCH_F, OpKind.DISPATCH_B),
    "combine": (OpKind.COMBINE_F, OpKind.COMBINE_B),
    "reduce_grad": (OpKind.REDUCE_GRAD,),
}
_SAVED = {"attn": OpKind.ATTN_F, "mlp": OpKind.MLP_F, "embed": OpKind.EMBED_F, "head": OpKind.HEAD_F}


def fit(trace: Trace) -> Costs:
    """Make costs of the median duration of each kind of work over all ranks.

    Ops that go together count with the shortest of their durations, which includes no wait. A whole backward is
    fitted as it ran: where its weight half was not split off, its time is in the backward's. Sizes are taken from the
    program as far as it has them.

    Args:
        trace: usually a measured one, `pipe.trace`.

    Returns:
        Costs on the trace's clock; `treadle.costs.dump` writes them as TOML.

    Example:
        >>> unit = treadle.load_costs("unit")
        >>> trace = treadle.simulate(treadle.lower(treadle.generate("1f1b", pp=2, microbatches=2), unit), unit)
        >>> fit(trace).cell("f") == unit.cell("f")
        True

    """
    program = trace.program
    typical = _medians(program, shortest(trace))
    return Costs(
        "fitted",
        trace.clock,
        cells={**_section(typical, CELLS), **_layers_of_cells(program)},
        layer=_section(typical, (*LAYER, *WEIGHTS)),
        ends=_section(typical, ENDS),
        message=_section(typical, MESSAGE),
        saved_bytes=_saved_bytes(program),
        moved_bytes=_moved_bytes(program),
        about=" ".join(("medians of the durations", *((f"of: {trace.about}",) if trace.about else ()))),
    )


def _medians(program: Program, dur: Longs) -> dict[str, int]:
    """Ticks of each kind of work that occurs, by its name in costs: one name for all messages."""
    work = work_of(program).astype(np.int32)
    work[np.isin(work, _MESSAGES)] = OpKind.SEND_F
    found = tally(work, len(WORK), dur)
    names = {**dict(enumerate(WORK)), int(OpKind.SEND_F): "send"}
    return {names[int(k)]: round(found.median[k]) for k in np.flatnonzero(found.num)}


def _section(typical: dict[str, int], names: Iterable[str]) -> dict[str, int]:
    return {name: typical[name] for name in names if name in typical}


def _layers_of_cells(program: Program) -> dict[str, int]:
    """How many layers a chunk has, where that is known and they all have as many."""
    layout = program.layout
    known = not layout.by_layer and layout.model_layers > 0 and len(set(layout.layers)) == 1
    return {"layers": layout.layers[0]} if known else {}


def _saved_bytes(program: Program) -> dict[str, int]:
    """By part of a layer; the grain of cells knows no parts."""
    saved = program.layout.saved if program.layout.saved_unit == "bytes" else {}
    return {name: saved[kind] for name, kind in _SAVED.items() if kind in saved}


def _moved_bytes(program: Program) -> dict[str, int]:
    """The usual size of what each kind moves, for the kinds that have one."""
    sized = program.size_bytes > 0
    moved = {name: program.size_bytes[sized & np.isin(program.kind, kinds)] for name, kinds in _MOVED.items()}
    return {name: round(float(np.median(sizes))) for name, sizes in moved.items() if len(sizes)}
