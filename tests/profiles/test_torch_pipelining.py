"""Schedules that torch.distributed.pipelining runs on four processes under torch.profiler, read back and imported."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.support.ranks import check, run_ranks
from treadle.ir import Placement
from treadle.ir.ops import ACTIONS, OpKind
from treadle.profiles.importing import import_profile
from treadle.profiles.readers.kineto import KinetoReader
from treadle.profiles.recording import RankRecording

pytestmark = pytest.mark.slow

RANKS, WIDTH, SLEEP_S = 4, 8, 0.04

Label = tuple[str, int, int]
"""Kind, stage, micro-batch."""


class Bracket(NamedTuple):
    """An action, timed by hand."""

    label: Label
    start: int
    end: int


class Way(NamedTuple):
    """A class of torch's, the stages of its ranks, and what Treadle calls the schedule."""

    torch_name: str
    placement: Placement
    num_mb: int
    name: str


WAYS = (
    Way("ScheduleGPipe", Placement.loop(RANKS), 4, "gpipe"),
    Way("ScheduleInterleaved1F1B", Placement.loop(RANKS, 2), 4, "interleaved"),
    Way("ScheduleZBVZeroBubble", Placement.v(RANKS, 2), 8, "zb-v"),
    Way("ScheduleDualPipeV", Placement.v(RANKS, 2), 8, "dualpipev"),
)


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(SLEEP_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        time.sleep(SLEEP_S)
        return grads[0].clone()


class SlowStage(nn.Module):
    """A linear layer that takes its time, there and back."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Sleep behind the layer."""
        made: Tensor = _Slow.apply(self.linear(x))  # type: ignore[no-untyped-call]
        return made


def bracketed(stage: Any, brackets: list[Bracket]) -> Any:
    """A stage of torch's whose calls are timed by hand."""

    def timed(call: Callable[..., Any], kind: str) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapped(mb: int, *args: Any, **kwargs: Any) -> Any:
            start = time.time_ns()
            made = call(mb, *args, **kwargs)
            letter = "I" if kind == "B" and kwargs.get("full_backward") is False else kind
            brackets.append(Bracket((letter, stage.stage_index, mb), start, time.time_ns()))
            return made

        return wrapped

    stage.forward_one_chunk = timed(stage.forward_one_chunk, "F")
    stage.backward_one_chunk = timed(stage.backward_one_chunk, "B")
    stage.backward_weight_one_chunk = timed(stage.backward_weight_one_chunk, "W")
    return stage


def labels(actions: Any) -> list[Label]:
    """The actions of torch's order of a rank that compute; an overlapped pair's one after the other."""
    found = []
    for action in actions:
        for part in (action.sub_actions or (action,)) if action is not None else ():
            if part.is_compute_op:
                found.append((part.computation_type.value, part.stage_index, part.microbatch_index))
    return found


def run_by_torch(rank: int, directory: Path) -> list[tuple[list[Label], list[Bracket]]]:
    """Run a step of each under the profiler: what torch planned for this rank, and what was timed by hand."""
    from torch.distributed import pipelining
    from torch.distributed.pipelining import schedules as by_torch

    torch.set_num_threads(1)
    device, told = torch.device("cpu"), []
    for way in WAYS:
        brackets: list[Bracket] = []
        stages = [
            bracketed(pipelining.PipelineStage(SlowStage(), number, way.placement.num_stages, device), brackets)
            for number in way.placement.stages[rank]
        ]
        made = getattr(by_torch, way.torch_name)
        single = way.placement.vpp == 1
        runner: Any = made(stages[0] if single else stages, way.num_mb, loss_fn=nn.functional.mse_loss)
        batch = torch.randn(2 * way.num_mb, WIDTH)
        args = (batch,) if stages[0].is_first else ()
        more = {"target": batch} if stages[-1].is_last else {}
        runner.step(*args, **more)
        brackets.clear()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            runner.step(*args, **more)
        where = directory / way.name
        where.mkdir(exist_ok=True)
        profile.export_chrome_trace(str(where / f"rank{rank}_trace.json.gz"))
        order = runner._get_pipeline_order() if single else runner.pipeline_order
        told.append((labels(order[rank]), list(brackets)))
    return told


def cells(rank: RankRecording) -> list[tuple[Label, int, int]]:
    """What computes, in order, with start and end."""
    at = np.flatnonzero(np.isin(rank.kind, ACTIONS))
    columns = (rank.kind[at], rank.stage[at], rank.mb[at], rank.start[at], rank.end[at])
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [((OpKind(kind).name, stage, mb), start, end) for kind, stage, mb, start, end in rows]


def test_schedules_that_torch_ran_are_imported_as_they_ran(tmp_path: Path) -> None:
    ranks = check(run_ranks(RANKS, run_by_torch, tmp_path))
    for way, of_ranks in zip(WAYS, zip(*ranks, strict=True), strict=True):
        paths = sorted((tmp_path / way.name).iterdir())
        recording = KinetoReader().read(paths, lambda _: None)
        assert recording.pp == RANKS
        off, late = [], []
        for rank, (planned, brackets) in zip(recording.ranks, of_ranks, strict=True):
            single = way.placement.vpp == 1
            found = [
                ((kind, rank.rank if single else stage, mb), start, end)
                for (kind, stage, mb), start, end in cells(rank)
            ]
            assert [label for label, *_ in found] == planned, (way.name, rank.rank)
            if way.name == "dualpipev":  # a pair's two actions have one range
                paired = np.flatnonzero(rank.joined)
                assert len(paired) > 0
                assert np.array_equal(rank.start[paired], rank.start[paired - 1])
            by_hand = {bracket.label: bracket for bracket in brackets}
            pairs = rank.joined[np.isin(rank.kind, ACTIONS)]
            alone = ~(pairs | np.r_[pairs[1:], False])
            for (label, start, end), is_alone in zip(found, alone.tolist(), strict=True):
                bracket = by_hand[label]
                if is_alone:
                    off.append((end - start) / (bracket.end - bracket.start) - 1)
                    late.append((bracket.start - start) / 1e9)
        assert abs(statistics.median(off)) < 0.01, (way.name, off)
        assert abs(statistics.median(late)) < SLEEP_S / 10, "all ranks are on the clock of their host"
        imported = import_profile([tmp_path / way.name])
        assert (imported.schedule.name, imported.named) == (way.name, True)
        assert imported.schedule.placement.stages == way.placement.stages
