"""What is compared: several targets with sizes of their own, and the model that all of their schedules are given."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from treadle.api import files
from treadle.cli.model import Model
from treadle.cli.target import Target
from treadle.cli.terminal import note, working
from treadle.ir import Schedule
from treadle.ir.program import Layout, Program
from treadle.ir.trace import Trace
from treadle.passes.cut import common_layers
from treadle.schedules import family, known

Loaded: TypeAlias = Schedule | Program | Trace

_SIZES = {"pp": "pp", "vpp": "vpp", "m": "microbatches"}


def load_all(names: Sequence[str], sizes: Target) -> list[tuple[str, Loaded]]:
    """Load what is named. `sizes` are for schedules by name, where they have none of their own (`interleaved:vpp=4`).

    --vpp is for the schedules that can have so many chunks; where some of several cannot, they keep what they have, and
    a note says so.
    """
    targets = [_target(name, sizes) for name in names]
    named = [target for target in targets if target.is_name()]
    kept = [target for name, target in zip(names, targets, strict=True) if target in named and _keeps(name, sizes.vpp)]
    if kept and len(kept) < len(named):
        told = ", ".join(f"{target.name} keeps {family(target.name).default_vpp}" for target in kept)
        note(f"--vpp {sizes.vpp} is not for all of them: {told}")
        targets = [replace(target, vpp=None) if target in kept else target for target in targets]
    return [(name, _load(target)) for name, target in zip(names, targets, strict=True)]


def _keeps(name: str, vpp: int | None) -> bool:
    """True for a schedule by name, without sizes of its own, that cannot have so many chunks on a rank."""
    return vpp is not None and name in known() and bool(family(name).vpps) and vpp not in family(name).vpps


def _target(text: str, sizes: Target) -> Target:
    """`zb-v`, `interleaved:vpp=4`, `1f1b:pp=8,m=32`, or a file, which has its own sizes."""
    name, colon, own = text.partition(":")
    if colon and name in known():
        given: dict[str, Any] = {}
        for part in own.split(","):
            size = re.fullmatch(r"(pp|vpp|m)=([0-9]{1,9})", part)
            if size is None:
                raise ValueError(
                    f"{text!r}: sizes of a schedule are pp, vpp and m, as in {name}:vpp=2,m=16, got {part!r}"
                )
            given[_SIZES[size[1]]] = int(size[2])
        return replace(sizes, name=name, **given)
    target = replace(sizes, name=text)
    return target if target.is_name() else Target(text)


def _load(target: Target) -> Loaded:
    if Path(target.name).is_dir():
        with working(f"reading {target.name}"):
            return files.load_traces(target.name)
    return target.load()


def hold_model(loaded: Sequence[tuple[str, Loaded]], model: Model) -> Model:
    """Return the model with as many layers as all schedules are given.

    That is what --model-layers or the costs say; else the layers of a trace or program that knows them; else the
    smallest model that all schedules cut evenly. Where all have as many stages, and the costs or a trace say nothing
    about layers, chunks are alike anyway and stay chunks.

    Raises:
        ValueError: the schedules would get models of different sizes.

    """
    stages = {name: thing.placement.num_stages for name, thing in loaded if isinstance(thing, Schedule)}
    if not stages or model.model_layers is not None or model.layout is not None or model.costs.model:
        return model
    layouts = [(name, _layout(thing)) for name, thing in loaded if not isinstance(thing, Schedule)]
    told = {layout.model_layers for _, layout in layouts if layout.model_layers}
    counts = set(stages.values()) | {layout.placement.num_stages for _, layout in layouts}
    smallest = common_layers(stages.values())
    if model.layers is not None:
        if len(set(stages.values())) > 1 and "," not in model.layers:
            each = ", ".join(f"{name} {int(model.layers) * count}" for name, count in stages.items())
            raise ValueError(
                f"--layers {model.layers} gives every stage as many layers, so the models differ ({each}); "
                f"hold one model: --model-layers {int(model.layers) * smallest}{'' if model.moe else ' --by-layer'}"
            )
        return model
    unknown = [name for name, layout in layouts if not layout.model_layers]
    if len(counts) == 1 and (unknown or not model.costs.says_layers) and not model.by_lanes:
        return model
    if not model.costs.says_layers:
        each = ", ".join(f"{name} {count}" for name, count in stages.items())
        raise ValueError(
            f"costs {model.costs.name!r} say what a chunk takes, and these schedules cut a model into different "
            f"numbers of chunks ({each}); add layers = N to their [cells], the layers of that chunk, or a [model]"
        )
    fitting = [layers for layers in told if layers >= max(stages.values())]
    return replace(model, model_layers=fitting[0] if len(fitting) == 1 else smallest)


def _layout(thing: Program | Trace) -> Layout:
    return thing.program.layout if isinstance(thing, Trace) else thing.layout
