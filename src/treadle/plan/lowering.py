"""All passes in a row, with the choices among them made by simulation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from treadle.costs import Costs, durations
from treadle.ir import Action, Cell, Schedule
from treadle.ir.program import OpKind, Program
from treadle.passes.cells import lower_cells
from treadle.passes.launch import order_launches
from treadle.passes.layers import Shape
from treadle.passes.lower import lower_layers
from treadle.passes.mesh import spread
from treadle.simulate import simulate

_MOVED = (
    OpKind.SEND_F,
    OpKind.SEND_B,
    OpKind.RECV_F,
    OpKind.RECV_B,
    OpKind.COUNTS,
    OpKind.DISPATCH_F,
    OpKind.COMBINE_F,
    OpKind.COMBINE_B,
    OpKind.DISPATCH_B,
    OpKind.OFFLOAD,
    OpKind.ONLOAD,
    OpKind.REDUCE_GRAD,
)


_SAMPLE_MICROBATCHES = 8
"""The fewest over which choices are compared: the middle of a step must outweigh its ends."""


@dataclass(frozen=True)
class LoweringOptions:
    """How a schedule is lowered. Without `layers` the grain is the cell, and nothing else applies but the mesh.

    `hold`: attention's weight half waits for the next slot; `early`: a lone backward runs the experts' weight half
    during its dispatch. Where they are None, whatever simulates faster is taken.
    `embedding`, `head`: does the first stage have one before its layers, and the last one (with the loss) behind them.
    Where they are None, they are there if the costs give them a time.
    """

    layers: int | tuple[int, ...] | None = None
    moe: bool = True
    padded: bool = False
    embedding: bool | None = None
    head: bool | None = None
    split: tuple[OpKind, ...] = (OpKind.MLP_W, OpKind.ATTN_W, OpKind.HEAD_W)
    offload: bool = False
    hold: bool | None = None
    early: bool | None = None
    kept: float = 1.0
    ep: int = 1
    dp: int = 1
    every_gpu: bool = False

    def __post_init__(self) -> None:
        if self.layers is None and self.offload:
            raise ValueError("offload works layer by layer; say how many layers a chunk has, for example --layers 4")
        for name in ("ep", "dp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is a whole number from 1, got {getattr(self, name)}")
        if not 0 <= self.kept <= 1:
            raise ValueError(f"the fraction kept after the input half is from 0 to 1, got {self.kept}")
        if self.ep > 1 and not (self.moe and self.layers is not None):
            raise ValueError("expert parallelism needs MoE layers; add --layers N --moe")


def lower(schedule: Schedule, costs: Costs, options: LoweringOptions) -> Program:
    """The Program of a schedule, verified or not; every pipeline of the mesh is alike, so one is made and spread."""
    if options.layers is None:
        program = lower_cells(schedule)
    else:
        shape = choose(schedule, costs, options)
        program = lower_layers(schedule, shape, reduce=options.ep * options.dp > 1)
        program = order_launches(program, durations(program, costs))
    return spread(program, ep=options.ep, dp=options.dp) if options.every_gpu else program


def choose(schedule: Schedule, costs: Costs, options: LoweringOptions) -> Shape:
    """The shape with the weight halves where the step is shortest.

    Whether holding one back pays depends on what it has to hide: it gains where a backward's first all-to-all leaves
    compute idle, and loses where pipeline messages are slow. So each choice is simulated, over the first micro-batches.
    """
    shape = _shape(costs, options)
    can_split = options.layers is not None and OpKind.ATTN_W in options.split
    holds = (False, True) if options.hold is None and can_split else (bool(options.hold),)
    earlies = (False, True) if options.early is None and options.split else (bool(options.early),)
    shapes = [replace(shape, hold_attn_w=hold, early_mlp_w=early) for hold, early in product(holds, earlies)]
    if len(shapes) == 1:
        return shapes[0]
    sample = first_microbatches(schedule, max(_SAMPLE_MICROBATCHES, 2 * schedule.pp))
    return min(shapes, key=lambda candidate: simulate(lower_layers(sample, candidate), costs).makespan)


def _shape(costs: Costs, options: LoweringOptions) -> Shape:
    assert options.layers is not None
    embedding, head = _has(options.embedding, "embed", costs), _has(options.head, "head", costs)
    saved = {OpKind.ATTN_F: costs.saved_bytes.get("attn", 0), OpKind.MLP_F: costs.saved_bytes.get("mlp", 0)}
    if embedding:
        saved[OpKind.EMBED_F] = costs.saved_bytes.get("embed", 0)
    if head:
        saved[OpKind.HEAD_F] = costs.saved_bytes.get("head", 0)
    return Shape(
        layers=options.layers,
        moe=options.moe,
        counts=not options.padded,
        embedding=embedding,
        head=head,
        split=options.split,
        offload=options.offload,
        saved=saved,
        moved={kind: costs.message_bytes(kind) for kind in _MOVED},
        kept=options.kept,
    )


def _has(said: bool | None, end: str, costs: Costs) -> bool:
    """Is this end of the model there: as was said, or where costs give it a time."""
    return said if said is not None else any(name.startswith(end) for name in costs.ends)


def first_microbatches(schedule: Schedule, num_mb: int) -> Schedule:
    """The same schedule with only the first micro-batches of each pipe: what is left keeps its order."""
    if schedule.microbatches_per_pipe <= num_mb:
        return schedule

    def kept(cell: Cell) -> list[Cell]:
        inside = [action for action in cell.actions if action.mb < num_mb]
        return [cell] if len(inside) == len(cell.actions) else list[Cell | Action](inside)

    rows = tuple(tuple(part for cell in row for part in kept(cell)) for row in schedule.rows)
    return replace(schedule, rows=rows, num_microbatches=num_mb * schedule.placement.num_pipes, receives={})
