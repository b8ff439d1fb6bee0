"""A rank's list of ops, launched in order on lanes that run each at once, on a thread, or on a stream.

The thread that calls computes; other lanes go on beside it. It comes to the ops in the order that `host_order` made of
one execution under the costs, which is also the order of launches on all communicators. Once shapes are known, lanes
that are threads get all of a step's ops at its start: then none waits for this thread to come to it (at a step of 9 s,
paced, that was 3 % instead of 9 % over the prediction: benchmarks/overlap.py).

At cell granularity one thread does everything, and ops run in parts: communication goes on by itself between them.
Where micro-batches of a step have different shapes, a receive cannot be posted before its header has come. One thread
that waited for headers would not compute meanwhile, and if it looked for them only when it reads a message, a peer
could wait for room in vain. So ops of such a step run whole, on threads, which get them all at its start too.

A gradient has the shape of its output. Where that is not known yet, in the first step and in one whose micro-batches
differ, a lane's thread waits for the forward whose gradient it is to receive, as it waits for the header of its next
message: the order of launches does not tell it that an exchange, the forward's last op, has ended on its own lane.
Neither message can come before, so a lane waits for nothing that it would not wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NoReturn, TypeAlias

import numpy as np

from treadle.dist.channel import Channel
from treadle.dist.device import GpuLateError, LateError, StreamDevice
from treadle.dist.errors import CommunicatorError
from treadle.dist.groups import Group
from treadle.ir.ops import LaneKind, OpKind
from treadle.ir.program import Ints, Lane, Longs, Op
from treadle.profiles.work_names import pp_name
from treadle.runtime.faults.guard import Guard
from treadle.runtime.faults.progress.device_progress import DeviceProgress
from treadle.runtime.faults.progress.rank_progress import ObservedWait, OpTable, RankProgress
from treadle.runtime.faults.progress.wait_target import ALL, NOBODY
from treadle.runtime.model.exchange import EpGroupModule, ExchangeError
from treadle.runtime.run.handlers import HANDLERS, Handler, maker_of
from treadle.runtime.run.instructions import Instruction, drains, in_parts, post_early, wait_target
from treadle.runtime.run.lanes import Lanes, SerialLanes, StreamLanes
from treadle.runtime.run.own_error import blame
from treadle.runtime.run.ranges import is_profiled, labelled, leave
from treadle.runtime.run.rank_program import RankProgram

MakeLanes: TypeAlias = Callable[[list[str], list[Op]], Lanes]
"""Returns the lanes of these names for these ops. The first computes."""

OWN_LANE = 0


class Executor:
    """Runs a rank's ops in `order`. `own[i]` is the i-th; lanes identify ops by i.

    Args:
        part: What the ops work on.
        order: The rank's ops, in the order in which it launches them.
        make_lanes: What ops run on.
        handlers: The calls of each kind of op.
        parts: Ops run in parts, one call after the other, on lanes that run each at once.
        early: Once shapes are known, receives are posted as soon as their buffers are free.
        make_unequal: What whole ops run on in a step whose micro-batches have different shapes.

    """

    def __init__(
        self,
        part: RankProgram,
        order: Ints,
        make_lanes: MakeLanes,
        handlers: Mapping[OpKind, Handler] = HANDLERS,
        *,
        parts: bool = False,
        early: bool = False,
        make_unequal: MakeLanes | None = None,
    ) -> None:
        program = part.program
        self.program, self._part, self._parts, self._early = program, part, parts, early
        self.own = [program.op(int(index)) for index in order]
        self._names = [pp_name(op, program.layout.placement) for op in self.own]
        self._calls = [handlers[op.kind](part, op) for op in self.own]
        lanes = sorted({op.lane for op in self.own}, key=lambda lane: (lane.kind, lane.peer))
        assert lanes[OWN_LANE].kind is LaneKind.COMPUTE
        self._rows = _table(part, self.own, lanes)
        self._after_forward = _after_forward(part, self.own, self._rows)
        self._drains = drains(part, self.own)
        self._targets = [wait_target(part, op) for op in self.own]
        self._lists: dict[tuple[bool, bool], list[Instruction]] = {}
        self._known = False
        self._progress: RankProgress | None = None
        self._waits: list[ObservedWait] = []
        self._made: dict[MakeLanes, Lanes] = {}
        self._make = {False: make_lanes, True: make_unequal or make_lanes}
        self._lane_names = [lane.name for lane in lanes]
        self.lanes = self._lanes_for(differ=False)

    def run(self, guard: Guard) -> None:
        """Run a step."""
        differ, unseen = self._part.differ, list[int]()
        lanes = self.lanes = self._lanes_for(differ=differ)
        listed = self._listed(self._known, differ)
        if is_profiled():  # asked once: a range costs even where nobody profiles
            listed = labelled(listed, self._names, unseen)
        progress = self._begin(guard, differ=differ)
        current = listed[0]
        try:
            slots, launch = guard.slots, lanes.launch
            for current in listed:
                op, at, lane, run, after, peer = current
                if progress is None:
                    slots[0], slots[1] = op, peer
                elif lane == OWN_LANE:
                    progress.want(at)
                launch(lane, at, run, after)
            if progress is not None:
                progress.want_all()
                lanes.finish()
            for current in self._drains:
                slots[0], slots[1] = current.op, current.peer
                self._drain(current)
            if progress is None:
                lanes.finish()  # a device waits there for what its channels have drained, too
            guard.refuse_void()
        except Exception as error:
            self._blame(guard, error, current)
        self._known = True
        if unseen:
            start, end = lanes.times()
            leave([(self._names[at], start[at], end[at]) for at in unseen])

    def _drain(self, drain: Instruction) -> None:
        """Wait for what has not left a channel; on a device, its stream that computes waits."""
        on_device = _on_device(self.lanes)
        if on_device is None or on_device.progress is None:
            drain.run()
        else:
            on_device.progress.begin(OWN_LANE, drain.at)
            drain.run()
            on_device.progress.end(OWN_LANE, drain.at)

    def forget_shapes(self) -> None:
        """The next step finds out shapes again, and so launches its ops in order."""
        self._known = False

    def times(self) -> Longs:
        """`[start or end, op]` of the last step, -1 for the ops of other ranks."""
        both = np.full((2, self.program.num_ops), -1, np.int64)
        both[0, self._rows.index], both[1, self._rows.index] = self.lanes.times()
        return both

    def close(self) -> None:
        """Gives the lanes back, and the page that neighbours saw."""
        for lanes in self._made.values():
            lanes.close()
        self._progress = None
        for wait in self._waits:
            wait.step = None

    # -- lanes and lists -----------------------------------------------------------------------------------------------

    def _lanes_for(self, *, differ: bool) -> Lanes:
        make = self._make[differ]
        if make not in self._made:
            self._made[make] = made = make(self._lane_names, self.own)
            if made.ahead or _on_device(made) is not None:
                self._waits = ObservedWait.of(_talkers(self._part))
        return self._made[make]

    def _listed(self, known: bool, differ: bool) -> list[Instruction]:
        """Return what a step launches, in order. It is made once for steps of a kind."""
        if (known, differ) not in self._lists:
            if self._parts and not self.lanes.ahead:
                listed = in_parts(self._part, self.own, self._calls)
                listed = post_early(listed, self.program) if self._early and known and not differ else listed
            else:
                listed = self._whole(known, differ)
            self._lists[known, differ] = listed
        return self._lists[known, differ]

    def _whole(self, known: bool, differ: bool) -> list[Instruction]:
        """Return each op as one instruction; those of other lanes first where threads may have them ahead."""
        rows, ahead, after = self._rows, self.lanes.ahead, self._after(known, differ)
        runs = [self._watched(at) if ahead else calls.all for at, calls in enumerate(self._calls)]
        columns = zip(rows.index, range(len(runs)), rows.lane, runs, after, rows.wait_target, strict=True)
        listed = [Instruction(*row) for row in columns]
        return sorted(listed, key=lambda each: each.lane == OWN_LANE) if ahead and (known or differ) else listed

    def _after(self, known: bool, differ: bool) -> Sequence[Sequence[int]]:
        return self._rows.after if known and not differ else self._after_forward

    # -- what other ranks see ------------------------------------------------------------------------------------------

    def _begin(self, guard: Guard, *, differ: bool) -> RankProgress | None:
        """Begin a step. Return its progress, where lanes are threads: else the op that is launched is shown.

        On a device that op is replaced by the one that its streams are at whenever the host waits for them.
        """
        self._progress = guard.device_progress = None
        if self.lanes.ahead:
            self._progress = RankProgress(replace(self._rows, after=self._after(self._known, differ)), guard.slots)
        on_device = _on_device(self.lanes)
        if on_device is not None:
            assert isinstance(on_device.device, StreamDevice)
            guard.device_progress = DeviceProgress(self._rows, self._targets, guard.slots, on_device.device)
            on_device.progress = guard.device_progress
        for wait in self._waits:
            wait.step = self._progress or guard.device_progress
        self.lanes.begin()
        return self._progress

    def _watched(self, at: int) -> Callable[[], None]:
        """Return an op's calls, with the step's progress told when they begin and end."""
        run = self._calls[at].all

        def watched() -> None:
            progress = self._progress
            assert progress is not None
            progress.begin(at)
            try:
                run()
            except BaseException:
                progress.fail()
                raise
            progress.end(at)

        return watched

    def _blame(self, guard: Guard, error: Exception, current: Instruction) -> NoReturn:
        """Raise what an error comes to: its op's own, or the loss behind a wait. The lost may be this rank itself."""
        failed = self.lanes.failed
        at = failed if failed is not None else current.at
        op, peer = self.own[at], current.peer if at == current.at else self._rows.wait_target[at]
        if op.lane.kind is LaneKind.EP and not isinstance(error, ExchangeError):
            peer = NOBODY  # layers run there too, and raise errors of their own
        on_device = isinstance(error, (GpuLateError, CommunicatorError))  # which may have waited at any op
        waited_here = on_device or isinstance(error, LateError)  # for another lane, which is shown already
        if waited_here:
            peer = ALL
        if self._progress is not None:
            self._progress.over()
        if on_device and guard.device_progress is not None:
            guard.device_progress.look()
        elif not waited_here:
            guard.slots[0], guard.slots[1] = op.index, peer
        if self._progress is not None and peer != NOBODY:
            self._progress.suspect_itself()
        blame(guard, error, op, peer, self.own, self._part.global_rank(self._part.pp_rank))


