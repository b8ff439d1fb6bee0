"""A rank's part of a Program at the grain of layers: every op launched on its lane, in one order, after what it needs.

The thread that calls computes; other lanes go on beside it. It comes to the ops in the order that `host_order` made of
one execution under the costs, which is also the order of launches on all communicators. Once shapes are known, lanes
that are threads get all of a step's ops at its start: then none waits for this thread to come to it (at a step of 9 s,
paced, that was 3 % instead of 9 % over the prediction: benchmarks/overlap.py). In a step whose micro-batches have
different shapes they get them too.

A gradient has the shape of its output. Where that is not known yet, in the first step and in one whose micro-batches
differ, a lane's thread waits for the forward whose gradient it is to receive, as it waits for the header of its next
message: the order of launches does not tell it that an exchange, the forward's last op, has ended on its own lane.
Neither message can come before, so a lane waits for nothing that it would not wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

import numpy as np

from treadle.dist.channel import Channel
from treadle.dist.device import GpuLateError, LateError
from treadle.dist.errors import CommunicatorError
from treadle.dist.groups import Group
from treadle.ir.ops import LaneKind, OpKind
from treadle.ir.program import Ints, Longs, Op
from treadle.profiles.work_names import pp_name
from treadle.runtime.faults.guard import Guard
from treadle.runtime.faults.progress.rank_progress import ObservedWait, OpTable, RankProgress
from treadle.runtime.faults.progress.wait_target import ALL, NOBODY
from treadle.runtime.model.exchange import EpGroupModule, ExchangeError
from treadle.runtime.run.handlers import HANDLERS, Handler, maker_of
from treadle.runtime.run.lanes import Lanes
from treadle.runtime.run.lanes.paced import Pace
from treadle.runtime.run.own_error import LaunchRow
from treadle.runtime.run.ranges import in_range, is_profiled, leave, sees_this_thread
from treadle.runtime.run.rank_program import RankProgram

PACE = {
    LaneKind.COMPUTE: Pace.AFTER,
    LaneKind.SEND: Pace.BEFORE,
    LaneKind.RECV: Pace.NONE,
    LaneKind.EP: Pace.TOGETHER,
    LaneKind.OUT: Pace.AFTER,
    LaneKind.IN: Pace.AFTER,
    LaneKind.DP: Pace.TOGETHER,
    LaneKind.TIED: Pace.TOGETHER,
    LaneKind.HOST: Pace.AFTER,
}
"""How ops of a lane take their time where they are paced."""

_TALKS = tuple(lane for lane in PACE if lane.communicates)
"""Lanes whose ops wait for other ranks. As others of their lanes may too, a rank that waits is said to wait for all."""


class LayerExecutor:
    """Runs a rank's ops at layer granularity, launched in `order`. `own[i]` is the i-th; lanes identify ops by i."""

    def __init__(
        self,
        part: RankProgram,
        order: Ints,
        make_lanes: Callable[[list[str], list[Op]], Lanes],
        handlers: Mapping[OpKind, Handler] = HANDLERS,
    ) -> None:
        program = part.program
        self.program, self._part = program, part
        self.rank = part.global_rank(part.pp_rank)
        self.own = [program.op(int(index)) for index in order]
        lanes = sorted({op.lane for op in self.own}, key=lambda lane: (lane.kind, lane.peer))
        assert lanes[0].kind is LaneKind.COMPUTE
        self._lane = [lanes.index(op.lane) for op in self.own]
        place = {op.index: at for at, op in enumerate(self.own)}
        self._after = [[place[dep] for dep in program.deps(op.index)] for op in self.own]
        made = {(maker.chunk, maker.mb): place[maker.index] for maker in _makers(part, self.own)}
        self._after_forward = [
            [*after, made[op.chunk, op.mb]] if op.kind is OpKind.RECV_B else after
            for op, after in zip(self.own, self._after, strict=True)
        ]
        self._rows = OpTable(
            index=[op.index for op in self.own],
            lane=self._lane,
            after=self._after,
            wait_target=[ALL if op.lane.kind in _TALKS else NOBODY for op in self.own],
            of_lane=[[at for at, of in enumerate(self._lane) if of == lane] for lane in range(len(lanes))],
        )
        self._names = [pp_name(op, program.layout.placement) for op in self.own]
        self._runs = [self._shown(at, handlers[op.kind](part, op).all) for at, op in enumerate(self.own)]
        self._own = [at for at, lane in enumerate(self._lane) if lane == 0]
        self._others = [at for at, lane in enumerate(self._lane) if lane != 0]
        self._known = False
        self._profiled = False
        self._unseen: list[int] | None = None
        """The ops of a profiled step that other threads ran, if the profiler does not see those."""
        self._under_way: RankProgress | None = None
        self._last_sends = [
            (place[op.index], part.outgoing[op.lane.peer])
            for op in self.own
            if op.kind.is_send and op.index + 1 in program.lane_ptr
        ]
        self._waits = ObservedWait.of(_talkers(part))
        self.lanes = make_lanes([lane.name for lane in lanes], self.own)

    def run(self, guard: Guard) -> None:
        """Run a step."""
        self._profiled = is_profiled()  # asked once: a range costs even where nobody profiles
        self._unseen = [] if sees_this_thread() else None
        differ = self._part.differ
        after = self._after if self._known and not differ else self._after_forward
        ahead = self.lanes.ahead and (self._known or differ)
        under_way = self._under_way = RankProgress(replace(self._rows, after=after), guard.slots)
        for wait in self._waits:
            wait.step = under_way
        self.lanes.begin()
        at = 0
        try:
            for at in self._others if ahead else ():
                self.lanes.launch(self._lane[at], at, self._runs[at], after[at])
            for at in self._own if ahead else range(len(self.own)):
                if self._lane[at] == 0:
                    under_way.want(at)
                self.lanes.launch(self._lane[at], at, self._runs[at], after[at])
            under_way.want_all()
            self.lanes.finish()
            for at, channel in self._last_sends:  # noqa: B007  (an error is told of this op)
                channel.drain()
            guard.refuse_void()
            self._known = True
            if self._unseen:
                start, end = self.lanes.times()
                leave([(self._names[at], start[at], end[at]) for at in self._unseen])
        except Exception as error:
            self._blame(guard, under_way, error, at)

    def forget_shapes(self) -> None:
        """The next step finds out shapes again, and so launches its ops in order."""
        self._known = False

    def _blame(self, guard: Guard, under_way: RankProgress, error: Exception, at: int) -> NoReturn:
        """Raises what an error comes to: its op's own, or the loss behind a wait. The lost may be this rank itself."""
        at = self.lanes.failed if self.lanes.failed is not None else at
        op = self.own[at]
        on_device = isinstance(error, (GpuLateError, CommunicatorError))  # which may have waited at any op
        waited_here = on_device or isinstance(error, LateError)  # for another lane, which is shown already
        talks = waited_here or op.lane.kind in _TALKS
        if op.lane.kind is LaneKind.EP:  # layers run there too, and raise errors of their own
            talks = waited_here or isinstance(error, ExchangeError)
        under_way.over()
        if on_device:
            under_way.show(at, ALL)
        elif not waited_here:
            under_way.show(at, self._rows.wait_target[at] if talks else NOBODY)
        if talks:
            under_way.suspect_itself()
        row = LaunchRow(self.program, self.rank, self._rows.index)
        row.blame(guard, error, op.index, ALL if talks else NOBODY)

    def _shown(self, at: int, run: Callable[[], None]) -> Callable[[], None]:
        """Return `run` with the step told when the op begins and ends, and in a profiler range if one runs."""
        ranged = in_range(self._names[at], run)

        def shown() -> None:
            under_way = self._under_way
            assert under_way is not None
            under_way.begin(at)
            try:
                if self._profiled:
                    ranged()
                    if self._unseen is not None and not sees_this_thread():
                        self._unseen.append(at)
                else:
                    run()
            except BaseException:
                under_way.fail()
                raise
            under_way.end(at)

        return shown

    def times(self) -> Longs:
        """`[start or end, op]` of the last step, -1 for the ops of other ranks."""
        both = np.full((2, self.program.num_ops), -1, np.int64)
        indices = [op.index for op in self.own]
        both[0, indices], both[1, indices] = self.lanes.times()
        return both

    def close(self) -> None:
        """Gives the lanes back, and the page that neighbours saw."""
        self.lanes.close()
        self._under_way = None
        for wait in self._waits:
            wait.step = None


def _makers(part: RankProgram, own: Sequence[Op]) -> list[Op]:
    """The ops that make what is sent forward. Gradients of it come back, in its shape."""
    return [maker_of(part.program, op) for op in own if op.kind is OpKind.SEND_F]


def _talkers(part: RankProgram) -> list[Group | Channel]:
    """What the ops of a rank wait at."""
    modules = (module for stage in part.stages.values() for module in stage.module.modules())
    ep_groups = {id(m.ep_group): m.ep_group for m in modules if isinstance(m, EpGroupModule) and m.ep_group is not None}
    gradients = part.gradients
    groups = (*ep_groups.values(), gradients.group, gradients.expert_dp_group, *gradients.tied_groups.values())
    channels = (*part.outgoing.values(), *part.incoming.values())
    return [*channels, *(group for group in groups if group is not None)]
