"""What tests of pipelines share: a step of a pipeline, the same in one process, and refusals.

Gradients are held to the whole model in one process. A refusal is a ValueError on every rank, soon.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import treadle
from tests.support.devices import drawn
from tests.support.oracle import (
    chunks_of,
    cut,
    grads_of,
    make_batch,
    make_mesh,
    mean_loss,
    run_whole,
    worst,
)
from tests.support.patience import SOON_S
from tests.support.ranks import Outcome, check, close_at_end, run_ranks
from treadle.schedules import SCHEDULES, Size

MOST_DIFFERENCE = 1e-10

Grads = dict[str, Tensor | None]
Make = Callable[[], list[nn.Module]]


def schedule_of(name: str, pp: int, num_mb: int, vpp: int | None = None) -> treadle.Schedule:
    return treadle.generate(name, pp=pp, vpp=vpp, microbatches=num_mb)


def replica_of(mesh: DeviceMesh) -> int:
    names = mesh.mesh_dim_names
    return mesh.get_local_rank("dp") if names is not None and "dp" in names else 0


def pipeline(
    schedule: treadle.Schedule, stages: Sequence[nn.Module], mesh: DeviceMesh, loss_fn: Any = mean_loss, **more: Any
) -> treadle.Pipeline:
    own = chunks_of(schedule, mesh.get_local_rank("pp"), stages)
    return close_at_end(treadle.Pipeline(own, schedule, mesh=mesh, loss_fn=loss_fn, **more))


def take_step(pipe: treadle.Pipeline, *batch: Any, reduce: bool) -> Tensor:
    """A step that reduces, or one in `no_sync()`."""
    with nullcontext() if reduce else pipe.no_sync():
        return pipe.step(*batch)


def own_grads(schedule: treadle.Schedule, mesh: DeviceMesh, stages: Sequence[nn.Module]) -> Grads:
    return grads_of({number: stages[number] for number in schedule.placement.stages[mesh.get_local_rank("pp")]})


def step_once(rank: int, name: str, num_mb: int, dp: int, make: Make, loss_fn: Any) -> tuple[float, Grads]:
    """A step of a schedule on two pipeline ranks, with the batch of `make_batch`."""
    del rank
    schedule, mesh = schedule_of(name, 2, num_mb), make_mesh(2, dp)
    stages = make()
    pipe = pipeline(schedule, stages, mesh, loss_fn)
    loss = pipe.step(*make_batch(num_mb, replica_of(mesh)))
    return float(loss), own_grads(schedule, mesh, stages)


def whole_once(make: Make, num_mb: int, dp: int, loss_fn: Any = mean_loss) -> tuple[float, Grads]:
    stages = make()
    losses = run_whole(stages, cut([make_batch(num_mb, replica) for replica in range(dp)], num_mb), loss_fn)
    return sum(losses) / len(losses), grads_of(dict(enumerate(stages)))


def hold(
    ranks: Sequence[tuple[float, Grads]], wanted: tuple[float, Grads], most: float = MOST_DIFFERENCE, note: object = ""
) -> None:
    """All ranks have the loss, and the gradients of their stages."""
    for rank, (loss, grads) in enumerate(ranks):
        assert loss == pytest.approx(wanted[0], rel=most), (note, rank)
        difference, where = worst(grads, wanted[1])
        assert difference <= most, f"{note} rank {rank}: {where} differs by {difference}"


def refusal(call: Callable[[], object]) -> str:
    """What a call was refused with, after which the rank goes on."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return "not refused"


def all_refuse(rank: int, make: Callable[[int], Callable[[], object]]) -> tuple[str, float]:
    """The refusal on this rank and how long it took. No rank leaves before all have theirs."""
    call = make(rank)
    begin_s = time.monotonic()
    said = refusal(call)
    took_s = time.monotonic() - begin_s
    dist.barrier()
    return said, took_s


def refusals(world: int, make: Callable[[int], Callable[[], object]]) -> list[str]:
    """What each rank says; nobody waits for a rank that has refused."""
    told = check(run_ranks(world, all_refuse, make))
    assert all(took_s < SOON_S for _, took_s in told), told
    return [said for said, _ in told]


def nearest(name: str, pp: int, num_mb: int, vpp: int | None = None) -> treadle.Schedule | None:
    """The schedule in exactly this number of micro-batches, if it has such a size."""
    family = SCHEDULES[name]
    size = family.nearest(Size(pp, vpp if vpp is not None else family.default_vpp, num_mb))
    if size is None or (size.pp, size.microbatches) != (pp, num_mb):
        return None
    return family.generate(size)


def square_loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).double().square().mean()


def float_batch(num_mb: int, replica: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + replica)
    x, y = drawn(torch.randn, 2, num_mb * 2, 6, generator=generator, dtype=torch.float64)
    return x, y


def ended_soon(outcomes: Sequence[Outcome[Any]], refusing: int, match: str) -> None:
    """The rank at fault says why, and no other hangs."""
    assert not any(outcome.timed_out for outcome in outcomes), "\n".join(map(str, outcomes))
    assert not any(outcome.returned for outcome in outcomes)
    error = outcomes[refusing].error
    assert error is not None
    assert error.type == "ValueError"
    assert match in error.message
    assert all(outcome.ended_s - outcomes[refusing].ended_s < SOON_S for outcome in outcomes)
