"""Costs fitted to a Trace: what was measured, as a table to predict other programs with."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from treadle.costs import Costs
from treadle.costs.format import SECTIONS
from treadle.ir.blocks import LAYERS
from treadle.ir.ops import MESSAGES, OpKind, OpPhase, by_part
from treadle.ir.program import Bools, Longs, Program
from treadle.ir.trace import Trace
from treadle.simulator.grouping import WORK, tally, work_of
from treadle.simulator.waiting import shortest

_MOVED = {name: [kind for kind in OpKind if kind.size_key == name] for name in SECTIONS["moved_bytes"].names}
_SAVED = {name: by_part(OpPhase.F)[name] for name in SECTIONS["saved_bytes"].names if name in by_part(OpPhase.F)}
_AGAIN = by_part(OpPhase.R)
_OF_LAYERS = [kind for kind in OpKind if kind.cost == "layer"]


def fit(trace: Trace) -> Costs:
    """Make costs of the median duration of each kind of work over all ranks.

    Ops that go together count with the shortest of their durations, which includes no wait. A whole backward is
    fitted as it ran: where its wgrad was not split off, its time is in the backward's. Sizes are taken from the
    program as far as it has them.

    Args:
        trace: usually a measured one, `pipe.gather_trace()`.

    Returns:
        Costs on the trace's clock; `treadle.costs.dump` writes them as TOML.

    Example:
        >>> unit = treadle.load_costs("unit")
        >>> trace = treadle.simulate(treadle.lower(treadle.generate("1f1b", pp=2, microbatches=2), unit), unit)
        >>> fit(trace).cell("f") == unit.cell("f")
        True

    """
    program = trace.program
    dur, dense = shortest(trace), _in_dense_layers(program)
    typical = _medians(program, dur, ~dense)
    return Costs(
        "fitted",
        trace.clock,
        cells={**_section(typical, "cells"), **_layers_of_cells(program)},
        layer=_section(typical, "layer"),
        dense=_section(_medians(program, dur, dense), "dense"),
        ends=_section(typical, "ends"),
        message=_section(typical, "message"),
        step=_section(typical, "step"),
        saved_bytes=_saved_bytes(program),
        moved_bytes=_moved_bytes(program),
        about=" ".join(("medians of the durations", *((f"of: {trace.about}",) if trace.about else ()))),
    )


def _in_dense_layers(program: Program) -> Bools:
    """`[op]`: is it a part of a dense layer. Where all layers are dense they are the layers, and none differs."""
    layout = program.layout
    letters = [[block for block in row if block in LAYERS] for row in layout.blocks]
    if not layout.by_layer or len({block for row in letters for block in row}) < 2:
        return np.zeros(program.num_ops, bool)
    table = np.zeros((len(letters), layout.max_layers), bool)
    for number, row in enumerate(letters):
        table[number, : len(row)] = [block == "d" for block in row]
    pp = program.lane_rank[program.lane_of] // layout.num_replicas
    stage = np.array(layout.placement.stages, np.int32)[pp, program.chunk]
    parts = np.isin(program.kind, _OF_LAYERS)
    dense: Bools = parts & table[stage, np.where(parts, program.layer, 0)]
    return dense


def _medians(program: Program, dur: Longs, chosen: Bools) -> dict[str, int]:
    """Ticks of each kind of work that occurs, by its name in costs: one name for all messages."""
    work = work_of(program).astype(np.int32)
    work[np.isin(work, MESSAGES)] = OpKind.SEND_F
    found = tally(work[chosen], len(WORK), dur[chosen])
    names = {**dict(enumerate(WORK)), int(OpKind.SEND_F): OpKind.SEND_F.cost_key}
    return {names[int(k)]: round(found.median[k]) for k in np.flatnonzero(found.num)}


def _section(typical: dict[str, int], section: str) -> dict[str, int]:
    return {name: typical[name] for name in SECTIONS[section].names if name in typical}


def _layers_of_cells(program: Program) -> dict[str, int]:
    """How many layers a chunk has, where that is known and they all have as many."""
    layout = program.layout
    known = not layout.by_layer and layout.model_layers > 0 and len(set(layout.layers)) == 1
    return {"layers": layout.layers[0]} if known else {}


def _saved_bytes(program: Program) -> dict[str, int]:
    """By part of a layer; the grain of cells knows no parts."""
    layout = program.layout
    if layout.saved_unit != "bytes":
        return {}
    sizes = _parts_of(layout.saved, "")
    return sizes | (_parts_of({**layout.saved, **layout.dense_saved}, "dense_") if layout.dense_saved else {})


def _parts_of(saved: Mapping[OpKind, int], prefix: str) -> dict[str, int]:
    """What parts save: of one that is recomputed, its inputs, and all of it."""
    sizes = {}
    for name, kind in _SAVED.items():
        again = _AGAIN.get(name)
        if kind not in saved or (prefix and again is None):
            continue
        sizes[prefix + name] = saved[kind] + (saved.get(again, 0) if again is not None else 0)
        if again in saved:
            sizes[f"{prefix}{name}_input"] = saved[kind]
    return sizes


def _moved_bytes(program: Program) -> dict[str, int]:
    """The usual size of what each kind moves, for the kinds that have one."""
    sized = program.size_bytes > 0
    moved = {name: program.size_bytes[sized & np.isin(program.kind, kinds)] for name, kinds in _MOVED.items()}
    return {name: round(float(np.median(sizes))) for name, sizes in moved.items() if len(sizes)}
