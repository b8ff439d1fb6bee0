"""Both executors run a rank's ops through one dict of handlers: recorded here, without process groups."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn

import treadle
from treadle.costs import UNIT_COSTS, durations
from treadle.dist.device import Host
from treadle.ir.ops import MEASURED_ONLY, STEP_END, OpKind
from treadle.ir.program import Longs, Op, Program
from treadle.lowering import LoweringOptions
from treadle.lowering.running import expected, host_order, lower_running, lower_weaving
from treadle.profiles.work_names import CONTINUED, pp_ops
from treadle.runtime.faults.guard import Guard
from treadle.runtime.model.stage import Stage
from treadle.runtime.run.handlers import HANDLERS, Handler, OpCalls
from treadle.runtime.run.lanes import SerialLanes
from treadle.runtime.run.rank_program import RankProgram
from treadle.runtime.run.run_cells import CellExecutor
from treadle.runtime.run.run_layers import LayerExecutor

Executor = CellExecutor | LayerExecutor
Log = list[tuple[str, str]]

RANK, PP, MICROBATCHES = 1, 2, 4


def recording(log: Log, fails: Callable[[Op], bool] = lambda op: False) -> dict[OpKind, Handler]:
    """Handlers of all kinds that note each call, and raise where an op fails."""

    def note(op: Op, call: str) -> None:
        log.append((call, str(op)))
        if fails(op):
            raise ValueError("bad batch")

    def handler(part: RankProgram, op: Op) -> OpCalls:
        finish = partial(note, op, "finish") if op.kind.is_recv or op.kind is OpKind.REDUCE_GRAD else None
        return OpCalls(partial(note, op, "launch"), finish)

    return dict.fromkeys(HANDLERS, handler)


def rank_program(program: Program) -> RankProgram:
    stages = {0: Stage(RANK, nn.Identity(), None, None, 0)}
    anything, gradients = mock.MagicMock(), mock.MagicMock(reduce_group=None, expert_dp_group=None)
    return RankProgram(program, RANK, stages, anything, anything, gradients, lambda pp_rank: pp_rank)


def cells(handlers: dict[OpKind, Handler], name: str = "1f1b") -> tuple[Executor, list[str]]:
    """An executor, and the rank's ops in the order of its plan."""
    program = lower_running(treadle.generate(name, pp=PP, microbatches=MICROBATCHES), reduce=True)
    executor = CellExecutor(rank_program(program), Host(timedelta(seconds=1)), handlers)
    return executor, in_order(program, expected(program))


def layers(handlers: dict[OpKind, Handler], name: str = "1f1b") -> tuple[Executor, list[str]]:
    schedule = treadle.generate(name, pp=PP, microbatches=MICROBATCHES)
    options = LoweringOptions(layers=(2,) * PP, moe=True, head=True)
    program = lower_weaving(schedule, UNIT_COSTS, options, reduce=True)
    ticks = durations(program, UNIT_COSTS)
    executor = LayerExecutor(
        rank_program(program), host_order(program, ticks)[RANK], lambda lanes, ops: SerialLanes(len(ops)), handlers
    )
    return executor, in_order(program, ticks)


def in_order(program: Program, ticks: Longs) -> list[str]:
    return [str(program.op(int(op))) for op in host_order(program, ticks)[RANK]]


MAKE = {"cells": cells, "layers": layers}


def test_every_kind_of_op_of_a_pipeline_has_a_handler() -> None:
    of_updates = {OpKind.H2D, OpKind.BROADCAST, OpKind.RELOAD}
    of_the_caller = set(STEP_END) - {OpKind.GATHER_PARAMS}  # the optimizer's
    assert set(HANDLERS) == set(OpKind) - of_updates - of_the_caller - set(MEASURED_ONLY)


@pytest.mark.parametrize("grain", MAKE)
def test_an_executor_launches_every_op_once_in_the_order_of_the_plan(grain: str) -> None:
    log: Log = []
    executor, planned = MAKE[grain](recording(log))
    executor.run(Guard())
    assert [op for call, op in log if call == "launch"] == planned


