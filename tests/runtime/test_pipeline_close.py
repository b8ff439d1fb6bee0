"""close() gives everything back at once: connections, descriptors, threads."""

from __future__ import annotations

import gc
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import treadle
from tests.runtime.test_pipeline_silent import low_losses
from tests.support.cases import pipeline, refusal
from tests.support.devices import DEVICE_TYPE
from tests.support.oracle import make_batch, make_mesh, mean_loss
from tests.support.patience import PATIENT_S
from tests.support.ranks import check, run_ranks
from treadle.runtime.model.exchange import Exchange

pytestmark = pytest.mark.slow

NUM = 30


def held() -> tuple[int, int, int]:
    """(descriptors, threads of the process, threads of Python)."""
    fds, tasks = (len(list(Path(f"/proc/self/{what}").iterdir())) for what in ("fd", "task"))
    return fds, tasks, threading.active_count()


def make_and_close(rank: int, layered: bool, num: int) -> list[tuple[int, int, int]]:
    """What is held after each of some pipelines, none of it left to the garbage collector."""
    del rank
    gc.disable()
    mesh, schedule = make_mesh(2, 2), treadle.generate("1f1b", pp=2, microbatches=3)
    after = []
    for _ in range(num):
        stages = low_losses(2, layered)
        pipe = pipeline(schedule, stages, mesh, mean_loss)
        pipe.step(*make_batch(3))
        pipe.evaluate(*make_batch(3))
        pipe.close()
        pipe.close()
        assert "closed" in refusal(partial(pipe.step, *make_batch(3)))
        after.append(held())
    return after


@pytest.mark.parametrize(("layered", "num"), [(False, NUM), (True, 5)])
def test_pipelines_that_were_closed_leave_nothing(layered: bool, num: int) -> None:
    for after in check(run_ranks(4, make_and_close, layered, num)):
        assert all(last <= first for last, first in zip(after[-1], after[0], strict=True)), after


class Exchanging(nn.Module):
    """A stage that an expert group is given to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.exchange = nn.Linear(8, 8), Exchange()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x)
        return out


def make_again(rank: int) -> list[tuple[int, int, int]]:
    """What is held after each of some pipelines of the same modules, which have no group behind any of them."""
    del rank
    gc.disable()
    torch.manual_seed(0)
    mesh = init_device_mesh(DEVICE_TYPE, (2, 2), mesh_dim_names=("pp", "ep"))
    schedule, stages = treadle.generate("1f1b", pp=2, microbatches=3), [Exchanging(), Exchanging()]
    after = []
    for _ in range(5):
        pipe = pipeline(schedule, stages, mesh, nn.functional.mse_loss)
        own = stages[mesh.get_local_rank("pp")]
        assert own.exchange.size == 2
        pipe.step(torch.randn(6, 8), torch.randn(6, 8))
        own.exchange.shared["buffer"] = object()
        pipe.close()
        assert own.exchange.ep_group is None
        assert not own.exchange.shared
        after.append(held())
    return after


def test_modules_give_their_expert_group_back() -> None:
    for after in check(run_ranks(4, make_again)):
        assert all(last <= first for last, first in zip(after[-1], after[0], strict=True)), after


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("this stage cannot")


def fail_and_close(rank: int) -> list[tuple[int, int, int]]:
    """Each pipeline is lost in its first step, and closed by all ranks."""
    mesh, schedule = make_mesh(2), treadle.generate("1f1b", pp=2, microbatches=3)
    after = []
    for _ in range(4):
        pipe = pipeline(schedule, [nn.Linear(8, 8), Fails()], mesh, nn.functional.mse_loss, deadline_s=PATIENT_S)
        with pytest.raises(ArithmeticError if rank == 1 else treadle.RankLostError):
            pipe.step(torch.randn(6, 8), torch.randn(6, 8))
        pipe.close()
        torch.distributed.barrier()
        gc.collect()  # errors hold frames
        after.append(held())
    return after


def test_pipelines_that_were_lost_leave_nothing_once_closed() -> None:
    for after in check(run_ranks(2, fail_and_close)):
        assert all(last <= first for last, first in zip(after[-1], after[0], strict=True)), after
