"""Making a rank's part of a pipeline, together with all other ranks: from what a user gave to a frozen `RankPart`.

Ranks arrive, join the watch, agree on what is to be one pipeline, plan it, connect, and build their stages. An error at
any of these is reported to all ranks, and leaves the modules as they were.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from treadle.dist.backends import is_dry
from treadle.dist.channel import Channel
from treadle.dist.device import Device, device_of
from treadle.dist.groups import next_name
from treadle.dist.mesh_position import MeshPosition, mesh_position
from treadle.dist.rank_groups import Groups
from treadle.ir import Kind, Schedule
from treadle.ir.ops import OpKind
from treadle.passes.step_end import reduces
from treadle.runtime.agreement import Claim, agree
from treadle.runtime.faults.arrivals import Arrivals
from treadle.runtime.faults.guard import Guard
from treadle.runtime.handshake import Handshake, RankStages, claim_of_run, stages_of
from treadle.runtime.model import weight_grad as split
from treadle.runtime.model.chunk import Chunk, LossFn
from treadle.runtime.model.exchange import EpGroupModule
from treadle.runtime.model.gradients import Gradients
from treadle.runtime.model.parameter_bucket import BucketNumber, ParameterBucket
from treadle.runtime.model.saved import SavedTensors, pool_for
from treadle.runtime.model.stage_blocks import is_layered
from treadle.runtime.model.tied import Tie, stages_of_reductions
from treadle.runtime.model.weight_grad import WeightGradSplit
from treadle.runtime.module_checks import check_arguments, check_modules, check_shapes
from treadle.runtime.parameter_claims import claims_of_copies
from treadle.runtime.pipeline_options import RunOptions, facts_of
from treadle.runtime.run.handlers import HANDLERS, Handler
from treadle.runtime.stage_recipe import StageRecipe
from treadle.runtime.step_plan import StepPlan
from treadle.runtime.ties import Tied, TieNames, check_tied, joined_names, rows_of, ties_of


@dataclass(frozen=True)
class JoinedRank:
    """A rank that has joined the watch: where it is in the mesh, what it brings, and how waits on its device end."""

    position: MeshPosition
    options: RunOptions
    modules: dict[int, nn.Module]
    device: torch.device
    waits: Device
    guard: Guard

    @property
    def deadline(self) -> timedelta:
        """How long a wait may take."""
        return timedelta(seconds=self.options.deadline_s)


@dataclass(frozen=True)
class AgreedPart:
    """What all ranks agreed to run: this rank's ties and splits, and the plan of the whole."""

    groups: Groups
    ties: tuple[Tie, ...]
    splits: Mapping[int, WeightGradSplit]
    side_names: frozenset[str]
    plan: StepPlan


@dataclass(frozen=True)
class RankPart:
    """A rank's part of a pipeline, as making it returns it and running it takes it.

    `handlers` are the calls that run each kind of op; `outgoing` and `incoming` the channels to the peers, by their
    rank along pp. `given_back` takes from the modules what was put on them.
    """

    joined: JoinedRank
    agreed: AgreedPart
    gradients: Gradients
    recipe: StageRecipe
    stages: dict[int, Chunk]
    outgoing: Mapping[int, Channel]
    incoming: Mapping[int, Channel]
    given_back: ExitStack
    handlers: Mapping[OpKind, Handler]
    parameters: Mapping[BucketNumber, Sequence[ParameterBucket]] = field(default_factory=dict)
    """What a step gathers where an optimizer updates parameters in parts."""


