"""Several targets, as compare and draw take them: with sizes of their own, and with the model of a plan among them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from treadle.cli.step_flags import StepFlags
from treadle.cli.target import Loaded, Target
from treadle.cli.terminal import note
from treadle.ir import Schedule
from treadle.schedules import family, is_known
from treadle.step import Step, steps_of

_SIZES = {"pp": "pp", "vpp": "vpp", "m": "microbatches"}


def sized_targets(names: Sequence[str], sizes: Target) -> list[Target]:
    """Return the targets that are named. `sizes` are for schedules by name without their own (`interleaved:vpp=4`).

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
    return beside_plan(targets)


def beside_plan(targets: Sequence[Target]) -> list[Target]:
    """Return the targets; schedules by name have the ranks and micro-batches of the first plan, if they have none."""
    planned = next((target.plan.target for target in targets if target.plan is not None), None)
    if not isinstance(planned, Schedule):
        return list(targets)
    return [_sized_like(planned, target) if target.is_name() else target for target in targets]


def _sized_like(schedule: Schedule, target: Target) -> Target:
    pp = target.pp if target.pp is not None else schedule.pp
    microbatches = target.microbatches if target.microbatches is not None else schedule.num_microbatches
    return replace(target, pp=pp, microbatches=microbatches)


def make_steps(
    targets: Sequence[Target], loaded: Sequence[tuple[str, Loaded]], flags: StepFlags, *, used: bool = False
) -> list[Step]:
    """Return a step for each target, named; beside plans, a schedule gets the costs and the model of the first plan.

    Where it has as many stages as the plan, it gets the plan's layout too; else layers are cut evenly. `used`: the
    caller reads the flags, too.
    """
    first = next((target.plan for target in targets if target.plan is not None), None)
    if first is None:
        return steps_of(loaded, flags.costs, flags.options, used=used)
    return [
        flags.step(thing, target.plan or _for_schedule(first, thing), name=name)
        for target, (name, thing) in zip(targets, loaded, strict=True)
    ]


def _for_schedule(plan: Step, thing: Loaded) -> Step:
    """Return the plan without its layout for a schedule that has another number of stages."""
    if not isinstance(thing, Schedule) or thing.placement.num_stages == len(plan.options.blocks or ()):
        return plan
    return replace(plan, options=replace(plan.options, blocks=None))


def _keeps(name: str, vpp: int | None) -> bool:
    """True for a schedule by name, without sizes of its own, that cannot have so many chunks on a rank."""
    return vpp is not None and is_known(name) and bool(family(name).vpps) and vpp not in family(name).vpps


def _target(text: str, sizes: Target) -> Target:
    """`zb-v`, `interleaved:vpp=4`, `1f1b:pp=8,m=32`, or a file, which has its own sizes."""
    name, colon, own = text.partition(":")
    if colon and is_known(name):
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
