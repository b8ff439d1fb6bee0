"""What the stream checker sees of torch: kernels and their operands, where the host waits, whose memory it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from treadle.dist.streams import HOST_MEMORY, DeviceEvent, Download, keep, streams_of, upload
from treadle.runtime.checker import FindingKind, StreamChecker, check_streams
from treadle.runtime.checker.log import Free, HostWait, Use

CPU = torch.device("cpu")
X = torch.arange(8.0)


def uses(run: Callable[[], Any]) -> list[tuple[str, int, int]]:
    """(kernel, storages read, storages written) of what a call launches."""
    with check_streams() as checker:
        run()
    return [(e.kernel, len(e.reads), len(e.writes)) for e in checker.log if isinstance(e, Use)]


@pytest.mark.parametrize(
    ("run", "want"),
    [
        (lambda: X + X, [("add", 2, 1)]),
        (lambda: X.view(2, 4).t()[0], []),
        (lambda: X.reshape(2, 4).t().contiguous(), [("clone", 1, 1)]),
        (lambda: X.clone().add_(1), [("clone", 1, 1), ("add_", 0, 1)]),
        (lambda: torch.empty(4, device=CPU), []),
        (lambda: torch.zeros(4, device=CPU), [("zeros", 0, 1)]),
        (lambda: torch.cat([X, X]), [("cat", 2, 1)]),
        (lambda: torch.zeros(4) + torch.ones(4), []),
        (lambda: X.new_empty(3).fill_(2.0), [("fill_", 0, 1)]),
    ],
    ids=["kernel", "views", "copy of a view", "in place", "empty", "zeros", "list", "the host's own", "new_empty"],
)
def test_kernels_and_what_they_touch(run: Callable[[], Any], want: list[tuple[str, int, int]]) -> None:
    assert uses(run) == want


def waits(run: Callable[[], Any]) -> list[str]:
    """Why the host waits in a call."""
    with check_streams() as checker:
        run()
    return [entry.why for entry in checker.log if isinstance(entry, HostWait)]


@pytest.mark.parametrize(
    ("run", "want"),
    [
        (lambda: X.sum().item(), ["_local_scalar_dense"]),
        (lambda: bool((X > 2).all()), ["_local_scalar_dense"]),
        (lambda: X.tolist(), ["tolist"]),
        (lambda: X.cpu(), ["cpu"]),
        (lambda: X.numpy(), ["numpy"]),
        (lambda: X[X > 2], ["index"]),
        (lambda: X.nonzero(), ["nonzero"]),
        (lambda: torch.bincount(X.long()), ["bincount"]),
        (lambda: torch.tensor([1, 2], device=CPU), ["torch.tensor of numbers of the host"]),
        (lambda: torch.tensor([1, 2]).to(CPU), ["a copy of memory that is not pinned"]),
        (lambda: X.clone().copy_(torch.zeros(8)), ["a copy of memory that is not pinned"]),
        (lambda: X.to(HOST_MEMORY), ["cpu"]),
        (lambda: torch.tensor([1, 2]).tolist(), []),
        (lambda: torch.tensor([1, 2], device=HOST_MEMORY).tolist(), []),
        (lambda: X.clone().masked_fill_(X > 2, 0.0), []),
        (lambda: upload([1, 2, 3], torch.int64, CPU) + 1, []),
        (lambda: Download(X).tolist(), ["an event"]),
    ],
)
def test_where_the_host_waits(run: Callable[[], Any], want: list[str]) -> None:
    assert waits(run) == want


def found(checker: StreamChecker) -> list[FindingKind]:
    return [finding.kind for finding in checker.report().findings]


def test_a_tensor_of_the_host_in_a_kernel_is_found() -> None:
    with check_streams() as checker:
        X + torch.ones(8)
    assert found(checker) == [FindingKind.ON_HOST]
    with check_streams() as checker:
        X + torch.tensor(2.0)  # one number goes with the launch
    assert found(checker) == []


def test_numbers_come_to_the_host_behind_their_event() -> None:
    with check_streams() as checker:
        assert Download(X + 1).tolist() == (X + 1).tolist()
        assert upload([3, 4], torch.int64, CPU).tolist() == [3, 4]
    assert found(checker) == []


def test_without_its_event_the_host_reads_too_early() -> None:
    with check_streams() as checker:
        download = Download(X + 1)
        download._event = None
        download.tolist()
    assert found(checker) == [FindingKind.READ_TOO_EARLY]


def test_a_wait_for_other_ranks_numbers_ends_as_its_device_says() -> None:
    class LostError(Exception):
        pass

    def lost(event: DeviceEvent) -> None:
        raise LostError

    with check_streams():
        download = Download(X + 1)
        with pytest.raises(LostError):
            download.tensor(lost)


def test_a_backward_on_another_stream_than_its_forward_is_found() -> None:
    linear = nn.Linear(8, 8)
    with check_streams() as checker:
        streams = streams_of(CPU)
        assert streams is not None
        side = streams.new(CPU, "side")
        y = linear(X).sum()
        side.wait_stream(streams.current(CPU))
        with streams.on(side):
            torch.autograd.backward(y)
    assert FindingKind.OTHER_STREAM in found(checker)


def test_a_storage_is_free_when_python_lets_go_of_it() -> None:
    with check_streams() as checker:
        x = X + 1
        kept = x.view(2, 4)
        del x
        assert not any(isinstance(entry, Free) for entry in checker.log)
        del kept
        assert any(isinstance(entry, Free) for entry in checker.log)


# -- small runs of what went wrong -------------------------------------------------------------------------------------


def on_two_streams(use: Callable[[Tensor], Any], *, kept: bool) -> list[FindingKind]:
    """A tensor made on one stream, used on another behind an event, dropped, and its memory used again."""
    with check_streams() as checker:
        streams = streams_of(CPU)
        assert streams is not None
        maker, user = streams.new(CPU, "maker"), streams.new(CPU, "user")
        with streams.on(maker):
            streams.begin_op("dispatch")
            made = X * 2
            event = streams.event(CPU)
        user.wait_event(event)
        with streams.on(user):
            streams.begin_op("mlp")
            if kept:
                keep(made)
            use(made)
            del made
        with streams.on(maker):
            streams.begin_op("dispatch")
            torch.zeros(8, device=CPU)
    return found(checker)


@pytest.mark.parametrize(
    "use",
    [
        lambda grad: torch.autograd.backward([X.clone().requires_grad_().mul(2)], [grad]),
        lambda grad: torch.cat([grad.reshape(-1), grad.reshape(-1)]),
        lambda loss: loss.sum() + X.sum(),
    ],
    ids=["a gradient between segments", "gradients gathered for their reduction", "a loss added on another stream"],
)
def test_memory_that_another_stream_still_reads(use: Callable[[Tensor], Any]) -> None:
    assert set(on_two_streams(use, kept=False)) == {FindingKind.NOT_KEPT, FindingKind.REUSED}
    assert on_two_streams(use, kept=True) == []


def test_one_checker_at_a_time() -> None:
    with check_streams(), pytest.raises(ValueError, match="replaced already"), check_streams():
        pass
    assert streams_of(CPU) is None