def make_rank_part(
    stages: Mapping[int, nn.Module],
    schedule: Schedule,
    mesh: DeviceMesh | MeshPosition,
    loss_fn: LossFn,
    tied: Tied | None,
    options: RunOptions,
    changes: Mapping[str, Any],
) -> RankPart:
    """Return this rank's part of a pipeline. All ranks of the mesh make theirs together."""
    position, guard = mesh_position(mesh), Guard()
    name = next_name(position)  # also where it fails: all ranks count alike
    arrivals = Arrivals(name, position)
    with ExitStack() as given_back:
        with arrivals.making():
            check_arguments(stages, schedule, loss_fn)
            check_tied(tied)
            joined = _join(position, guard, arrivals, dict(stages), mesh, replace(options, **changes))
        with guard.making(all_refuse=True):
            agreed = _agree(joined, name, schedule, tied)
        with guard.making():
            _connect(joined, agreed, given_back)
            gradients = _make_gradients(joined, agreed)
            given_back.callback(gradients.close)
            recipe = _recipe(joined, agreed, loss_fn)
            for module in joined.modules.values():
                given_back.callback(split.restore, module)
            return RankPart(
                joined=joined,
                agreed=agreed,
                gradients=gradients,
                recipe=recipe,
                stages=recipe.build(),
                outgoing=agreed.groups.outgoing,
                incoming=agreed.groups.incoming,
                given_back=given_back.pop_all(),
                handlers=HANDLERS,
            )


def _join(
    position: MeshPosition,
    guard: Guard,
    arrivals: Arrivals,
    modules: dict[int, nn.Module],
    mesh: DeviceMesh | MeshPosition,
    options: RunOptions,
) -> JoinedRank:
    """Join the watch over all ranks."""
    params = [p for module in modules.values() for p in module.parameters()]
    device = params[0].device if params else _device_without_parameters(mesh)
    waits = device_of(device, timedelta(seconds=options.deadline_s))
    if not is_dry():
        guard.join(arrivals, position, options.deadline_s, options.address)
        waits.observe(guard)
    return JoinedRank(position, options, modules, device, waits, guard)


def _device_without_parameters(mesh: DeviceMesh | MeshPosition) -> torch.device:
    return torch.device(mesh.device_type) if isinstance(mesh, DeviceMesh) else torch.get_default_device()


def _agree(joined: JoinedRank, name: str, schedule: Schedule, tied: Tied | None) -> AgreedPart:
    """Agree with all ranks that their stages are one model, and plan its steps."""
    position, placement = joined.position, schedule.placement
    groups = joined.guard.unless_lost(partial(Groups.make, name, position, joined.deadline))
    joined.guard.break_off_on_alarm(groups)
    splits, met, names = _meet(joined, groups, schedule, tied)
    ties, claims, problem = tuple[Tie, ...](), list[Claim](), None
    try:
        ties, claims = ties_of(names, placement, position.pp_rank, joined.modules)
        claims = [*claims, *claims_of_copies(joined.modules, placement, position)]
        plan = StepPlan.of(
            schedule, met, joined.options, reduce=reduces(placement, position.dp), tied=stages_of_reductions(ties)
        )
    except ValueError as error:
        problem = error
    # To connect to a rank that has not come so far would block.
    agree(groups, claims, problem)
    return AgreedPart(groups, ties, splits, met.side, plan)


def _meet(
    joined: JoinedRank, groups: Groups, schedule: Schedule, tied: Tied | None
) -> tuple[dict[int, WeightGradSplit], Handshake, TieNames]:
    """Check this rank's modules against the schedule, and exchange what ranks have."""
    position, claims = joined.position, [claim_of_run(schedule, facts_of(joined.options))]
    splits: dict[int, WeightGradSplit] = {}
    told: list[Any] = []
    problem: ValueError | None = None
    try:
        check_shapes(joined.options.shapes)
        check_modules(joined.modules, schedule, position)
        splits = examine(joined.modules, schedule)
        _warn_of_whole_backwards(splits, schedule, position)
        stages = stages_of(joined.modules, schedule, position.pp_rank, splits)
        claims += stages.claims(schedule.placement, position.pp_rank)
        told = [stages.encode(), rows_of(tied, schedule.placement.num_stages)]
    except ValueError as error:
        problem = error
    rows = agree(groups, claims, problem, told=told)
    names = joined_names(ties for of_replicas in rows for _, ties in of_replicas)
    met = Handshake.of([[RankStages.decode(stages) for stages, _ in of_replicas] for of_replicas in rows], schedule)
    return splits, met, names


