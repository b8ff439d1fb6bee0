"""How a schedule is lowered: one options type, from the command line and Python down to the passes.

Messages name fields in backquotes, as Python writes them: `model_layers=64`. The command line prints its own options
instead (`treadle.cli.wording`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Integral

from treadle.costs import Costs
from treadle.ir import Schedule
from treadle.ir.blocks import check_order, with_dense
from treadle.ir.ops import WEIGHTS, OpKind, OpPhase, by_part
from treadle.passes.cut import cut_layers

PARTS = tuple(by_part(OpPhase.R))
"""The parts of a layer that can be recomputed."""


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


@dataclass(frozen=True)
class LoweringOptions:
    """How a schedule is lowered.

    Ops are whole cells, unless `layers` are given or an option works layer by layer: `by_layer`, `moe`, `padded`,
    `tied`, `buckets`, `recompute`, `split`, `offload`, `hold`, `early` and an `ep` above 1. Then ops are parts of
    layers on lanes.

    Raises:
        ValueError: a number is out of its range, or options exclude each other.

    Example:
        >>> LoweringOptions(layers=4, moe=True, ep=8).moe
        True

    """

    layers: int | tuple[int, ...] | None = None
    """Layers of a stage: one number for all stages, or one for each; ops are then parts of layers on lanes."""

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
    """MTP blocks after the layers, on the last stage. None: as many as the costs' [model] has."""

    by_layer: bool = False
    """With `model_layers`, `blocks` or costs of a model: ops are parts of layers on lanes, and not whole cells."""

    moe: bool = False
    """Layers exchange tokens with experts: dispatch and combine on a lane of their own."""

    padded: bool = False
    """Experts take a fixed number of tokens, so no counts are exchanged and no host waits for them."""

    embedding: bool | None = None
    """The first stage has an embedding before its layers. None: if the costs give it a time."""

    head: bool | None = None
    """The last stage has a head, which ends in the loss, after its layers. None: if the costs give it a time."""

    tied: tuple[tuple[int, ...], ...] = ()
    """Stages that share a parameter, for each such parameter: ((0, 7),) if the embedding of stage 0 is the head of
    stage 7. Their gradients are reduced together, after the last of them. A negative stage counts from the last."""

    buckets: int | tuple[tuple[int, ...], ...] | None = None
    """Blocks of a bucket: gradients are reduce-scattered bucket by bucket, while the rest of the backward runs, and
    parameters gathered in front of the first forward that reads them. Or the first blocks of each stage's buckets, from
    the last to 0. None: a chunk is reduced at once, and parameters are gathered where the step ends."""

    recompute: tuple[str, ...] = ()
    """Parts of a layer, "attn" and "mlp", that keep only their inputs and are recomputed before their backward."""

    early_recompute: bool | None = None
    """They are recomputed one exchange sooner than needed. None: whichever simulates faster."""

    split: tuple[OpKind, ...] = WEIGHTS
    """wgrads that run apart from their dgrads. A part left out here runs both in one op."""

    offload: bool = False
    """Saved activations are copied to the host and back, layer by layer."""

    hold: bool | None = None
    """Attention's wgrad waits for the next slot of its cell. None: whichever simulates faster."""

    early: bool | None = None
    """A lone backward runs the experts' wgrad during its dispatch. None: whichever simulates faster."""

    kept: float = 1.0
    """Fraction of the saved bytes, 0 to 1, that stays after the dgrad until the wgrad has run."""

    ep: int = 1
    """Ranks of an expert group. More than 1 needs `moe`."""

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
                "layers are given of each stage (`layers`), of the model (`model_layers`) or as blocks (`blocks`), "
                f"got {' and '.join(f'{name} {_listed(given[name])}' for name in said)}; leave out all but one"
            )
        if self.blocks is not None:
            check_order(self.blocks)
            if self.dense or self.mtp:
                raise ValueError(
                    f"blocks say which layers are dense (d) and where MTP blocks are (m), got {self._besides}"
                )
        if self.model_layers is not None and not _is_whole(self.model_layers, 1):
            raise ValueError(f"a model has at least 1 layer, got {self.model_layers}")
        layers = self.layers if isinstance(self.layers, tuple) else (self.layers,)
        if any(count is not None and not _is_whole(count, 0) for count in layers) or self.layers == 0:
            raise ValueError(f"layers of a stage are a whole number from 1, got {_listed(self.layers)}")
        for name in ("dense", "mtp"):
            if getattr(self, name) is not None and not _is_whole(getattr(self, name), 0):
                raise ValueError(f"{name} is a whole number from 0, got {getattr(self, name)}")
        for name in ("ep", "dp"):
            if not _is_whole(getattr(self, name), 1):
                raise ValueError(f"{name} is a whole number from 1, got {getattr(self, name)}")
        if isinstance(self.buckets, int) and self.buckets < 1:
            raise ValueError(f"a bucket has at least 1 block, got {self.buckets}")
        if not 0 <= self.kept <= 1:
            raise ValueError(f"the fraction kept after the dgrad is from 0 to 1, got {self.kept}")
        if self.ep > 1 and not self.moe:
            raise ValueError(f"expert parallelism needs MoE layers, got ep {self.ep}; add `layers=N` `moe=True`")
        recompute = (self.recompute,) if isinstance(self.recompute, str) else self.recompute
        if recompute != self.recompute or set(recompute) - set(PARTS) or len(set(recompute)) != len(recompute):
            raise ValueError(
                f"parts that are recomputed are attn and mlp, got {', '.join(recompute)}; give each once, in a tuple "
                "such as `recompute=('attn',)`"
            )
        if len(set(self.split)) != len(self.split) or set(self.split) - set(WEIGHTS):
            raise ValueError(
                f"wgrads that run apart are some of {', '.join(kind.name for kind in WEIGHTS)}, each once, "
                f"got {self.split!r}"
            )

    @property
    def _besides(self) -> str:
        return " and ".join(f"{name} {getattr(self, name)}" for name in ("dense", "mtp") if getattr(self, name))

    @property
    def asks_for_layers(self) -> str | None:
        """The first field given that works layer by layer."""
        return next(self._by_layer_fields(), None)

    def _by_layer_fields(self) -> Iterator[str]:
        flags = ("by_layer", "moe", "padded", "tied", "buckets", "recompute", "offload")
        yield from (name for name in flags if getattr(self, name))
        yield from ("split",) if self.split != WEIGHTS else ()
        yield from (name for name in ("hold", "early", "early_recompute") if getattr(self, name) is not None)

    def knows_layers(self, costs: Costs) -> bool:
        """Return True if the number of layers is given, here or by the costs' [model]."""
        given = (self.layers, self.model_layers, self.blocks)
        return any(each is not None for each in given) or bool(costs.model)

    def is_by_layer(self, costs: Costs) -> bool:
        """Return True if ops are parts of layers on lanes, False if they are whole cells.

        Raises:
            ValueError: an option works layer by layer, and nothing says how many layers there are.

        """
        asked = self.asks_for_layers
        if asked is not None and not self.knows_layers(costs):
            raise ValueError(
                f"`{asked}` works layer by layer, and how many layers there are is not known; add `model_layers=N`, or "
                "`layers=N` for each stage"
            )
        return self.layers is not None or asked is not None

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
            if self.dense or self.mtp:
                raise ValueError(
                    f"{self._besides} is of a model whose number of layers is not known; add `model_layers=N`, or "
                    "`layers=N` for each stage"
                )
            return ("",) * num_stages
        rows = ["t" * count for count in layers]
        dense = self.dense if self.dense is not None else costs.model.get("dense", 0)
        if dense > sum(layers):
            raise ValueError(f"a model of {sum(layers)} layers has at most as many dense ones, got {dense}")
        rows = list(with_dense(tuple(rows), dense))
        rows[0] = "E" * _has(self.embedding, "E", costs) + rows[0]
        rows[-1] += "m" * self._num_mtp(costs) + "L" * _has(self.head, "L", costs)
        return tuple(rows)

    def cut_buckets(self, blocks: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the first blocks of each stage's buckets; those cut by size are whole from the last block on."""
        size = self.buckets
        if isinstance(size, int):
            return tuple((*range(len(row) - size, 0, -size), 0) for row in blocks)
        for stage, (firsts, row) in enumerate(zip(size or (), blocks, strict=False)):
            if max(firsts, default=0) >= len(row):
                raise ValueError(
                    f"the buckets of stage {stage} begin at its blocks 0 to {len(row) - 1}, got {_listed(firsts)}"
                )
        return size or ()

    def cut_ties(self, num_stages: int) -> Iterator[tuple[int, ...]]:
        """Yield the stages of each tie, counted from the first."""
        for tie in self.tied:
            if not all(-num_stages <= stage < num_stages for stage in tie):
                raise ValueError(
                    f"a tie is of stages 0 to {num_stages - 1}, or from the last on -1 to {-num_stages}, "
                    f"got {_listed(tie)}"
                )
            yield tuple(sorted(stage % num_stages for stage in tie))

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
                    f"{num_stages} stages make {sum(layers)}; take costs of that model, or leave `layers` out"
                )
            return layers
        if said is not None and self.model_layers not in (None, said):
            raise ValueError(
                f"costs {costs.name!r} are of a model of {said} layers, got {self.model_layers}; "
                "leave `model_layers` out, or change [model] layers"
            )
        held = self.model_layers if self.model_layers is not None else said
        return cut_layers(held, num_stages) if held is not None else (0,) * num_stages

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


WHOLE_CELLS = LoweringOptions()
"""The defaults: ops are whole cells."""


def _has(said: bool | None, block: str, costs: Costs) -> bool:
    """True if the model has this end: as the options say, or else where the costs give it a time."""
    return said if said is not None else costs.has_block(block)


def _listed(layers: object) -> str:
    return ",".join(map(str, layers)) if isinstance(layers, tuple) else str(layers)
