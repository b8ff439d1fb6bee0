"""Options about the costs, the model and the mesh, as they are typed: they become a Step.

Methods import what they need: to show a schedule none of it is needed.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treadle.cli.common_options import parse_layers
from treadle.cli.terminal import note, working

if TYPE_CHECKING:
    from treadle.costs import Costs
    from treadle.ir.trace import Trace
    from treadle.lowering.options import LoweringOptions
    from treadle.step import Step, Target


class Hold(StrEnum):
    """The place where attention's wgrad runs."""

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
class StepFlags:
    """The options as given; those that are left out have the defaults of LoweringOptions."""

    costs_name: Annotated[
        str | None, _option("costs", "How long ops take: unit (the default), a preset, or a TOML file.")
    ] = None
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
    mtp: Annotated[int | None, _option("mtp", "MTP blocks on the last stage; a --layout has its own.")] = None
    tied: Annotated[bool, _option("tied", "Embedding and head share a parameter, which is reduced by itself.")] = False
    buckets: Annotated[
        int | None, _option("buckets", "Blocks of a bucket: gradients reduced and parameters gathered by bucket.")
    ] = None
    recompute: Annotated[
        str | None, _option("recompute", "Parts of a layer that are recomputed: attn, mlp or attn,mlp.")
    ] = None
    moe: Annotated[bool, _option("moe", "MoE layers with expert all-to-all.")] = False
    padded: Annotated[bool, _option("padded", "Padded dispatch: no exchange of token counts.")] = False
    offload: Annotated[bool, _option("offload", "Activations to the host and back, layer by layer.")] = False
    no_split: Annotated[bool, _option("no-split", "Layers whose wgrads do not run apart.")] = False
    hold: Annotated[Hold, _option("hold", "Hold attention's wgrad back into the next slot; auto simulates both.")] = (
        Hold.AUTO
    )
    ep: Annotated[int | None, _option("ep", "Expert parallelism.")] = None
    dp: Annotated[int | None, _option("dp", "Data parallelism.")] = None
    every_gpu: Annotated[bool, _option("every-gpu", "Every GPU of the mesh is a rank; else alike ones are one.")] = (
        False
    )

    @cached_property
    def costs(self) -> Costs:
        """The costs named."""
        from treadle.costs import load_costs

        return load_costs(self.costs_name or "unit")

    @cached_property
    def options(self) -> LoweringOptions:
        """The options as the library takes them."""
        from treadle.lowering.options import LoweringOptions

        return LoweringOptions(**self._given(self.costs))

    def _given(self, costs: Costs) -> dict[str, Any]:
        """Return the fields of LoweringOptions that are given, for costs of the model."""
        given: dict[str, Any] = {
            "layers": parse_layers(self.layers),
            "model_layers": self.model_layers,
            "blocks": None if self.layout is None else layout_blocks(self.layout, self.dense, costs),
            "dense": self.dense if self.layout is None else None,
            "mtp": self.mtp,
            "tied": ((0, -1),) if self.tied else None,
            "buckets": self.buckets,
            "recompute": tuple(self.recompute.split(",")) if self.recompute is not None else None,
            "split": () if self.no_split else None,
            "hold": {Hold.AUTO: None, Hold.ALWAYS: True, Hold.NEVER: False}[self.hold],
        }
        given |= {name: getattr(self, name) or None for name in ("by_layer", "moe", "padded", "offload", "every_gpu")}
        given |= {"ep": self.ep, "dp": self.dp}
        return {name: value for name, value in given.items() if value is not None}

    def step(self, target: Target, plan: Step | None = None, **more: Any) -> Step:
        """Return the step of a target under these options; those that are left out are as in the plan, if it has one.

        Raises:
            ValueError: an option sets the layers, which a plan has.

        """
        from treadle.step import Step

        if plan is None:
            return Step(target, self.costs, self.options, **more)
        self._check_beside(plan)
        costs = self.costs if self.costs_name is not None else plan.costs
        return Step(target, costs, replace(plan.options, **self._given(costs)), **more)

    def _check_beside(self, plan: Step) -> None:
        """Refuse options about layers beside a plan, which has its layout; --layout replaces it."""
        layers = {"--layers": self.layers, "--model-layers": self.model_layers, "--mtp": self.mtp}
        layers |= {"--dense": self.dense if self.layout is None else None}
        for option, value in layers.items():
            if value is not None:
                raise ValueError(
                    f"{plan.name} is a plan with its own layers, got {option} {value}; leave it out, or give --layout "
                    "for another cut"
                )

    def __str__(self) -> str:
        words = [f"--layers {self.layers}"] if self.layers is not None else []
        words += [f"--model-layers {self.model_layers}"] if self.model_layers is not None else []
        words += [f"--layout '{self.layout}'"] if self.layout is not None else []
        words += [f"--{name} {getattr(self, name)}" for name in ("dense", "mtp", "recompute") if getattr(self, name)]
        flags = ("by_layer", "tied", "moe", "padded", "offload", "no_split", "every_gpu")
        words += [f"--{flag.replace('_', '-')}" for flag in flags if getattr(self, flag)]
        words += [f"--{name} {getattr(self, name)}" for name in ("ep", "dp") if getattr(self, name) is not None]
        words += [f"--hold {self.hold.value}"] if self.hold is not Hold.AUTO else []
        words += [f"--costs {shlex.quote(self.costs_name)}"] if self.costs_name is not None else []
        return " ".join(words)


def make_program(step: Step) -> None:
    """Lower a step's schedule, with progress; one that is not sound is refused."""
    with working("verifying"):
        step.check_sound()
    with working("lowering"):
        _ = step.program


def make_traces(steps: Iterable[Step]) -> list[Trace]:
    """Simulate steps, with progress; notes name what the costs do not give, each name once."""
    from treadle.ir.trace import Trace

    noted: set[str] = set()
    traces = []
    for step in steps:
        if not isinstance(step.target, Trace):
            make_program(step)
            note_missing(step, noted)
        with working("simulating"):
            traces.append(step.trace)
    return traces


def note_missing(step: Step, noted: set[str]) -> None:
    """Note what a prediction takes as 0, unless it was noted before."""
    lacking = [name for name in step.missing if name not in noted]
    if lacking:
        noted.update(lacking)
        note(f"taken as 0: {', '.join(lacking)} (not in costs {step.costs.name!r})")
