"""What a runtime really issues, on the communicators that it really makes, is an order that ends."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import treadle
from tests.runtime.run.test_layers import WIDTH, Dense
from tests.support.oracle import make_mesh
from tests.support.patience import PATIENT_S
from tests.support.ranks import check, run_ranks
from treadle.costs import durations
from treadle.dist.boundary import Boundary
from treadle.dist.channel import Channel, Posted, most_in_flight
from treadle.ir.ops import LaneKind
from treadle.ir.program import NEVER, Ints, Op, Program
from treadle.lowering.running import expected, host_order, lower_running, lower_weaving
from treadle.passes.issue_order import IssueOrder
from treadle.runtime.pipeline import Pipeline
from treadle.runtime.rank_part import RankPart
from treadle.runtime.run.handlers import Call, Handler, OpCalls
from treadle.runtime.run.rank_program import RankProgram
from treadle.schedules import SCHEDULES, Size
from treadle.verifier.communicator_queues import judge, out_of_turn

PP = 4
GRAINS = ("cells", "layers")


class Issued(NamedTuple):
    """A step of a rank: its ops in the order in which they were issued, and each message's communicator."""

    ops: list[int]
    communicators: dict[int, int]


class NotingPipeline(Pipeline):
    """A Pipeline that notes what it issues."""

    def __init__(self, stages: Mapping[int, nn.Module], schedule: treadle.Schedule, **given: Any) -> None:
        self.noted = Issued([], {})
        self.current = threading.local()
        super().__init__(stages, schedule, **given)

    def instrument(self, part: RankPart) -> RankPart:
        outgoing = {peer: _NotingChannel(channel, self) for peer, channel in part.outgoing.items()}
        incoming = {peer: _NotingChannel(channel, self) for peer, channel in part.incoming.items()}
        handlers = {kind: partial(self._calls, handler) for kind, handler in part.handlers.items()}
        return replace(part, outgoing=outgoing, incoming=incoming, handlers=handlers)

    def _calls(self, handler: Handler, part: RankProgram, op: Op) -> OpCalls:
        calls = handler(part, op)
        return calls._replace(launch=partial(self._launch, calls.launch, op.index))

    def _launch(self, launch: Call, op: int) -> None:
        self.noted.ops.append(op)
        self.current.op = op
        launch()


class _NotingChannel(Channel):
    def __init__(self, channel: Channel, pipe: NotingPipeline) -> None:
        super().__init__(channel.communicator, channel.peer, channel.device, channel.wait, channel.control)
        self._pipe = pipe

    def send(self, tensors: Sequence[Tensor], told: str) -> None:
        self._pipe.noted.communicators[self._pipe.current.op] = id(self.communicator)
        super().send(tensors, told)

    def post(self, boundary: Boundary) -> Posted:
        self._pipe.noted.communicators[self._pipe.current.op] = id(self.communicator)
        return super().post(boundary)


def schedule_of(name: str) -> treadle.Schedule:
    size = SCHEDULES[name].nearest(Size(PP, 2, 2 * PP))
    assert size is not None
    return SCHEDULES[name].generate(size)


def issue(rank: int, names: list[str], grain: str) -> list[tuple[Program, list[Issued]]]:
    """Two steps of each schedule: in the second, shapes are known and receives are posted ahead."""
    found = []
    for name in names:
        schedule = schedule_of(name)
        torch.manual_seed(1)
        made: list[nn.Module] = [
            nn.Sequential(Dense(), Dense()).double() if grain == "layers" else nn.Linear(WIDTH, WIDTH).double()
            for _ in range(schedule.placement.num_stages)
        ]
        stages = {chunk: made[stage] for chunk, stage in enumerate(schedule.placement.stages[rank])}
        loss_fn, mesh = nn.functional.mse_loss, make_mesh(PP)
        pipe = NotingPipeline(stages, schedule, mesh=mesh, loss_fn=loss_fn, deadline_s=PATIENT_S)
        x = list(torch.randn(schedule.num_microbatches, 3, WIDTH, dtype=torch.float64))
        steps = []
        for _ in range(2):
            pipe.noted = Issued([], {})
            pipe.step(x, x)
            steps.append(pipe.noted)
        others = {id(group.communicator) for group in pipe.groups._groups()}
        assert not others & set(steps[0].communicators.values()), "messages share no communicator with a group"
        found.append((pipe.program, steps))
        pipe.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("grain", GRAINS)
def test_every_schedule_issues_an_order_that_ends(grain: str) -> None:
    names = list(SCHEDULES)
    ranks = check(run_ranks(PP, issue, names, grain))
    for at, name in enumerate(names):
        program = ranks[0][at][0]
        for step in (0, 1):
            issued = [rank[at][1][step] for rank in ranks]
            order = IssueOrder.of_lists([np.array(each.ops, np.int32) for each in issued])
            assert np.array_equal(np.sort(order.op), np.arange(program.num_ops)), "each op once"
            assert out_of_turn(program, order) == [], name
            assert judge(program, order, "channel").word == "ends", name
            for each in issued:
                check_communicators(program, each)


def check_communicators(program: Program, issued: Issued) -> None:
    """Each lane of messages has a communicator of its own: the layout that the judge calls `channel`."""
    talks = [op for op in issued.ops if program.lane_kind[program.lane_of[op]] in (LaneKind.SEND, LaneKind.RECV)]
    assert set(issued.communicators) == set(talks)
    of_lane = {int(program.lane_of[op]): number for op, number in issued.communicators.items()}
    assert len(set(of_lane.values())) == len(of_lane)
    assert all(of_lane[int(program.lane_of[op])] == number for op, number in issued.communicators.items())


def host_lists(name: str, grain: str, *, by_start: bool) -> tuple[Program, list[Ints]]:
    schedule = schedule_of(name)
    if grain == "cells":
        program = lower_running(schedule, reduce=True)
        return program, host_order(program, expected(program), by_start=by_start)
    costs = treadle.load_costs("unit")
    program = lower_weaving(schedule, costs, treadle.LoweringOptions(layers=2), reduce=True)
    return program, host_order(program, durations(program, costs), by_start=by_start)


@pytest.mark.parametrize("by_start", [False, True])
@pytest.mark.parametrize("grain", GRAINS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_host_orders_end_where_a_channel_waits_for_its_earlier_sends(name: str, grain: str, by_start: bool) -> None:
    """A channel keeps few large messages alive: a send waits until the one before the last few has left."""
    program, lists = host_lists(name, grain, by_start=by_start)
    order = with_waits(program, IssueOrder.of_lists(lists), most_in_flight(1 << 30))
    assert out_of_turn(program, order) == []
    assert judge(program, order, "channel").word == "ends"


def with_waits(program: Program, order: IssueOrder, most: int) -> IssueOrder:
    """Add the wait for the send `most` places before each send of a lane."""
    items: list[tuple[int, bool]] = []
    ptr = [0]
    for rank in range(program.num_ranks):
        for op in order.op[order.ptr[rank] : order.ptr[rank + 1]].tolist():
            items.append((op, False))
            first = int(program.lane_ptr[program.lane_of[op]])
            if program.op(op).kind.is_send and op - most >= first:
                items.append((op - most, True))
        ptr.append(len(items))
    ops, waits = np.array([op for op, _ in items], np.int32), np.array([wait for _, wait in items])
    assert waits.any()
    assert NEVER not in ops
    return IssueOrder(np.array(ptr, np.int64), ops, np.zeros(len(ops), bool), waits)
