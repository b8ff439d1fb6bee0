"""A rank's lanes as text, cell by cell:

cell 11 (F7.0|B2.1)
  compute  attn 7.0   mlp' 2.1   mlpW 2.1   mlp 7.0   attn' 2.1   attnW 2.1
  ep       comb' 2.1   disp 7.0   disp' 2.1   comb 7.0
  pp       send B2.1 to 0   send F7.0 to 2
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from treadle.ir.ops import COPIES, LaneKind, OpKind, OpPart, OpPhase
from treadle.ir.program import Op, Program

_SHORT = {OpPart.DISPATCH: "disp", OpPart.COMBINE: "comb"}
_SUFFIX = {OpPhase.F: "", OpPhase.B: "'", OpPhase.W: "W", OpPhase.R: " again"}
NAMES: dict[OpKind, str] = {
    **{
        kind: _SHORT.get(kind.part, kind.part) + _SUFFIX[kind.phase]
        for kind in OpKind
        if kind.part is not None and kind.phase is not None and kind.blocks
    },
    **{kind: kind.name.lower() for kind in COPIES},
}

_ROWS = (
    ("compute", (LaneKind.COMPUTE,)),
    ("ep", (LaneKind.EP,)),
    ("host", (LaneKind.HOST,)),
    ("pp", (LaneKind.SEND,)),
    ("out", (LaneKind.OUT,)),
    ("in", (LaneKind.IN,)),
)

_ENDING = (
    ("dp", LaneKind.DP),
    ("tp", LaneKind.TP),
    ("tied", LaneKind.TIED),
    ("world", LaneKind.WORLD),
    ("compute", LaneKind.COMPUTE),
)


def lanes_text(program: Program, rank: int, cells: list[str]) -> str:
    """Describe a rank's work cell by cell; `cells` are the cells as the schedule writes them."""
    if not 0 <= rank < program.num_ranks:
        raise ValueError(f"ranks go from 0 to {program.num_ranks - 1}, got {rank}")
    mine = np.flatnonzero(program.lane_rank == rank)
    ops: dict[int, dict[LaneKind, list[Op]]] = {}
    for lane in mine:
        for index in range(program.lane_ptr[lane], program.lane_ptr[lane + 1]):
            op = program.op(index)
            ops.setdefault(op.cell, {}).setdefault(op.lane.kind, []).append(op)
    many = program.layout.max_layers > 1
    blocks = [_block(f"cell {number} {name}", ops.get(number, {}), many) for number, name in enumerate(cells)]
    rest = ops.get(-1, {})
    return "".join(blocks + _ending(rest))


def _ending(rest: dict[LaneKind, list[Op]]) -> list[str]:
    """Reductions, and what ends the step."""
    lines = [f"  {name:8} {'   '.join(map(str, rest[kind]))}\n" for name, kind in _ENDING if kind in rest]
    return ["at the end\n", *lines] if lines else []


def _block(title: str, lanes: dict[LaneKind, list[Op]], many: bool) -> str:
    return "\n".join([title, *_lines(lanes, many)]) + "\n"


def _lines(lanes: dict[LaneKind, list[Op]], many: bool) -> Iterator[str]:
    for name, kinds in _ROWS:
        found = sorted((op for kind in kinds for op in lanes.get(kind, [])), key=lambda op: op.index)
        if found:
            yield f"  {name:8} " + "   ".join(_token(op, many) for op in found)


def _token(op: Op, many: bool) -> str:
    if op.kind.is_send:
        return f"send {op.label} to {op.lane.peer}"
    if op.kind not in NAMES:
        return str(op)
    layer = f" L{op.layer}" if many and op.kind.has_layer else ""
    return f"{NAMES[op.kind]} {op.mb}.{op.chunk}{layer}"
