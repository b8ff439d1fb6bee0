"""All passes in a row, with the choices among them made by simulation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product

from treadle.costs import Costs, durations
from treadle.costs.unequal import mb_saved
from treadle.ir import Action, Cell, Schedule
from treadle.ir.blocks import check_order, with_dense
from treadle.ir.program import RECOMPUTE, OpKind, Program
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
    OpKind.REDUCE_TIED,
)
_RECOMPUTE = {"attn": OpKind.ATTN_R, "mlp": OpKind.MLP_R}


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

    blocks: tuple[str, ...] | None = None
    """The blocks of each stage, a string of letters each: E embedding, d dense layer, t MoE layer (or just a layer), m
    MTP block, L head with the loss (`treadle.ir.blocks.parse_layout` reads Megatron's layout strings). Instead of
    `layers`, `model_layers`, `dense` and `mtp`."""

    dense: int | None = None
    """Layers, from the first on, that are dense: they exchange nothing with experts, and take what the costs' [dense]
    says. None: as many as the costs' [model] has."""

    mtp: int | None = None
    """MTP blocks behind the layers, on the last stage. None: as many as the costs' [model] has."""

    by_layer: bool = False
    """With `model_layers` or `blocks`: ops are parts of layers on lanes, as with `layers`, and not whole cells."""

    moe: bool = True
    """Layers exchange tokens with experts: dispatch and combine on a lane of their own."""

    padded: bool = False
    """Experts take a fixed number of tokens, so no counts are exchanged and no host waits for them."""

    embedding: bool | None = None
    """The first stage has an embedding before its layers. None: if the costs give it a time."""

    head: bool | None = None
    """The last stage has a head, which ends in the loss, behind its layers. None: if the costs give it a time."""

    tied: tuple[tuple[int, ...], ...] = ()
    """Stages that share a parameter, for each such parameter: ((0, 7),) if the embedding of stage 0 is the head of
    stage 7. Their gradients are reduced together, after the last of them. A negative stage counts from the last. At the
    grain of layers."""

    recompute: tuple[str, ...] = ()
    """Parts of a layer, "attn" and "mlp", that keep only their inputs and are computed again before their backward. At
    the grain of layers."""

    early_recompute: bool | None = None
    """They are computed again one exchange sooner than needed. None: whichever simulates faster."""

    split: tuple[OpKind, ...] = (OpKind.MLP_W, OpKind.ATTN_W, OpKind.MTP_W, OpKind.HEAD_W)
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
        given = {"layers": self.layers, "model_layers": self.model_layers, "blocks": self.blocks}
        said = [name for name, value in given.items() if value is not None]
        if len(said) > 1:
            raise ValueError(
                "layers are given of each stage (--layers), of the model (--model-layers) or as blocks (--layout), "
                f"got {' and '.join(f'{name} {_listed(given[name])}' for name in said)}; leave out all but one"
            )
        if self.blocks is not None:
            check_order(self.blocks)
            if self.dense or self.mtp:
                raise ValueError(
                    f"blocks say which layers are dense (d) and where MTP blocks are (m), got {self._besides}"
                )
        if self.model_layers is not None and self.model_layers < 1:
            raise ValueError(f"a model has at least 1 layer, got {self.model_layers}")
        for name in ("dense", "mtp"):
            if getattr(self, name) is not None and getattr(self, name) < 0:
                raise ValueError(f"{name} is a whole number from 0, got {getattr(self, name)}")
        if not self.by_lanes:
            self._check_by_lanes()
        for name in ("ep", "dp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is a whole number from 1, got {getattr(self, name)}")
        if not 0 <= self.kept <= 1:
            raise ValueError(f"the fraction kept after the input half is from 0 to 1, got {self.kept}")
        if self.ep > 1 and not (self.moe and self.by_lanes):
            raise ValueError("expert parallelism needs MoE layers; add --layers N --moe")
        unknown = [part for part in self.recompute if part not in _RECOMPUTE]
        if unknown or len(set(self.recompute)) != len(self.recompute):
            raise ValueError(f"parts that are computed again are attn and mlp, got {', '.join(self.recompute)}")

    @property
    def _besides(self) -> str:
        return " and ".join(f"{name} {getattr(self, name)}" for name in ("dense", "mtp") if getattr(self, name))

    def _check_by_lanes(self) -> None:
        """Refuse what works layer by layer where ops are whole cells."""
        for what, given in (("offload", self.offload), ("recomputation", self.recompute), ("a tie", self.tied)):
            if given:
                raise ValueError(
                    f"{what} works layer by layer; say how many layers a chunk has, for example --layers 4"
                )

    @property
    def by_lanes(self) -> bool:
        """True if ops are parts of layers on lanes, False if they are whole cells."""
        return self.layers is not None or self.by_layer

    def cut(self, schedule: Schedule, costs: Costs) -> tuple[str, ...]:
        """Return the blocks of each stage; empty ones where they are not known.

        Raises:
            ValueError: the model has fewer layers than stages, or not as many as the costs say.

        """
        num_stages = schedule.placement.num_stages
        if self.blocks is not None:
            self._check_blocks(num_stages, costs)
            return self.blocks
        layers = self._layers(num_stages, costs)
        if not any(layers):
            return ("",) * num_stages
        rows = ["t" * count for count in layers]
        dense = self.dense if self.dense is not None else costs.model.get("dense", 0)
        if dense > sum(layers):
            raise ValueError(f"a model of {sum(layers)} layers has at most as many dense ones, got {dense}")
        rows = list(with_dense(tuple(rows), dense))
        rows[0] = "E" * _has(self.embedding, "E", costs) + rows[0]
        rows[-1] += "m" * self._num_mtp(costs) + "L" * _has(self.head, "L", costs)
        return tuple(rows)

    def _num_mtp(self, costs: Costs) -> int:
        said = costs.model.get("mtp", 0)
        return self.mtp if self.mtp is not None else said

    def _layers(self, num_stages: int, costs: Costs) -> tuple[int, ...]:
        """The layers of each stage; 0 where they are not known."""
        said = costs.model.get("layers")
        if self.layers is not None:
            layers = self.layers if isinstance(self.layers, tuple) else (self.layers,) * num_stages
            if len(layers) != num_stages or (min(layers) < 1 and any(layers)):
                raise ValueError(
                    f"layers are one number from 1, or one for each of {num_stages} stages, got {_listed(self.layers)}"
                )
            if said is not None and sum(layers) != said:
                raise ValueError(
                    f"costs {costs.name!r} are of a model of {said} layers, and layers {_listed(self.layers)} on "
                    f"{num_stages} stages make {sum(layers)}; take costs of that model, or leave --layers out"
                )
            return layers
        if said is not None and self.model_layers not in (None, said):
            raise ValueError(
                f"costs {costs.name!r} are of a model of {said} layers, got {self.model_layers}; "
                "leave --model-layers out, or change [model] layers"
            )
        held = self.model_layers if self.model_layers is not None else said
        if held is None:
            if self.by_layer:
                raise ValueError("the grain of layers needs their number; add --layers N or --model-layers N")
            return (0,) * num_stages
        return cut_layers(held, num_stages)

    def _check_blocks(self, num_stages: int, costs: Costs) -> None:
        assert self.blocks is not None
        said, made = costs.model.get("layers"), sum(row.count("d") + row.count("t") for row in self.blocks)
        if len(self.blocks) != num_stages:
            raise ValueError(
                f"the layout has {len(self.blocks)} stages ({'|'.join(self.blocks)}), the schedule {num_stages}; "
                "give as many, divided by |"
            )
        if said is not None and made != said:
            raise ValueError(f"costs {costs.name!r} are of a model of {said} layers, and the layout has {made}")


_WHOLE_CELLS = LoweringOptions()


def lower(schedule: Schedule, costs: Costs, options: LoweringOptions = _WHOLE_CELLS) -> Program:
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
    if not options.by_lanes:
        program = _with_blocks(lower_cells(schedule), schedule, costs, options)
    else:
        shape = choose(schedule, costs, options)
        program = lower_layers(schedule, shape, reduce=options.ep * options.dp > 1)
        program = order_launches(program, durations(program, costs))
    return spread(program, ep=options.ep, dp=options.dp) if options.every_gpu else program


def _with_blocks(program: Program, schedule: Schedule, costs: Costs, options: LoweringOptions) -> Program:
    """Tell a Program at the grain of cells the blocks of its stages, and what each saves."""
    blocks = options.cut(schedule, costs)
    layout = replace(program.layout, blocks=blocks)
    if not any(blocks):
        return replace(program, layout=layout)
    saved, dense, unit = _saved(costs, options, blocks)
    if unit == "layers":
        return replace(program, layout=replace(layout, saved={OpKind.F: 1}, saved_unit=unit))
    of_layer, of_dense = ({OpKind.F: sizes.pop(OpKind.ATTN_F) + sizes.pop(OpKind.MLP_F)} for sizes in (saved, dense))
    different = of_dense if of_dense != of_layer else {}
    layout = replace(
        layout,
        saved={**of_layer, **saved},
        dense_saved=different,
        saved_unit=unit,
        stage_scale=costs.stage_factors("saved_factor", len(blocks)),
        mb_scale=mb_saved(schedule.num_microbatches, costs),
    )
    return replace(program, layout=layout)


def choose(schedule: Schedule, costs: Costs, options: LoweringOptions) -> Shape:
    """The shape with weight halves, and what is computed again, where the step is shortest.

    Whether holding one back pays depends on what it has to hide: it gains where a backward's first all-to-all leaves
    compute idle, and loses where pipeline messages are slow. So each choice is simulated, over the first micro-batches.
    """
    shape = _shape(schedule, costs, options)
    can_split = OpKind.ATTN_W in options.split
    holds = (False, True) if options.hold is None and can_split else (bool(options.hold),)
    earlies = (False, True) if options.early is None and options.split else (bool(options.early),)
    agains = (
        (False, True) if options.early_recompute is None and options.recompute else (bool(options.early_recompute),)
    )
    shapes = [
        replace(shape, hold_attn_w=hold, early_mlp_w=early, early_recompute=again)
        for hold, early, again in product(holds, earlies, agains)
    ]
    if len(shapes) == 1:
        return shapes[0]
    alike = not costs.microbatch
    sample = first_microbatches(schedule, max(_SAMPLE_MICROBATCHES, 2 * schedule.pp)) if alike else schedule
    return min(shapes, key=lambda candidate: simulate(lower_layers(sample, candidate), costs).makespan)


def _shape(schedule: Schedule, costs: Costs, options: LoweringOptions) -> Shape:
    blocks = options.cut(schedule, costs)
    saved, dense, unit = _saved(costs, options, blocks)
    num_stages = schedule.placement.num_stages
    return Shape(
        blocks=blocks,
        moe=options.moe,
        counts=not options.padded,
        split=options.split,
        recompute=tuple(_RECOMPUTE[part] for part in options.recompute),
        offload=options.offload,
        saved=saved,
        dense_saved={kind: size for kind, size in dense.items() if saved[kind] != size},
        moved={kind: costs.message_bytes(kind) for kind in _MOVED},
        kept=options.kept,
        saved_unit=unit,
        tied=tuple(tuple(sorted(stage % num_stages for stage in tie)) for tie in options.tied),
        step_end=costs.step_end,
        stage_scale=costs.stage_factors("saved_factor", num_stages) if unit == "bytes" else (),
        mb_scale=mb_saved(schedule.num_microbatches, costs) if unit == "bytes" else (),
    )


def with_saved(program: Program, costs: Costs, options: LoweringOptions) -> Program:
    """Tell a Program at the grain of layers what its ops save under other costs than those it was lowered with."""
    saved, dense, unit = _saved(costs, options, program.layout.blocks)
    different = {kind: size for kind, size in dense.items() if saved[kind] != size}
    return replace(program, layout=replace(program.layout, saved=saved, dense_saved=different, saved_unit=unit))


def _saved(
    costs: Costs, options: LoweringOptions, blocks: tuple[str, ...]
) -> tuple[dict[OpKind, int], dict[OpKind, int], str]:
    """What ops save, what they save in dense layers, and the unit: bytes if the costs say them for every part."""
    letters = "".join(blocks)
    if costs.unsaved(letters):
        return _counted(options)
    sizes = costs.saved_parts
    saved = _parts_saved(sizes, options.recompute, "")
    dense = _parts_saved(sizes, options.recompute, "dense_")
    besides = {"E": OpKind.EMBED_F, "m": OpKind.MTP_F, "L": OpKind.HEAD_F}
    saved |= {kind: sizes[kind.name.lower().removesuffix("_f")] for block, kind in besides.items() if block in letters}
    return saved, dense, "bytes"


def _counted(options: LoweringOptions) -> tuple[dict[OpKind, int], dict[OpKind, int], str]:
    """Layers are counted: a part is half of one; one that is computed again counts from then on."""
    saved = {OpKind.ATTN_F: 1, OpKind.MLP_F: 1}
    for part in options.recompute:
        again = _RECOMPUTE[part]
        saved[RECOMPUTE[again]], saved[again] = 0, 1
    return saved, dict(saved), "layers"


def _parts_saved(sizes: Mapping[str, int], recompute: tuple[str, ...], prefix: str) -> dict[OpKind, int]:
    """What attention and MLP save; where one is computed again, its inputs first and the rest then."""
    saved = {}
    for part, again in _RECOMPUTE.items():
        whole = sizes.get(f"{prefix}{part}", sizes[part])
        kept = sizes.get(f"{prefix}{part}_input", sizes.get(f"{part}_input", 0))
        if part in recompute:
            saved[RECOMPUTE[again]], saved[again] = min(kept, whole), whole - min(kept, whole)
        else:
            saved[RECOMPUTE[again]] = whole
    return saved


def _has(said: bool | None, block: str, costs: Costs) -> bool:
    """True if the model has this end: as the options say, or else where the costs give it a time."""
    return said if said is not None else costs.has_block(block)


def _listed(layers: object) -> str:
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
