"""Failures where communication runs behind the host, as with NCCL: a wait that was aborted returns, with any numbers.

There is no NCCL here. Communicators over gloo have its manners, in real processes, of which one is killed.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import treadle
from tests.support.behind_host import BehindHost, Wrapped
from tests.support.cases import pipeline
from tests.support.oracle import chunks_of, make_batch, make_mesh, make_stages, mean_loss
from tests.support.patience import PATIENT_S, SOON_S
from tests.support.ranks import check, run_ranks
from treadle.dist import clock as clock_module
from treadle.dist import communicators, groups
from treadle.dist.streams import replace_streams
from treadle.runtime.faults.watch import EXIT_LOST
from treadle.runtime.model.exchange import Exchange, ExchangeError

pytestmark = pytest.mark.slow

LOST = 1
GARBAGE = 7.25e11


class Aborted(Wrapped):
    """A communicator of NCCL's manners: an op whose peer is gone goes on until it is aborted; its wait then returns."""

    def __init__(self, made: Any) -> None:
        super().__init__(made, self._until_aborted)
        self.aborted = threading.Event()
        self._tensors: list[Tensor] = []

    def launch(self, call: str, tensors: list[Tensor], *args: Any) -> Any:
        self._tensors = tensors
        return super().launch(call, tensors, *args)

    def _until_aborted(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError:
            self.aborted.wait()
            for tensor in self._tensors:
                tensor.fill_(GARBAGE)

    def abort(self) -> None:
        self.aborted.set()


class Hangs(Aborted):
    """Its abort never ends."""

    def abort(self) -> None:
        time.sleep(1e6)


def lose_a_replica(rank: int, wrap: Callable[[Any], Wrapped], control_too: bool) -> str:
    """A step of two replicas, of which one dies when the other is in the reduction of gradients.

    `control_too`: replicas reduce over the group that they agree over, as on a CPU.
    """
    with ExitStack() as stack:
        if control_too:
            make = communicators.make_communicator
            groups.make_communicator = lambda name, *more, **options: (  # type: ignore[attr-defined]
                wrap(make(name, *more, **options)) if "/dp/" in name else make(name, *more, **options)
            )
        else:
            stack.enter_context(replace_streams("cpu", BehindHost(lambda made, name: wrap(made))))
        schedule = treadle.generate("1f1b", pp=1, microbatches=2)
        pipe = pipeline(schedule, [nn.Linear(4, 4)], make_mesh(1, 2), nn.functional.mse_loss, deadline_s=PATIENT_S)
        torch.manual_seed(0)
        batch = torch.randn(4, 4), torch.randn(4, 4)
        if rank == LOST:
            pipe.gradients.reduce = lambda *bucket: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
        try:
            loss = pipe.step(*batch)
        except treadle.RankLostError as error:
            pipe.close()
            return f"lost {error.rank} {error.kind}, {getattr(error, '__notes__', 'no notes')}"
        return f"a number came back: {loss}"


@pytest.mark.parametrize("control_too", [False, True])
def test_a_rank_whose_reduction_was_aborted_returns_no_number(control_too: bool) -> None:
    survivor, killed = run_ranks(2, lose_a_replica, Aborted, control_too)
    assert killed.exitcode == -signal.SIGKILL
    assert survivor.value == f"lost {LOST} killed, no notes", survivor


def test_a_process_ends_although_its_abort_hangs() -> None:
    survivor, _ = run_ranks(2, lose_a_replica, Hangs, False, timeout_s=PATIENT_S)
    assert survivor.exitcode == EXIT_LOST, survivor
    assert "rank 1 was lost first: killed" in survivor.stderr


class DataOnly(Wrapped):
    """A communicator of the device, which carries what stages compute and nothing else."""

    def launch(self, call: str, tensors: list[Tensor], *args: Any) -> Any:
        assert all(tensor.is_floating_point() and tensor.numel() > 1 for tensor in tensors), (call, tensors)
        return super().launch(call, tensors, *args)


def step_and_trace(rank: int, behind_host: bool) -> tuple[list[str], float, int]:
    """The communicators of the device that were made, the loss, and the offset of this rank's clock."""
    made: list[str] = []

    def wrap(communicator: Any, name: str) -> Any:
        made.append(name.split("/", 2)[2])
        return DataOnly(communicator)

    with ExitStack() as stack:
        if behind_host:
            stack.enter_context(replace_streams("cpu", BehindHost(wrap)))
        clock_module.host_number = lambda: rank + 1  # else ranks of one host do not compare clocks
        schedule, mesh = treadle.generate("1f1b", pp=2, microbatches=3), make_mesh(2, 2)
        stages = make_stages(2)
        own = chunks_of(schedule, mesh.get_local_rank("pp"), stages)
        pipe = treadle.Pipeline(own, schedule, mesh=mesh, loss_fn=mean_loss, deadline_s=PATIENT_S)
        loss = float(pipe.step(*make_batch(3, mesh.get_local_rank("dp"))))
        pipe.evaluate(*make_batch(3, mesh.get_local_rank("dp")))
        assert pipe.gather_trace().end.max() > 0
        offset = pipe._clock_offset
        pipe.close()
        return made, loss, offset


def test_control_of_a_device_goes_from_cpu_to_cpu() -> None:
    behind, plain = (check(run_ranks(4, step_and_trace, behind_host)) for behind_host in (True, False))
    for rank, (made, loss, offset) in enumerate(behind):
        pp_rank, dp_rank = divmod(rank, 2)
        assert made == [f"{dp_rank}/0>1", f"{dp_rank}/1>0", f"reduce/{2 * pp_rank}"]
        assert loss == plain[rank][1]
        assert abs(offset) < SOON_S * 1e9, "they are on one clock"
    assert all(made == [] for made, _, _ in plain)


class FailsOnDevice(nn.Module):
    """A stage behind which the device has failed, which the next call of a communicator tells."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out


def fail_on_device(rank: int, call: str, error: type[RuntimeError]) -> str:
    text = "CUDA error: the launch timed out and was terminated"
    pipe = pipeline(
        treadle.generate("1f1b", pp=2, microbatches=3),
        [nn.Linear(8, 8), FailsOnDevice()],
        make_mesh(2),
        nn.functional.mse_loss,
        deadline_s=PATIENT_S,
    )
    if rank == 1:

        def fail(*_: Any) -> None:
            raise error(text)

        side = pipe.groups.incoming if call == "recv" else pipe.groups.outgoing
        for channel in side.values():
            channel.communicator = Wrapped(channel.communicator)
            setattr(channel.communicator, call, fail)
    try:
        pipe.step(torch.randn(6, 8), torch.randn(6, 8))
    except RuntimeError as raised:
        return f"{type(raised).__name__}: {raised}"
    finally:
        pipe.close()
    return "nothing"


@pytest.mark.parametrize("error", [torch.AcceleratorError, torch.OutOfMemoryError])
def test_an_exchange_keeps_the_type_of_an_error_of_the_device(error: type[RuntimeError]) -> None:
    exchange = Exchange()
    exchange.join(mock.Mock(ranks=[0, 1], swap=mock.Mock(side_effect=error("CUDA error: misaligned address"))), {})
    with pytest.raises(error, match="misaligned"):
        exchange.swap(torch.ones(2, 3), [1, 1], [1, 1])
    exchange.ep_group.swap.side_effect = RuntimeError("Connection closed by peer")  # type: ignore[union-attr]
    with pytest.raises(ExchangeError, match="Connection closed"):
        exchange.swap(torch.ones(2, 3), [1, 1], [1, 1])


@pytest.mark.parametrize("error", [torch.AcceleratorError, torch.OutOfMemoryError])
@pytest.mark.parametrize("call", ["send", "recv"])
def test_an_error_of_the_device_is_this_ranks_own(call: str, error: type[RuntimeError]) -> None:
    other, own = check(run_ranks(2, fail_on_device, call, error))
    assert own.startswith(f"{error.__name__}: CUDA error: the launch timed out"), own
    assert other.startswith(f"RankLostError: rank 1 was lost first: raised {error.__name__}"), other