def examine(modules: Mapping[int, nn.Module], schedule: Schedule) -> dict[int, WeightGradSplit]:
    """Return how far the backward of each chunk can be split, for those where it matters."""
    halved = {action.chunk for row in schedule.rows for c in row for action in c.actions if action.kind is Kind.W}
    return {c: split.examine(module) for c, module in modules.items() if c in halved or is_layered(module)}


def _warn_of_whole_backwards(splits: Mapping[int, WeightGradSplit], schedule: Schedule, position: MeshPosition) -> None:
    """Report once for each stage, in its first replica, that it trains and cannot run wgrad apart from dgrad."""
    for chunk, found in splits.items():
        if found.why is not None and found.num_params and position.dp_rank == 0:
            stage = schedule.placement.stage(position.pp_rank, chunk)
            warnings.warn(
                f"stage {stage} runs dgrad and wgrad together: {found.why}; leave that part uncompiled, with plain "
                "parameters, for zero bubble. Other stages split theirs",
                stacklevel=2,
            )


def _connect(joined: JoinedRank, agreed: AgreedPart, given_back: ExitStack) -> None:
    """Make the channels of the Program, and give exchanges their group."""
    groups, program = agreed.groups, agreed.plan.step.program
    joined.guard.program = program
    joined.guard.unless_lost(partial(groups.connect, program, joined.device, joined.waits.wait))
    joined.guard.connected(groups)
    agree(groups)  # one that goes on could end while another still connects to it
    given_back.callback(unbind, joined.modules, groups)
    bind(joined.modules, groups, joined.waits)


def bind(modules: Mapping[int, nn.Module], groups: Groups, device: Device) -> None:
    """Give the exchanges of the modules their expert group, and their way to wait for the device."""
    if groups.ep_group is None:
        return
    shared: dict[Any, Any] = {}
    for part in (part for module in modules.values() for part in module.modules()):
        if isinstance(part, EpGroupModule):
            part.join(groups.ep_group, shared, device.await_event)


def unbind(modules: Mapping[int, nn.Module], groups: Groups) -> None:
    """Take the expert group from the modules that still have it."""
    for part in (part for module in modules.values() for part in module.modules()):
        if isinstance(part, EpGroupModule) and part.ep_group is not None and part.ep_group is groups.ep_group:
            part.leave(clean=not groups.is_broken_off)


def _make_gradients(joined: JoinedRank, agreed: AgreedPart) -> Gradients:
    """Put sums and hooks on the parameters."""
    groups = agreed.groups
    return Gradients(
        joined.modules,
        [chunk for chunk in agreed.plan.reduce_order(joined.position.pp_rank) if chunk in joined.modules],
        groups.reduce_group,
        groups.expert_dp_group,
        joined.position.ep,
        agreed.ties,
        groups.tied_groups,
    )


def _recipe(joined: JoinedRank, agreed: AgreedPart, loss_fn: LossFn) -> StageRecipe:
    options, plan = joined.options, agreed.plan
    return StageRecipe(
        modules=joined.modules,
        schedule=plan.schedule,
        position=joined.position,
        shape=plan.shape,
        splits=agreed.splits,
        depths=plan.depths,
        device=joined.device,
        seed=options.seed,
        loss_fn=loss_fn,
        boundaries=options.boundaries or {},
        store=make_store(joined.modules, options, joined.device),
    )


def make_store(modules: Mapping[int, nn.Module], options: RunOptions, device: torch.device) -> SavedTensors | None:
    """Return what saved tensors go through, if they do."""
    if options.saved == "leave":
        return None
    pool = pool_for(device, options.pool_directory) if options.saved == "offload" else None
    return SavedTensors(modules.values(), pool)