def _on_device(lanes: Lanes) -> StreamLanes | SerialLanes | None:
    """Return lanes on the streams of a device, None for others."""
    if isinstance(lanes, (StreamLanes, SerialLanes)) and isinstance(lanes.device, StreamDevice):
        return lanes
    return None


def _table(part: RankProgram, own: Sequence[Op], lanes: Sequence[Lane]) -> OpTable:
    """Return a rank's ops as they are launched whole. As others of its lane may wait for any, so does an op."""
    place = {op.index: at for at, op in enumerate(own)}
    lane = [lanes.index(op.lane) for op in own]
    return OpTable(
        index=[op.index for op in own],
        lane=lane,
        after=[[place[dep] for dep in part.program.deps(op.index)] for op in own],
        wait_target=[ALL if op.lane.kind.communicates else NOBODY for op in own],
        of_lane=[[at for at, of in enumerate(lane) if of == number] for number in range(len(lanes))],
    )


def _after_forward(part: RankProgram, own: Sequence[Op], rows: OpTable) -> list[Sequence[int]]:
    """Return what ops wait for where a gradient's shape is to be found out: the op that makes what it is of, too."""
    makers = [maker_of(part.program, op) for op in own if op.kind is OpKind.SEND_F]
    made = {(maker.chunk, maker.mb): rows.index.index(maker.index) for maker in makers}
    columns = zip(own, rows.after, strict=True)
    return [[*after, made[op.chunk, op.mb]] if op.kind is OpKind.RECV_B else after for op, after in columns]


def _talkers(part: RankProgram) -> list[Group | Channel]:
    """What the ops of a rank wait at."""
    modules = (module for stage in part.stages.values() for module in stage.module.modules())
    ep_groups = {id(m.ep_group): m.ep_group for m in modules if isinstance(m, EpGroupModule) and m.ep_group is not None}
    gradients = part.gradients
    groups = (*ep_groups.values(), gradients.group, gradients.expert_dp_group, *gradients.tied_groups.values())
    channels = (*part.outgoing.values(), *part.incoming.values())
    return [*channels, *(group for group in groups if group is not None)]
