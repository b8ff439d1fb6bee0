"""Putting a rank's part of a pipeline together: what its modules are, what they are planned as, what they run on."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from treadle.costs import Costs, durations
from treadle.dist.boundary import Boundary, all_flags
from treadle.dist.device import Device, StreamDevice
from treadle.dist.mesh_position import MeshPosition
from treadle.dist.rank_groups import Groups
from treadle.host.errors import named
from treadle.ir import Kind, Schedule
from treadle.ir.ops import BLOCK_FORWARD, WEIGHT_OF, WEIGHTS, OpKind
from treadle.ir.program import Longs, Op, Program
from treadle.lowering.options import LoweringOptions
from treadle.lowering.running import expected, forward_only, lower_running, lower_weaving
from treadle.passes.step_end import Buckets
from treadle.runtime.handshake import Handshake, RankStages
from treadle.runtime.model import weight_grad as split
from treadle.runtime.model.calling import layers_of
from treadle.runtime.model.chunk import CheckedLoss, Chunk, LossFn
from treadle.runtime.model.exchange import EpGroupModule
from treadle.runtime.model.layered import LayeredStage
from treadle.runtime.model.saved import SavedTensors, pool_for
from treadle.runtime.model.seeding import Seeds
from treadle.runtime.model.segments import COMPUTE, is_segmented
from treadle.runtime.model.stage import Stage
from treadle.runtime.model.stage_blocks import (
    blocks_of,
    children_of,
    is_layered,
    parts_of,
    refuse_uncalled,
    segments_of,
    side_names,
)
from treadle.runtime.model.weight_grad import WeightGradQueue, WeightGradSplit
from treadle.runtime.pipeline_options import LanesName, RunOptions, SavedName
from treadle.runtime.run.lanes import Lanes, PacedLanes, SerialLanes, StreamLanes, ThreadLanes, VirtualLanes
from treadle.runtime.run.run_layers import PACE
from treadle.verifier import verify_program, verify_schedule

Modules: TypeAlias = Mapping[int, nn.Module]


def check_arguments(stages: object, schedule: object, loss_fn: object) -> None:
    """Refuse arguments of another type, before any rank is waited for."""
    if not isinstance(stages, Mapping) or not all(isinstance(module, nn.Module) for module in stages.values()):
        raise TypeError(f"stages are {{chunk: nn.Module}} of this rank, such as {{0: module}}, got {named(stages)}")
    if not isinstance(schedule, Schedule):
        raise TypeError(
            f"the schedule is a treadle.Schedule, got {named(schedule)}; treadle.generate makes one, treadle.load "
            "reads a file"
        )
    if not callable(loss_fn):
        raise TypeError(f"loss_fn is a function of (output, target), got {named(loss_fn)}")


def check_modules(modules: Modules, schedule: Schedule, position: MeshPosition) -> None:
    """Refuses modules that are not this rank's part of the schedule."""
    chunks = list(range(schedule.vpp))
    if schedule.pp != len(position.ranks):
        raise ValueError(f"the schedule is for {schedule.pp} ranks, the mesh has {len(position.ranks)} along pp")
    devices = {str(p.device) for module in modules.values() for p in module.parameters()}
    if len(devices) > 1:
        raise ValueError(f"a rank's stages are on one device, got {', '.join(sorted(devices))}; move them to one")
    if sorted(modules) != chunks:
        raise ValueError(
            f"stages are a module for each chunk of this rank, {chunks}, got {sorted(modules)}; "
            f"by the schedule they are stages {schedule.placement.stages[position.pp_rank]} of the model"
        )
    for chunk, module in modules.items():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise ValueError(f"chunk {chunk} is a DistributedDataParallel; give the module inside, Treadle reduces")
        _check_plain(module, chunk)
        _check_checkpoints(module, chunk)
        _check_alike(module, chunk)
        if is_layered(module):
            refuse_uncalled(module, f"chunk {chunk}")
        _check_ends(module, chunk, schedule.placement.stage(position.pp_rank, chunk), schedule.placement.num_stages)


