"""Checks the gradients of every schedule against those of one process."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import treadle
from treadle.ir import Schedule
from treadle.schedules import SCHEDULES
from treadle.selfcheck.check_experts import far
from treadle.selfcheck.check_report import FailedError, Passed, SkippedError
from treadle.selfcheck.models import MeshShape, grads_of, make_batch, own_stage, train_whole, whole_model
from treadle.selfcheck.ranks import run_ranks
from treadle.selfcheck.setup import Setup

OVERLAPPED = tuple(
    each.name for each in SCHEDULES.values() if each.overlapped and each.placement(2, each.default_vpp).num_pipes == 1
)
"""Schedules of one pipe whose cells overlap."""

STEPS = 2
"""The second step has its receives posted ahead."""

ADVICE = "do not train on this machine; report it with this file, and try 'lanes=\"serial\"'"


def shapes_of(setup: Setup) -> list[MeshShape]:
    """Return the meshes to try: experts in groups of two, replicas of two, and one long pipe."""
    num = setup.num_ranks
    side = 2 if num % 2 == 0 and num >= 4 else 1
    layered, plain = MeshShape(num // side, 1, side, True), MeshShape(num // side, side, 1, False)
    if setup.quick:
        return [layered]
    return list(dict.fromkeys([layered, plain, MeshShape(num, 1, 1, False)]))


def schedule_for(name: str, pp: int) -> Schedule:
    """Return the smallest schedule that fills its pipe."""
    try:
        return treadle.generate(name, pp=pp, microbatches=2 * pp)
    except ValueError as error:
        raise SkippedError(str(error)) from None


def check_gradients(setup: Setup, name: str) -> Passed:
    """Compare loss and gradients of one schedule, on each shape."""
    shapes = shapes_of(setup)
    for shape in shapes:
        schedule_for(name, shape.pp)
    worst = 0.0
    for shape in shapes:
        worst = max([worst, *run_ranks(setup, setup.num_ranks, compare_rank, name, shape)])
    return Passed(f"{'; '.join(map(str, shapes))}: off by {worst:.0e} at most", {"off_by": worst})


def compare_rank(setup: Setup, rank: int, name: str, shape: MeshShape) -> float:
    """Return how far this rank's gradients are at most from those of one process."""
    schedule, device = schedule_for(name, shape.pp), setup.device(rank)
    pp_rank, replica = divmod(rank, shape.replicas)
    model = whole_model(shape, schedule.placement.num_stages, setup.dtype, device)
    inputs, targets = make_batch(shape, schedule, setup.dtype, device)
    want_loss = train_whole(model, inputs, targets)
    placed = dict(enumerate(schedule.placement.stages[pp_rank]))
    stages = {chunk: own_stage(model[stage], shape.ep, replica % shape.ep) for chunk, stage in placed.items()}
    mesh = init_device_mesh(setup.kind, (shape.pp, shape.dp, shape.ep), mesh_dim_names=("pp", "dp", "ep"))
    modules: dict[int, nn.Module] = dict(stages)
    pipe = treadle.Pipeline(modules, schedule, mesh=mesh, loss_fn=nn.functional.mse_loss, deadline_s=setup.deadline_s)
    for _ in range(STEPS):
        for stage in stages.values():
            stage.zero_grad()
        loss = float(pipe.step(list(inputs[replica]), list(targets[replica])))
    pipe.close()
    where = f"{name}, {shape}, rank {rank}"
    worst = abs(loss - want_loss) / max(abs(want_loss), 1e-12)
    if not worst <= setup.tolerance:
        raise FailedError(f"{where}: the loss is {loss:.12g}, in one process {want_loss:.12g}", ADVICE)
    for chunk, own in stages.items():
        for param, got, want in grads_of(model[placed[chunk]], own):
            if got is None or want is None:
                raise FailedError(f"{where}: stage {placed[chunk]} {param} has no gradient", ADVICE)
            off = far(got, want)
            worst = max(worst, off)
            if not off <= setup.tolerance:
                raise FailedError(
                    f"{where}: the gradient of stage {placed[chunk]} {param} is off by {off:.1e} of its largest entry, "
                    f"allowed {setup.tolerance:.0e}",
                    ADVICE,
                )
    return worst