def test_cells_finish_a_receive_just_before_its_reader_and_reductions_last() -> None:
    log: Log = []
    executor, _ = cells(recording(log))
    executor.run(Guard())
    for mb in range(MICROBATCHES):
        reader = log.index(("launch", f"F{mb}.0"))
        assert log[reader - 1] == ("finish", f"receive F{mb}.0 from rank 0")
    assert log[-1] == ("finish", "reduce_grad .0")


def test_cells_post_receives_earlier_once_shapes_are_known_each_channel_in_order() -> None:
    log: Log = []
    executor, _ = cells(recording(log), "zb-h1")
    executor.run(Guard())
    first = log.copy()
    log.clear()
    executor.run(Guard())
    assert sorted(log) == sorted(first)
    posts = [
        [entry for entry in run if entry[1].startswith("receive") and entry[0] == "launch"] for run in (first, log)
    ]
    assert posts[0] == posts[1]  # rank 1 of 2 has one channel
    places = [[run.index(post) for post in posts[0]] for run in (first, log)]
    assert all(early <= planned for planned, early in zip(*places, strict=True))
    rest = [[entry for entry in run if entry not in posts[0]] for run in (first, log)]
    assert rest[0] == rest[1]
    executor.forget_shapes()
    log.clear()
    executor.run(Guard())
    assert log == first


def test_layers_finish_an_op_before_the_next_of_its_lane() -> None:
    log: Log = []
    executor, _ = layers(recording(log))
    executor.run(Guard())
    for at, entry in enumerate(log):
        if entry[1].startswith("receive") and entry[0] == "launch":
            assert log[at + 1] == ("finish", entry[1])


@pytest.mark.parametrize(("grain", "failing"), [("cells", "B1.0"), ("layers", "mlp_f 1.0 L1")])
def test_an_error_of_an_op_has_a_note_with_rank_step_op_and_row(grain: str, failing: str) -> None:
    executor, planned = MAKE[grain](recording([], lambda op: str(op) == failing))
    guard = Guard()
    with pytest.raises(ValueError, match="bad batch") as caught, guard.step(7):
        executor.run(guard)
    title, row, carets = caught.value.__notes__[0].split("\n")
    assert title == f"rank {RANK}, step 7, at {failing}"
    at = planned.index(failing)
    assert row.split(", ") == ["    " + planned[at - 3], *planned[at - 2 : at + 4]]
    assert row[carets.index("^") : carets.rindex("^") + 1] == failing
    assert len(caught.value.__notes__) == 1


NAMES = {
    "cells": {"PP:1RECV_F0", "PP:1RECV_F0 continued", "PP:1F0", "PP:1B3", "PP:1SEND_B2", "PP:1REDUCE_GRAD"},
    "layers": {"PP:1RECV_F0", "PP:attn_f 3.0 L1", "PP:dispatch_b 0.0 L0", "PP:head_f 2.0", "PP:1SEND_B2"},
}
"""Of rank 1, some of each kind."""


@pytest.mark.parametrize("all_threads", [False, True])
@pytest.mark.parametrize("grain", MAKE)
def test_a_profile_of_a_step_shows_the_ops_by_torchs_names(grain: str, all_threads: bool) -> None:
    executor, planned = MAKE[grain](recording([]))
    executor.run(Guard())
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=all_threads)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, experimental_config=config) as profile:
        executor.forget_shapes()
        executor.run(Guard())
    shown = {event.key for event in profile.key_averages()}
    assert NAMES[grain] <= shown
    named = [name for name in shown if name.startswith("PP:") and not name.endswith(CONTINUED)]
    assert len(named) == len(planned)
    assert all(pp_ops(name) for name in named)


@pytest.mark.parametrize("grain", MAKE)
def test_a_step_without_a_profiler_makes_no_ranges(grain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    executor, _ = MAKE[grain](recording([]))
    never = mock.Mock(side_effect=AssertionError("a range where nobody profiles"))
    monkeypatch.setattr("treadle.runtime.run.ranges.record_function", never)
    executor.run(Guard())