def check_shapes(shapes: object) -> None:
    """Refuse what is no value of the option."""
    if shapes not in ("same", "each", "any"):
        raise ValueError(f"shapes is same, each or any, got {shapes!r}")


def _check_ends(module: nn.Module, chunk: int, stage: int, num_stages: int) -> None:
    """Refuses plain modules beside layers that name their segments where neither embedding nor head can be."""
    if not is_layered(module):
        return
    before, _, _, behind = parts_of(module, stage)
    for plain, where, at, wanted in ((before, "before", stage, 0), (behind, "behind", stage, num_stages - 1)):
        if plain and at != wanted:
            name, end = type(plain[0]).__name__, "first" if wanted == 0 else "last"
            raise ValueError(
                f"chunk {chunk} is stage {stage} of {num_stages} and has {name} {where} layers that name their "
                f"segments; only the {end} stage can have plain modules {where} its layers: put {name} into a segment"
            )


def _check_plain(module: nn.Module, chunk: int) -> None:
    """Refuses parameters that are spread over ranks by torch: their gradients and collectives would be its own."""
    tensor = sys.modules.get("torch.distributed.tensor")  # where it is not imported there are none
    if tensor is None:
        return
    for name, param in (*module.named_parameters(), *module.named_buffers()):
        if isinstance(param, tensor.DTensor):
            dims = ", ".join(param.device_mesh.mesh_dim_names or ()) or "no name"
            raise ValueError(
                f"chunk {chunk}: {name} is a DTensor over the mesh dimensions {dims} ({param.placements}); a stage has "
                "plain tensors, which Treadle reduces over dp and ep. For tensor parallelism give each rank its part "
                "as a plain parameter, talk over tp inside what computes, and make the Pipeline with the mesh without "
                "tp: "
                'mesh["pp", "dp"]'
            )


def _check_checkpoints(module: nn.Module, chunk: int) -> None:
    """Refuses torch's wrapper around what exchanges, or around segments, which would run as if it were not there."""
    wrapper = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    for name, part in module.named_modules() if wrapper is not None else ():
        if not isinstance(part, wrapper.CheckpointWrapper):  # type: ignore[union-attr]
            continue
        within = [type(p).__name__ for p in part.modules() if isinstance(p, EpGroupModule) or is_segmented(p)]
        if within:
            raise ValueError(
                f"chunk {chunk}: {name} is a checkpoint around {within[-1]}, and checkpoints must not span an exchange "
                "of experts; checkpoint only inside what computes, attn and mlp each on their own"
            )


def _check_alike(module: nn.Module, chunk: int) -> None:
    """Refuses MoE layers with other segments than the first: all are lowered alike."""
    layers = [child for child in children_of(module) if is_segmented(child)]
    named = [segments_of(layer, f"chunk {chunk}, layer {at}") for at, layer in enumerate(layers)]
    exchanging = [(at, names) for at, names in enumerate(named) if "dispatch" in names]
    for at, names in exchanging:
        first, wanted = exchanging[0]
        if names != wanted:
            raise ValueError(
                f"chunk {chunk}: layer {at} has the segments {', '.join(names)}, layer {first} "
                f"has {', '.join(wanted)}; all MoE layers of a model have the same: count tokens in all, or pad in all"
            )


def device_in(modules: Modules, mesh: DeviceMesh) -> torch.device:
    """Where the modules are; without parameters, where the mesh is."""
    params = [p for module in modules.values() for p in module.parameters()]
    return params[0].device if params else torch.device(mesh.device_type)


def examine(modules: Modules, schedule: Schedule) -> dict[int, WeightGradSplit]:
    """How far the backward of each chunk can be split, for those where it matters."""
    halved = {action.chunk for row in schedule.rows for c in row for action in c.actions if action.kind is Kind.W}
    return {c: split.examine(module) for c, module in modules.items() if c in halved or is_layered(module)}


