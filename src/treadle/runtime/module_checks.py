"""Checks of what a Pipeline is given: arguments of the right type, modules that are this rank's part."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from torch import nn

from treadle.dist.mesh_position import MeshPosition
from treadle.host.errors import named
from treadle.ir import Schedule
from treadle.runtime.model.exchange import EpGroupModule
from treadle.runtime.model.segments import is_segmented
from treadle.runtime.model.stage_blocks import children_of, is_layered, parts_of, refuse_uncalled, segments_of
from treadle.runtime.stale_parameters import refuse_stale


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


def check_modules(modules: Mapping[int, nn.Module], schedule: Schedule, position: MeshPosition) -> None:
    """Refuse modules that are not this rank's part of the schedule."""
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
    refuse_stale(part for module in modules.values() for part in module.modules())
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
    """Refuse plain modules beside layers that name their segments where neither embedding nor head can be."""
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
    """Refuse parameters that are spread over ranks by torch: their gradients and collectives would be its own."""
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
    """Refuse torch's wrapper around what exchanges, or around segments, which would run as if it were not there."""
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
    """Refuse MoE layers with other segments than the first: all are lowered alike."""
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
