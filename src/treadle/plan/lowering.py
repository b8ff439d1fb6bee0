"""All passes in a row, with the choices among them made by simulation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from treadle.costs import Costs, durations
from treadle.ir import Action, Cell, Schedule
from treadle.ir.program import OpKind, Program
from treadle.passes.cells import lower_cells
from treadle.passes.cut import cut_layers
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
    """How a schedule is lowered.

    Raises:
        ValueError: a number is out of its range, or options need `layers` and there are none.

    Example:
        >>> LoweringOptions(layers=4, ep=8).moe
        True

    """

    layers: int | tuple[int, ...] | None = None
    """Layers of a stage: one number for all stages, or one for each; ops are then parts of layers on lanes. None lowers
    to whole cells, unless `by_layer`; then no other field applies but `model_layers`, `ep`, `dp` and `every_gpu`."""

    model_layers: int | None = None
    """Layers of the whole model, which the schedule cuts into its stages as evenly as it can: where they do not divide,
    earlier stages have one more (`treadle.passes.cut.cut_layers`). So every schedule has the same model. Instead of
    `layers`. None: as many as the costs' [model] has; without one the layers of a stage are not known, and a chunk is a
    chunk under every schedule."""

    by_layer: bool = False
    """With `model_layers`: ops are parts of layers on lanes, as with `layers`, and not whole cells."""

    moe: bool = True
    """Layers exchange tokens with experts: dispatch and combine on a lane of their own."""

    padded: bool = False
    """Experts take a fixed number of tokens, so no counts are exchanged and no host waits for them."""

    embedding: bool | None = None
    """The first stage has an embedding before its layers. None: if the costs give it a time."""

    head: bool | None = None
    """The last stage has a head, which ends in the loss, behind its layers. None: if the costs give it a time."""

    split: tuple[OpKind, ...] = (OpKind.MLP_W, OpKind.ATTN_W, OpKind.HEAD_W)
    """Weight halves that run apart from their backward. A part left out here runs both halves in one op."""

    offload: bool = False
    """Saved activations are copied to the host and back, layer by layer. Needs `layers`."""

    hold: bool | None = None
    """Attention's weight half waits for the next slot of its cell. None: whichever simulates faster."""

    early: bool | None = None
    """A lone backward runs the experts' weight half during its dispatch. None: whichever simulates faster."""

    kept: float = 1.0
    """Fraction of the saved bytes, 0 to 1, that stays after the input half until the weight half has run."""

    ep: int = 1
    """Ranks of an expert group. More than 1 needs `layers` and `moe`."""

    dp: int = 1
    """Replicas of each expert group, whose gradients are reduced."""

    every_gpu: bool = False
    """Give every GPU of the mesh lanes of its own: `ep * dp` times as many ops. Otherwise one pipeline stands for all,
    as they are alike."""

    def __post_init__(self) -> None:
        if self.layers is not None and self.model_layers is not None:
            raise ValueError(
                f"layers are given of each stage ({_listed(self.layers)}) or of the whole model ({self.model_layers}); "
                "leave out --layers or --model-layers"
            )
        if self.model_layers is not None and self.model_layers < 1:
            raise ValueError(f"a model has at least 1 layer, got {self.model_layers}")
        if not self.by_lanes and self.offload:
            raise ValueError("offload works layer by layer; say how many layers a chunk has, for example --layers 4")
        for name in ("ep", "dp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is a whole number from 1, got {getattr(self, name)}")
        if not 0 <= self.kept <= 1:
            raise ValueError(f"the fraction kept after the input half is from 0 to 1, got {self.kept}")
        if self.ep > 1 and not (self.moe and self.by_lanes):
            raise ValueError("expert parallelism needs MoE layers; add --layers N --moe")

    @property
    def by_lanes(self) -> bool:
        """True if ops are parts of layers on lanes, False if they are whole cells."""
        return self.layers is not None or self.by_layer

    def cut(self, schedule: Schedule, costs: Costs) -> LoweringOptions:
        """Return the options with the layers of each stage in `layers`, 0 where they are not known.

        Raises:
            ValueError: the model has fewer layers than stages, or not as many as the costs say.

        """
        said = costs.model.get("layers")
        num_stages = schedule.placement.num_stages
        if self.layers is not None:
            total = sum(self.layers) if isinstance(self.layers, tuple) else self.layers * num_stages
            if said is not None and total != said:
                raise ValueError(
                    f"costs {costs.name!r} are of a model of {said} layers, and layers {_listed(self.layers)} on "
                    f"{num_stages} stages make {total}; take costs of that model, or leave --layers out"
                )
            return self
        if said is not None and self.model_layers not in (None, said):
            raise ValueError(
                f"costs {costs.name!r} are of a model of {said} layers, got {self.model_layers}; "
                "leave --model-layers out, or change [model] layers"
            )
        held = self.model_layers if self.model_layers is not None else said
        if held is None:
            if self.by_layer:
                raise ValueError("the grain of layers needs their number; add --layers N or --model-layers N")
            return replace(self, layers=(0,) * num_stages)
        return replace(self, layers=cut_layers(held, num_stages), model_layers=None)


