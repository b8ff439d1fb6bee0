"""Checks what everything else needs, layer by layer, so that the first failure names the layer: the device, torch's
backend between two devices, and a message and an all-to-all over communicators of Treadle's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from treadle.dist.channel import Channel, Control
from treadle.dist.communicators import CHANNEL, EXCHANGE, make_communicator
from treadle.dist.device import device_of
from treadle.dist.groups import Group, control_wait
from treadle.dist.streams import upload
from treadle.selfcheck.check_report import FailedError, Passed
from treadle.selfcheck.ranks import run_ranks
from treadle.selfcheck.setup import Setup

SIZE = 1 << 16
PAIR = [0, 1]


@dataclass(frozen=True)
class FirstLayer:
    """What a check tries on a number of ranks, and whose it is to mend where that fails."""

    num_ranks: int
    run: Callable[[Setup, int], Passed]
    whose: str
    send: str


def compute(setup: Setup, rank: int) -> Passed:
    """Have the device add numbers that went there through pinned memory, and wait for it by an event."""
    device = setup.device(rank)
    made = upload([1.0, 2.0], torch.float32, device).sum()
    waits = device_of(device, timedelta(seconds=setup.deadline_s))
    waits.catch_up()
    return _passed(float(made), 3.0, f"{device} adds, and an event of it is reached")


def reduce_over_world(setup: Setup, rank: int) -> Passed:
    """Add numbers over the group that init_process_group made."""
    numbers = torch.full((SIZE,), float(rank + 1), device=setup.device(rank))
    dist.all_reduce(numbers)
    return _passed(float(numbers[-1]), 3.0, f"an all-reduce of torch's own over {setup.backend}")


def send_message(setup: Setup, rank: int) -> Passed:
    """Send a tensor each way, over a communicator for each direction."""
    device, deadline = setup.device(rank), timedelta(seconds=setup.deadline_s)
    waits, control = device_of(device, deadline), Group("first/control", PAIR, rank, deadline, control_wait(deadline))
    ends = []
    for name in ("0>1", "1>0"):
        made = make_communicator(f"first/{name}", PAIR, rank, deadline, device, traffic=CHANNEL)
        ends.append(Channel(made, 1 - rank, device, waits.wait, Control(control, 1 - rank)))
    out, into = ends if rank == 0 else reversed(ends)
    sent, came = torch.full((SIZE,), float(rank + 1), device=device), torch.zeros(SIZE, device=device)
    works = [into.communicator.recv([came], 1 - rank, 0), out.communicator.send([sent], 1 - rank, 0)]
    for work in works:
        waits.wait(work)
    waits.catch_up()
    told = _passed(float(came[-1]), float(2 - rank), "a message each way, over communicators connected when made")
    for end in ends:
        end.close()
    control.close()
    return told


def exchange_rows(setup: Setup, rank: int) -> Passed:
    """Exchange uneven numbers of rows."""
    device, deadline = setup.device(rank), timedelta(seconds=setup.deadline_s)
    waits = device_of(device, deadline)
    group = Group("first/ep", PAIR, rank, deadline, waits.wait, device, traffic=EXCHANGE)
    rows = torch.full((3, SIZE), float(rank + 1), device=device)
    send, receive = ([1, 2], [1, 0]) if rank == 0 else ([0, 3], [2, 3])
    came = group.swap(rows, send, receive)
    waits.catch_up()
    told = _passed(float(came.sum()) / SIZE, 1.0 if rank == 0 else 8.0, "an uneven all-to-all, one rank sends no row")
    group.close()
    return told


def _passed(got: float, wanted: float, about: str) -> Passed:
    if got != wanted:
        raise FailedError(f"{about}: got {got:g}, not {wanted:g}", "no number of this layer can be trusted")
    return Passed(about)


LOG = "this report and the output of NCCL_DEBUG=INFO treadle selfcheck"

LAYERS = {
    "device": FirstLayer(1, compute, "the driver or torch's build", "nvidia-smi and python -m torch.utils.collect_env"),
    "backend": FirstLayer(2, reduce_over_world, "torch or NCCL: nothing of Treadle's has run", LOG),
    "message": FirstLayer(2, send_message, "Treadle's, as torch's own all-reduce went through", LOG),
    "all-to-all": FirstLayer(2, exchange_rows, "Treadle's, as a message went through", LOG),
}
"""In their order: each is known to work where the next one fails."""


def check_layer(setup: Setup, name: str) -> Passed:
    """Run what the layer tries; a failure or a hang names it."""
    layer = LAYERS[name]
    try:
        told: Passed = run_ranks(setup, layer.num_ranks, layer.run)[0]
    except FailedError as error:
        raise FailedError(
            f"{name}: {error.found}", f"this is {layer.whose}; checks after it fail, too; send {layer.send}"
        ) from error
    return told
