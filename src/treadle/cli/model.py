"""Options about the model, the costs and the mesh, and the lowering of a schedule under them.

Methods import what they need: to show a schedule none of it is needed.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treadle.cli.options import parse_layers
from treadle.cli.slow import Slow
from treadle.cli.terminal import note, working
from treadle.ir import Schedule

if TYPE_CHECKING:
    from treadle.costs import Costs
    from treadle.ir.program import Program
    from treadle.ir.trace import Trace
    from treadle.plan import LoweringOptions
    from treadle.plan.folding import Folded


class Hold(StrEnum):
    """The place where attention's weight half runs."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


def _option(name: str, help: str) -> Any:
    return typer.Option(f"--{name}", help=help, rich_help_panel="The model and the mesh")


def layout_blocks(text: str, dense: int | None, costs: Costs) -> tuple[str, ...]:
    """Return the blocks of a layout, its first layers dense: as many as given; else as it says; else as the costs say.

    Megatron's strings do not tell dense layers from others.
    """
    from treadle.ir.blocks import parse_layout, with_dense

    blocks = parse_layout(text)
    layers = sum(row.count("t") for row in blocks)
    said = 0 if "d" in text else min(layers, costs.model.get("dense", 0))
    return with_dense(blocks, dense if dense is not None else said)