def lower(schedule: Schedule, costs: Costs, options: LoweringOptions = LoweringOptions()) -> Program:  # noqa: B008
    """Lower a schedule to a Program: ops on lanes, with what they wait for.

    Args:
        schedule: verified or not.
        costs: durations, by which launches are ordered and `hold` and `early` are chosen, and sizes in bytes.
        options: by default whole cells.

    Raises:
        ValueError: options do not fit the schedule.

    Example:
        >>> schedule, costs = treadle.generate("1f1b", pp=2, microbatches=4), treadle.load_costs("deepseek-v3-h800")
        >>> lower(schedule, costs, LoweringOptions(layers=1)).num_ranks
        2

    """
    by_lanes, options = options.by_lanes, options.cut(schedule, costs)
    if not by_lanes:
        program = _with_layers(lower_cells(schedule), costs, options)
    else:
        shape = choose(schedule, costs, options)
        program = lower_layers(schedule, shape, reduce=options.ep * options.dp > 1)
        program = order_launches(program, durations(program, costs))
    return spread(program, ep=options.ep, dp=options.dp) if options.every_gpu else program


def _with_layers(program: Program, costs: Costs, options: LoweringOptions) -> Program:
    """Tell a Program at the grain of cells the layers of its stages, and what each layer saves."""
    assert isinstance(options.layers, tuple)
    if not any(options.layers):
        return program
    ends = {"embedding": _has(options.embedding, "embed", costs), "head": _has(options.head, "head", costs)}
    saved, unit = _saved(costs, **ends)
    of_layer = saved.pop(OpKind.ATTN_F) + saved.pop(OpKind.MLP_F) if unit == "bytes" else 1
    ends_saved = {kind: size for kind, size in saved.items() if unit == "bytes"}
    saved = {OpKind.F: of_layer, **ends_saved}
    return replace(program, layout=replace(program.layout, layers=options.layers, saved=saved, saved_unit=unit))


def choose(schedule: Schedule, costs: Costs, options: LoweringOptions) -> Shape:
    """The shape with the weight halves where the step is shortest.

    Whether holding one back pays depends on what it has to hide: it gains where a backward's first all-to-all leaves
    compute idle, and loses where pipeline messages are slow. So each choice is simulated, over the first micro-batches.
    """
    shape = _shape(costs, options.cut(schedule, costs))
    can_split = OpKind.ATTN_W in options.split
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
    saved, unit = _saved(costs, embedding=embedding, head=head)
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
        saved_unit=unit,
    )


def _saved(costs: Costs, *, embedding: bool, head: bool) -> tuple[dict[OpKind, int], str]:
    """What parts save, and its unit: bytes if the costs say them for every part, else each layer counts."""
    if costs.unsaved(embedding=embedding, head=head):
        return {OpKind.ATTN_F: 1, OpKind.MLP_F: 1}, "layers"
    ends = {OpKind.EMBED_F: embedding, OpKind.HEAD_F: head}
    there = [OpKind.ATTN_F, OpKind.MLP_F, *(kind for kind, has in ends.items() if has)]
    return {kind: costs.saved_parts[kind.name.lower().removesuffix("_f")] for kind in there}, "bytes"


def _has(said: bool | None, end: str, costs: Costs) -> bool:
    """True if this end of the model is there: as the options say, or else where the costs give it a time."""
    return said if said is not None else costs.has_end(end)


def _listed(layers: int | tuple[int, ...]) -> str:
    return ",".join(map(str, layers)) if isinstance(layers, tuple) else str(layers)


def first_microbatches(schedule: Schedule, num_mb: int) -> Schedule:
    """Keep only the first micro-batches of each pipe, in the order they have."""
    if schedule.microbatches_per_pipe <= num_mb:
        return schedule

    def kept(cell: Cell) -> list[Cell]:
        inside = [action for action in cell.actions if action.mb < num_mb]
        return [cell] if len(inside) == len(cell.actions) else list[Cell | Action](inside)

    rows = tuple(tuple(part for cell in row for part in kept(cell)) for row in schedule.rows)
    return replace(schedule, rows=rows, num_microbatches=num_mb * schedule.placement.num_pipes, receives={})
