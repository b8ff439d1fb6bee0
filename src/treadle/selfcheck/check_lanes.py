"""Checks lanes: ops of a lane run in order, each after the ops it waits for, on real lanes of the device."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

import torch
from torch import Tensor

from treadle.dist.device import StreamDevice, device_of
from treadle.runtime.run.lanes import Lanes, StreamLanes, ThreadLanes
from treadle.selfcheck.check_report import FailedError, Passed
from treadle.selfcheck.ranks import run_ranks
from treadle.selfcheck.setup import Setup

NUM_LANES, NUM_OPS, SIZE, PRIME = 4, 64, 256, 8191
CHAINS = {"a lane": [1] * NUM_OPS, "a chain over lanes": [op % NUM_LANES for op in range(NUM_OPS)]}
"""The lane of each op."""

ADVICE = "no number of this device can be trusted; report it with this file"


def make_real_lanes(device: torch.device, deadline_s: float) -> Lanes:
    """Return the lanes that a pipeline would have on a device: streams, or threads on a CPU."""
    made = device_of(device, timedelta(seconds=deadline_s))
    if isinstance(made, StreamDevice):
        return StreamLanes([f"lane {lane}" for lane in range(NUM_LANES)], list(map(str, range(NUM_OPS))), made)
    return ThreadLanes(NUM_LANES, NUM_OPS, deadline_s)


def check_lanes(setup: Setup) -> Passed:
    """Run ops that do not commute on a lane alone, and as a chain round all lanes."""
    (told,) = run_ranks(setup, 1, lanes_in_rank)
    return told  # type: ignore[no-any-return]


def lanes_in_rank(setup: Setup, rank: int) -> Passed:
    """Run the check in a process of its own, whose device starts with it."""
    device = setup.device(0)
    lanes = make_real_lanes(device, setup.deadline_s)
    try:
        for name, chain in CHAINS.items():
            got = _run(lanes, device, chain, waits=len(set(chain)) > 1)
            if got != expected():
                raise FailedError(f"ops of {name} ran out of order: they made {got}, in order {expected()}", ADVICE)
            start, end = lanes.times()
            late = [op for op in range(1, NUM_OPS) if end[op - 1] > start[op]]
            if late:
                raise FailedError(f"op {late[0]} of {name} started before op {late[0] - 1} had ended", ADVICE)
        _check_error(lanes)
    finally:
        lanes.close()
    return Passed(f"{NUM_OPS} ops on {NUM_LANES} lanes of {device}: in order, alone and across lanes")


def expected() -> int:
    """Return what the ops make of 1 in order."""
    value = 1
    for op in range(NUM_OPS):
        value = (3 * value + op) % PRIME
    return value


def _run(lanes: Lanes, device: torch.device, chain: list[int], *, waits: bool) -> int:
    value = torch.ones(1, dtype=torch.int64, device=device)
    large = torch.ones(SIZE, SIZE, device=device)
    lanes.begin()
    for op, lane in enumerate(chain):
        lanes.launch(lane, op, partial(_apply, value, large, op), (op - 1,) if waits and op else ())
    lanes.finish()
    return int(value.item())


def _apply(value: Tensor, large: Tensor, op: int) -> None:
    """Take a while, so that an op that does not wait is seen."""
    again = large
    for _ in range(4):
        again = again @ large / SIZE
    value.mul_(3).add_(op).add_((again[0, :1] - 1).to(torch.int64)).remainder_(PRIME)


def _check_error(lanes: Lanes) -> None:
    ran: list[int] = []
    lanes.begin()
    try:
        lanes.launch(1, 0, _fails, ())
        lanes.launch(2, 1, partial(ran.append, 1), (0,))
        lanes.finish()
    except ZeroDivisionError:
        if ran:
            raise FailedError("an op ran although the op it waits for had failed", ADVICE) from None
        return
    raise FailedError("the error of an op did not come out", ADVICE)


def _fails() -> None:
    raise ZeroDivisionError
