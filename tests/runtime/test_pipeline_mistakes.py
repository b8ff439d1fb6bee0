"""Stages, schedules and meshes that do not fit together are refused by all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import treadle
from tests.support.cases import (
    Grads,
    hold,
    own_grads,
    pipeline,
    refusal,
    refusals,
    replica_of,
    schedule_of,
    whole_once,
)
from tests.support.devices import DEVICE_TYPE
from tests.support.oracle import (
    chunks_of,
    make_batch,
    make_mesh,
    make_stages,
    mean_loss,
)
from tests.support.ranks import check, run_ranks
from treadle.runtime.model.exchange import RankOwned


def missing_chunk(rank: int) -> Callable[[], object]:
    schedule, mesh = schedule_of("interleaved", 2, 4, 2), make_mesh(2)
    own = chunks_of(schedule, rank, make_stages(4))
    if rank == 1:
        del own[1]
    return lambda: treadle.Pipeline(own, schedule, mesh=mesh, loss_fn=mean_loss)


def test_a_chunk_that_is_missing_is_refused() -> None:
    first, second = refusals(2, missing_chunk)
    assert "a module for each chunk of this rank, [0, 1], got [0]" in second
    assert "stages (1, 3)" in second
    assert "rank 1 could not make its part of the pipeline" in first


def one_bad_part(rank: int) -> Callable[[], object]:
    """Four ranks in two replicas; only the last has a chunk too many."""
    schedule, mesh = schedule_of("1f1b", 2, 4), make_mesh(2, 2)
    own = chunks_of(schedule, mesh.get_local_rank("pp"), make_stages(2))
    if rank == 3:
        own[5] = nn.Identity()
    return lambda: treadle.Pipeline(own, schedule, mesh=mesh, loss_fn=mean_loss)


def test_all_replicas_refuse_if_one_rank_has_a_bad_part() -> None:
    *others, last = refusals(4, one_bad_part)
    assert "got [0, 5]" in last
    assert all("could not make its part of the pipeline" in said for said in others), others


def wrapped_stage(rank: int) -> Callable[[], object]:
    schedule, mesh = schedule_of("1f1b", 2, 4), make_mesh(2)
    groups = [dist.new_group([r]) for r in range(2)]
    stage = make_stages(2)[rank]
    wrapped = nn.parallel.DistributedDataParallel(stage, process_group=groups[rank])
    return lambda: treadle.Pipeline({0: wrapped}, schedule, mesh=mesh, loss_fn=mean_loss)


def test_a_stage_wrapped_for_data_parallelism_is_refused() -> None:
    for said in refusals(2, wrapped_stage):
        assert "chunk 0 is a DistributedDataParallel; give the module inside" in said


OTHERS = {
    "another order": lambda: schedule_of("gpipe", 2, 4),
    "more micro-batches": lambda: schedule_of("1f1b", 2, 6),
    "more chunks": lambda: schedule_of("interleaved", 2, 4, 2),
    "more ranks": lambda: schedule_of("1f1b", 4, 4),
    "another placement": lambda: treadle.loads("# placement: 1/0\n0: F0.0 B0.0 F1.0 B1.0\n1: F0.0 F1.0 B0.0 B1.0\n"),
    "other receives": lambda: replace(
        schedule_of("1f1b", 2, 4), receives={(0, 1): tuple(treadle.ir.F(mb, 0) for mb in (1, 0, 2, 3))}
    ),
}


def other_schedule(dp: int, odd: int, what: str) -> Callable[[int], Callable[[], object]]:
    def make(rank: int) -> Callable[[], object]:
        schedule, mesh = OTHERS[what]() if rank == odd else schedule_of("1f1b", 2, 4), make_mesh(2, dp)
        stages = make_stages(schedule.placement.num_stages)
        return lambda: pipeline(schedule, stages, mesh)

    return make


class OtherSchedule:
    """`other_schedule` as something that can be sent to a rank."""

    def __init__(self, dp: int, odd: int, what: str) -> None:
        self.args = dp, odd, what

    def __call__(self, rank: int) -> Callable[[], object]:
        return other_schedule(*self.args)(rank)


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("what", OTHERS)
def test_different_schedules_are_refused(what: str, dp: int) -> None:
    for rank, said in enumerate(refusals(2 * dp, OtherSchedule(dp, 2 * dp - 1, what))):
        assert said != "not refused", rank
        assert "schedule" in said or "could not make its part" in said


def deadlock(rank: int) -> Callable[[], object]:
    del rank
    schedule = treadle.loads("0: F0.0 B0.0 F1.0 B1.0\n1: F0.0 F1.0 B0.0 B1.0\n")
    stages, mesh = make_stages(2), make_mesh(2)
    return lambda: pipeline(schedule, stages, mesh)


def test_a_schedule_that_would_hang_is_refused() -> None:
    for said in refusals(2, deadlock):
        assert "the schedule is not sound: T201" in said
        assert "'treadle verify' shows it all" in said


def wrong_mesh(rank: int) -> list[str]:
    """Refusals of meshes that do not fit; a mesh may have dp before pp."""
    del rank
    stages = make_stages(2)
    meshes = [
        init_device_mesh(DEVICE_TYPE, (2,), mesh_dim_names=("tp",)),
        init_device_mesh(DEVICE_TYPE, (2, 1), mesh_dim_names=("pp", "tp")),
        init_device_mesh(DEVICE_TYPE, (2,)),
        make_mesh(2),
    ]
    sizes = [2, 2, 2, 4]
    return [
        refusal(
            lambda pp=pp, mesh=mesh: treadle.Pipeline(  # type: ignore[misc]
                {0: stages[0]}, schedule_of("1f1b", pp, 4), mesh=mesh, loss_fn=mean_loss
            )
        )
        for pp, mesh in zip(sizes, meshes, strict=True)
    ]


def test_a_mesh_that_does_not_fit_is_refused() -> None:
    for *names, size in check(run_ranks(2, wrong_mesh)):
        for said, got in zip(names, ("('tp',)", "('pp', 'tp')", "None"), strict=True):
            assert f"got {got}" in said
            assert 'mesh_dim_names=("pp", "dp")' in said
        assert "the schedule is for 4 ranks, the mesh has 2 along pp" in size


def dp_before_pp(rank: int) -> tuple[float, Grads]:
    del rank
    schedule = schedule_of("zb-h1", 2, 4)
    mesh = init_device_mesh(DEVICE_TYPE, (2, 2), mesh_dim_names=("dp", "pp"))
    stages = make_stages(2)
    pipe = pipeline(schedule, stages, mesh)
    return float(pipe.step(*make_batch(4, replica_of(mesh)))), own_grads(schedule, mesh, stages)


def plain_stages() -> list[nn.Module]:
    return make_stages(2)


def test_a_mesh_with_dp_before_pp() -> None:
    hold(check(run_ranks(4, dp_before_pp)), whole_once(plain_stages, 4, 2))


class Copies:
    """Copies of stages that differ on the last rank in the way that `what` says."""

    def __init__(self, name: str, dp: int, what: str) -> None:
        self.args = name, dp, what

    def __call__(self, rank: int) -> Callable[[], object]:
        name, dp, what = self.args
        schedule, mesh = schedule_of(name, 2, 4), make_mesh(2, dp)
        stages = make_stages(2)
        if rank == 2 * dp - 1:
            parameter = next(p for p in stages[-1].parameters() if p.dim() == 2)
            with torch.no_grad():
                if what == "order":
                    parameter.copy_(parameter.flip(0))
                else:
                    parameter[0, 0] += 1e-6
        if what == "frozen":
            stages[-1].requires_grad_(False)
        return lambda: pipeline(schedule, stages, mesh)


@pytest.mark.parametrize("what", ["value", "order", "frozen"])
@pytest.mark.parametrize(("name", "dp"), [("1f1b", 2), ("dualpipe", 1), ("dualpipe", 2)])
def test_copies_that_start_apart_are_refused(name: str, dp: int, what: str) -> None:
    """Also where sums are the same, and where nothing trains: the results would be wrong all the same."""
    said = refusals(2 * dp, Copies(name, dp, what))
    assert "copies of a stage start from different parameters" in said[-1]
    assert "make them from one seed, or broadcast them" in said[-1]
    assert "not refused" not in said


class OwnedLinear(RankOwned, nn.Linear):
    """A linear that belongs to one rank of an expert group."""


def copies_of_experts(rank: int) -> list[str]:
    """What ranks say where an expert of the last rank is another, and where all have theirs by the expert group."""
    said = []
    for name, sizes in (("1f1b", (1, 2, 2)), ("dualpipe", (2, 1, 2))):
        schedule = schedule_of(name, sizes[0], 4)
        mesh = init_device_mesh(DEVICE_TYPE, sizes, mesh_dim_names=("pp", "dp", "ep"))
        for odd in (None, 3):
            stages = {}
            for chunk, stage in enumerate(schedule.placement.stages[mesh.get_local_rank("pp")]):
                torch.manual_seed(stage)
                linear = nn.Linear(4, 4)
                torch.manual_seed(100 + stage * 10 + mesh.get_local_rank("ep") + (5 if rank == odd else 0))
                stages[chunk] = nn.Sequential(linear, OwnedLinear(4, 4))
            said.append(
                refusal(lambda: treadle.Pipeline(stages, schedule, mesh=mesh, loss_fn=mean_loss).close())  # noqa: B023
            )
    return said


@pytest.mark.slow
def test_copies_of_experts_that_start_apart_are_refused() -> None:
    """Ranks of one expert group have experts of their own, which other groups and the pipe's other end have too."""
    found = check(run_ranks(4, copies_of_experts))
    for rank, (alike, apart, ends_alike, ends_apart) in enumerate(found):
        assert alike == ends_alike == "not refused", rank
        for said in (apart, ends_apart):
            assert "copies of a stage start from different parameters: rank 1 (" in said
            assert "and rank 3 (" in said
            assert "differ in 1.weight of stage " in said


def copies_of_values(rank: int) -> list[str]:
    """What replicas say to equal copies with NaN, to rows exchanged, and to another number of parameters."""
    schedule, mesh, said = schedule_of("1f1b", 1, 4), make_mesh(1, 2), []
    for what in ("nan", "rows", "bias"):
        torch.manual_seed(0)
        module = nn.Linear(8191, 3, bias=what != "bias" or rank == 0)
        with torch.no_grad():
            if what == "nan":
                module.weight[1, 1] = float("nan")
            if what == "rows" and rank == 1:
                module.weight.copy_(module.weight[[1, 0, 2]])
        said.append(refusal(lambda: treadle.Pipeline({0: module}, schedule, mesh=mesh, loss_fn=mean_loss).close()))  # noqa: B023
    return said


def test_copies_are_compared_bit_by_bit() -> None:
    for nan, rows, bias in check(run_ranks(2, copies_of_values)):
        assert nan == "not refused"
        assert "differ in weight of stage 0 (shape (3, 8191), torch.float32, requires_grad=True, bits " in rows
        assert "differ in bias of stage 0 (shape (3,), torch.float32, requires_grad=True, bits " in bias
        assert " and nothing)" in bias