def depth_of(module: nn.Module) -> int:
    """How many layers a stage has: of those that name their segments, else of any."""
    named = [is_segmented(child) for child in children_of(module)]
    return sum(named) if is_layered(module) else len(layers_of(module))


def stages_of(modules: Modules, schedule: Schedule, pp_rank: int, splits: Mapping[int, WeightGradSplit]) -> RankStages:
    """The facts about this rank's stages that other ranks need; of chunks without a module nothing."""
    chunks, placement = range(schedule.vpp), schedule.placement
    layers = [child for module in modules.values() for child in children_of(module)]
    named = [[segment.name for segment in layer.segments()] for layer in layers if is_segmented(layer)]
    return RankStages(
        can_split=[splits[c].possible if c in splits else True for c in chunks],
        num_layers=[depth_of(modules[c]) if c in modules else 0 for c in chunks],
        layered=[c in modules and is_layered(modules[c]) for c in chunks],
        blocks=[
            blocks_of(modules[c], placement.stage(pp_rank, c), placement.num_stages) if c in modules else ""
            for c in chunks
        ],
        segments=next((names for names in named if "dispatch" in names), []),
        side=sorted({name for layer in layers for name in side_names(layer)}),
    )


def depths(met: Handshake, schedule: Schedule) -> tuple[int, ...]:
    """Layers of each stage of the model, by which layers are seeded."""
    if met.layered:
        return tuple(sum(letter in "dt" for letter in row) for row in rows_of(met, schedule))
    placement = schedule.placement
    return tuple(met.layers[placement.holder(stage)] for stage in range(placement.num_stages))


def rows_of(met: Handshake, schedule: Schedule) -> tuple[str, ...]:
    """The blocks of each stage of the model."""
    placement = schedule.placement
    return tuple(met.blocks[placement.holder(stage)] for stage in range(placement.num_stages))


def shape_of(met: Handshake, schedule: Schedule, options: RunOptions) -> LoweringOptions | None:
    """How the schedule is lowered to layers, if these name their segments; else None."""
    saved, again = options.saved, options.recompute
    if saved not in ("leave", "count", "offload"):
        raise ValueError(f"saved is leave, count or offload, got {saved!r}")
    if isinstance(again, str) or set(again) - set(COMPUTE) or len(set(again)) != len(again):
        raise ValueError(f'recompute is a tuple of some of attn and mlp, each once, got {again!r}; say ("attn", "mlp")')
    if not met.layered:
        for name, given in (("saved", saved if saved != "leave" else None), ("recompute", again or None)):
            if given is not None:
                raise ValueError(
                    f"{name}={given!r} works layer by layer, and the stages' layers do not name their segments"
                )
        return None
    rows = rows_of(met, schedule)
    return LoweringOptions(
        blocks=rows if met.segments else tuple(row.replace("d", "t") for row in rows),
        by_layer=True,
        moe=bool(met.segments),
        padded="counts" not in met.segments,
        split=WEIGHTS if all(met.splits.values()) else (),
        offload=saved == "offload",
        recompute=again,
    )


class StepEnds(NamedTuple):
    """What a step's Program has besides the cells of its schedule; `tied` are the stages of each tie."""

    reduce: bool
    gather: bool = False
    tied: tuple[tuple[int, ...], ...] = ()
    buckets: Buckets = ()


def plan(
    schedule: Schedule,
    shape: LoweringOptions | None,
    costs: Costs,
    ends: StepEnds,
) -> tuple[Program, Longs]:
    """The Program that is run, verified, and the ticks under which it is ordered."""
    report = verify_schedule(schedule)
    if not report.clean:
        raise ValueError(f"the schedule is not sound: {report.findings[0]}; 'treadle verify' shows it all")
    if shape is None:
        program = lower_running(schedule, **ends._asdict())
        ticks = expected(program)
    else:
        program = lower_weaving(schedule, costs, shape, **ends._asdict())
        ticks = durations(program, costs)
    report = verify_program(program, ticks)
    if not report.clean:
        raise ValueError(f"the program of this schedule is not sound: {report.findings[0]}")
    return program, ticks