@dataclass(frozen=True)
class Model:
    """The options as given."""

    costs_name: Annotated[str, _option("costs", "How long ops take: unit, a preset, or a TOML file.")] = "unit"
    layers: Annotated[
        str | None,
        _option("layers", "Layers of a chunk: ops on lanes, not cells. One number, or one a stage: 4,4,3,3."),
    ] = None
    model_layers: Annotated[
        int | None,
        _option("model-layers", "Layers of the whole model, which each schedule cuts into its own stages: 64."),
    ] = None
    by_layer: Annotated[
        bool, _option("by-layer", "With --model-layers: ops on lanes, not cells, as --layers and --moe have them.")
    ] = False
    layout: Annotated[
        str | None,
        _option("layout", "Blocks of each stage, as Megatron writes them: 'Et|(tt|)*30L'; d is a dense layer."),
    ] = None
    dense: Annotated[int | None, _option("dense", "Layers, from the first on, that are dense.")] = None
    mtp: Annotated[
        int | None, _option("mtp", "MTP blocks on the last stage; a --layout says itself where they are.")
    ] = None
    tied: Annotated[bool, _option("tied", "Embedding and head share a parameter, which is reduced by itself.")] = False
    recompute: Annotated[
        str | None, _option("recompute", "Parts of a layer that are computed again: attn, mlp or attn,mlp.")
    ] = None
    moe: Annotated[bool, _option("moe", "MoE layers with expert all-to-all.")] = False
    padded: Annotated[bool, _option("padded", "Padded dispatch: no exchange of token counts.")] = False
    offload: Annotated[bool, _option("offload", "Activations to the host and back, layer by layer.")] = False
    no_split: Annotated[bool, _option("no-split", "Layers whose weight halves do not run apart.")] = False
    hold: Annotated[
        Hold, _option("hold", "Hold attention's weight half back into the next slot; auto simulates both.")
    ] = Hold.AUTO
    ep: Annotated[int, _option("ep", "Expert parallelism.")] = 1
    dp: Annotated[int, _option("dp", "Data parallelism.")] = 1
    every_gpu: Annotated[bool, _option("every-gpu", "Every GPU of the mesh is a rank; else alike ones are one.")] = (
        False
    )

    @cached_property
    def costs(self) -> Costs:
        """The costs named."""
        from treadle.costs import load_costs

        return load_costs(self.costs_name)

    @property
    def knows_layers(self) -> bool:
        """True if the number of layers is given, by an option or by the costs."""
        said = (self.layers, self.model_layers, self.layout)
        return any(given is not None for given in said) or bool(self.costs.model)

    @property
    def by_lanes(self) -> bool:
        """True if an option asks for parts of layers on lanes, not cells."""
        flags = (self.by_layer, self.moe, self.padded, self.offload, self.no_split, self.tied, self.recompute)
        return self.layers is not None or any(flags) or self.ep > 1 or self.hold is not Hold.AUTO

    @property
    def has_replicas(self) -> bool:
        """True if every GPU is a rank and there is more than one pipeline."""
        return self.every_gpu and self.ep * self.dp > 1

    def missing(self, program: Program) -> tuple[str, ...]:
        """What a prediction of this program takes as 0 because the costs do not say it."""
        from treadle.costs import missing

        return missing(program, self.costs)

    @cached_property
    def _noted(self) -> set[str]:
        """What a note has named already: of several programs each name is told once."""
        return set()

    def options(self) -> LoweringOptions:
        """Return the options as the library takes them."""
        from treadle.plan import LoweringOptions

        if not self.knows_layers and (self.moe or self.by_layer):
            option = "--moe" if self.moe else "--by-layer"
            raise ValueError(
                f"{option} is about layers; say how many there are: --model-layers N, or --layers N a stage"
            )
        return LoweringOptions(
            layers=parse_layers(self.layers),
            model_layers=self.model_layers,
            by_layer=self.layers is None and self.knows_layers and self.by_lanes,
            moe=self.moe,
            padded=self.padded,
            blocks=self._blocks(),
            dense=self.dense if self.layout is None else None,
            mtp=self.mtp,
            tied=((0, -1),) if self.tied else (),
            recompute=tuple(self.recompute.split(",")) if self.recompute is not None else (),
            split=() if self.no_split else LoweringOptions().split,
            offload=self.offload,
            hold={Hold.AUTO: None, Hold.ALWAYS: True, Hold.NEVER: False}[self.hold],
            ep=self.ep,
            dp=self.dp,
            every_gpu=self.every_gpu,
        )

    def _blocks(self) -> tuple[str, ...] | None:
        """The blocks of each stage, if they are given."""
        return None if self.layout is None else layout_blocks(self.layout, self.dense, self.costs)

    def lower(self, schedule: Schedule, *, one_pipeline: bool = False) -> Program:
        """The program of a schedule; one that does not verify is refused.

        `one_pipeline` stands for all, even if every GPU is to be a rank.
        """
        from treadle.plan import lower
        from treadle.verify import verify_schedule

        options = replace(self.options(), every_gpu=self.every_gpu and not one_pipeline)
        with working("verifying"):
            report = verify_schedule(schedule)
        if not report.clean:
            raise ValueError(f"the schedule is not sound: {report.findings[0]}; 'treadle verify' shows it all")
        with working("lowering"):
            return lower(schedule, self.costs, options)

    def trace(self, loaded: Schedule | Program | Trace, slow: Slow = Slow()) -> Trace:
        """Return the loaded trace, or predict one of the loaded program or schedule."""
        from treadle.ir.trace import Trace
        from treadle.simulate import simulate
        from treadle.weights.rates import simulate_update

        if isinstance(loaded, Trace):
            return loaded
        program = self.lower(loaded) if isinstance(loaded, Schedule) else loaded
        self._note_missing(program)
        with working("simulating"):
            if program.layout.is_update:
                return simulate_update(program)
            slowness = slow.slowness if slow.share is None else slow.factors(program.num_ranks)
            return simulate(program, self.costs, slowness=0.0 if slowness is None else slowness, seed=slow.seed)

    def fold(self, schedule: Schedule, slow: Slow) -> Folded | None:
        """Predict a step of every GPU, folded; None, with a note that says why, if it cannot be folded."""
        from treadle.plan.folding import fold, num_simulated
        from treadle.plan.step_tail import why_not

        program = self.lower(schedule, one_pipeline=True)
        reason = why_not(program)
        if reason is not None:
            note(f"every GPU is simulated, unfolded: {reason}")
            return None
        self._note_missing(program)
        slowness = slow.factors(program.num_ranks * self.ep * self.dp)
        columns = num_simulated(program, ep=self.ep, dp=self.dp, slowness=slowness)
        if columns == self.ep * self.dp:
            note(f"nothing folds, as every replica differs: {columns * program.num_ops:,} ops are simulated")
        with working("simulating"):
            return fold(program, self.costs, ep=self.ep, dp=self.dp, slowness=slowness)

    def _note_missing(self, program: Program) -> None:
        lacking = [name for name in self.missing(program) if name not in self._noted]
        if lacking:
            self._noted.update(lacking)
            note(f"taken as 0: {', '.join(lacking)} (not in costs {self.costs.name!r})")

    def __str__(self) -> str:
        words = [f"--layers {self.layers}"] if self.layers is not None else []
        words += [f"--model-layers {self.model_layers}"] if self.model_layers is not None else []
        words += [f"--layout '{self.layout}'"] if self.layout is not None else []
        words += [f"--{name} {getattr(self, name)}" for name in ("dense", "mtp", "recompute") if getattr(self, name)]
        flags = ("by_layer", "tied", "moe", "padded", "offload", "no_split", "every_gpu")
        words += [f"--{flag.replace('_', '-')}" for flag in flags if getattr(self, flag)]
        words += [f"--{name} {getattr(self, name)}" for name in ("ep", "dp") if getattr(self, name) > 1]
        words += [f"--hold {self.hold.value}"] if self.hold is not Hold.AUTO else []
        words += [f"--costs {shlex.quote(self.costs_name)}"] if self.costs_name != "unit" else []
        return " ".join(words)