def plan_forward(
    schedule: Schedule, shape: LoweringOptions | None, costs: Costs, trained: Program
) -> tuple[Program, Longs]:
    """The Program of an evaluation, and its ticks: the forwards of `trained`, in the order of the schedule's rows.

    The verifier asks for every backward, and says so (T101); nothing else may be wrong with it, and no forward missing.
    """
    forwards = forward_only(schedule)
    if shape is None:
        program = lower_running(forwards, reduce=False)
        ticks = expected(program)
    else:
        program = lower_weaving(forwards, costs, replace(shape, split=(), offload=False, recompute=()), reduce=False)
        ticks = durations(program, costs)
    wrong = [finding for finding in verify_program(program, ticks).findings if finding.code != "T101"]
    if wrong:
        raise ValueError(f"the forwards of this schedule alone are not sound: {wrong[0]}")
    assert _forwards(program) == _forwards(trained), "an evaluation runs every forward once"
    return program, ticks


def _forwards(program: Program) -> list[tuple[int, ...]]:
    """(rank, kind, micro-batch, chunk, layer) of all forward parts and their messages, in order of these numbers."""
    kinds = (*program.layout.forward, *BLOCK_FORWARD.values(), OpKind.SEND_F, OpKind.RECV_F)
    ops = np.flatnonzero(np.isin(program.kind, kinds))
    rank = program.lane_rank[program.lane_of[ops]]
    columns = (rank, program.kind[ops], program.mb[ops], program.chunk[ops], program.layer[ops])
    return sorted(zip(*(column.tolist() for column in columns), strict=True))


def make_store(modules: Modules, saved: SavedName, device: torch.device, directory: Path | None) -> SavedTensors | None:
    """What saved tensors go through, if they do."""
    if saved == "leave":
        return None
    return SavedTensors(modules.values(), pool_for(device, directory) if saved == "offload" else None)


def reduce_order(program: Program, pp_rank: int) -> list[int]:
    """The rank's chunks in the order in which their gradients are reduced."""
    mine = (program.kind == OpKind.REDUCE_GRAD) & (program.lane_rank[program.lane_of] == pp_rank)
    return [int(chunk) for chunk in program.chunk[mine]]


def bind(modules: Modules, groups: Groups, device: Device) -> None:
    """Gives the exchanges of the modules their expert group, and their way to wait for the device."""
    if groups.ep_group is None:
        return
    shared: dict[Any, Any] = {}
    for part in (part for module in modules.values() for part in module.modules()):
        if isinstance(part, EpGroupModule):
            part.join(groups.ep_group, shared, device.await_event)


def unbind(modules: Modules, groups: Groups) -> None:
    """Takes the expert group from the modules that still have it."""
    for part in (part for module in modules.values() for part in module.modules()):
        if isinstance(part, EpGroupModule) and part.ep_group is not None and part.ep_group is groups.ep_group:
            part.leave()


@dataclass(frozen=True)
class StageRecipe:
    """What the stages of a rank are built from. `boundaries[stage]` is what it sends on, where that is known."""

    schedule: Schedule
    position: MeshPosition
    shape: LoweringOptions | None
    splits: Mapping[int, WeightGradSplit]
    depths: tuple[int, ...]
    device: torch.device
    seed: int | None
    loss_fn: LossFn
    boundaries: Mapping[int, Boundary]
    store: SavedTensors | None
    trains: bool = True

    def evaluating(self) -> StageRecipe:
        """Return the recipe of the same stages for evaluations: they save nothing, and find out their own shapes."""
        shape = replace(self.shape, split=(), offload=False, recompute=()) if self.shape is not None else None
        return replace(self, splits={}, boundaries={}, store=None, shape=shape, trains=False)


def build_stages(modules: Modules, recipe: StageRecipe) -> dict[int, Chunk]:
    """Return the stages of this rank by chunk."""
    return {chunk: _build_stage(chunk, module, recipe) for chunk, module in modules.items()}


def _build_stage(chunk: int, module: nn.Module, recipe: StageRecipe) -> Chunk:
    placement = recipe.schedule.placement
    number = placement.stage(recipe.position.pp_rank, chunk)
    first, num_layers = sum(recipe.depths[:number]), sum(recipe.depths)
    seeds = Seeds(recipe.device, first, num_layers) if recipe.seed is not None else None
    in_pipe = placement.pipes[chunk] * recipe.schedule.microbatches_per_pipe
    offset = recipe.position.dp_rank * recipe.schedule.num_microbatches + in_pipe
    queue = _weight_grad_queue(chunk, module, recipe)
    made: Chunk
    if recipe.shape is None:
        made = Stage(number, module, queue, seeds, offset)
    else:
        made = LayeredStage(number, module, queue or WeightGradQueue(), seeds, offset)
        made.deferred = tuple(WEIGHT_OF[kind] for kind in recipe.shape.split)
        made.recomputed = recipe.shape.recompute
        made.store = recipe.store
    made.trains = recipe.trains
    made.loss_fn = CheckedLoss(recipe.loss_fn, module) if number == placement.num_stages - 1 else None
    know_shapes(made, recipe)
    return made


def know_shapes(stage: Chunk, recipe: StageRecipe) -> None:
    """Let a stage know of shapes what is known beforehand, and nothing else."""
    own, before = recipe.boundaries.get(stage.number), recipe.boundaries.get(stage.number - 1)
    stage.boundary, stage.header_due = own, own is None
    stage.output_flags = all_flags(own) if own is not None else None
    stage.input_flags = all_flags(before) if before is not None else None


def _weight_grad_queue(chunk: int, module: nn.Module, recipe: StageRecipe) -> WeightGradQueue | None:
    """Let the chunk's linears defer their weight gradients to a queue, if those are ops of their own."""
    found = recipe.splits.get(chunk)
    if recipe.shape is not None:
        if not recipe.shape.split:
            return None
        found = found if found is not None else split.examine(module)  # a head of plain modules alone
    if found is None or not found.possible:
        return None
    queue = WeightGradQueue()
    split.apply(found.linears, queue)
    return queue


def known_inputs(stages: Mapping[int, Chunk], recipe: StageRecipe) -> dict[int, Boundary]:
    """Return the shapes that arrive at each chunk, as far as they are known beforehand."""
    known = recipe.boundaries
    return {chunk: known[stage.number - 1] for chunk, stage in stages.items() if stage.number - 1 in known}


def make_lanes(
    name: LanesName, device: Device, ticks: Longs, deadline_s: float, lanes: list[str], ops: list[Op]
) -> Lanes:
    """What ops of layers run on. `lanes` are their names; the first computes."""
    num_lanes = len(lanes)
    dur_ns = [int(ticks[op.index]) for op in ops]
    if isinstance(device, StreamDevice):
        return StreamLanes(lanes, [str(op) for op in ops], device)
    if name == "paced":
        pace, kind = [PACE[op.lane.kind] for op in ops], [op.kind for op in ops]
        return PacedLanes(num_lanes, dur_ns, pace, kind, deadline_s)
    if name == "virtual":
        return VirtualLanes(num_lanes, dur_ns)
    if name == "thread":
        return ThreadLanes(num_lanes, len(ops), deadline_s)
    if name == "serial":
        return SerialLanes(len(ops))
    raise ValueError(f"lanes are thread, paced, serial or virtual, got {name!r}")
