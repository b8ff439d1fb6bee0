"""Ranks in different calls raise errors that name both, and no process is ended by a message of another size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import treadle
from tests.support.cases import pipeline, schedule_of, take_step
from tests.support.oracle import make_batch, make_mesh, make_stages
from tests.support.patience import PATIENT_S
from tests.support.ranks import check, run_ranks
from treadle.dist.calls import CALLS, contradiction, number_of
from treadle.runtime.faults.watch import RankLostError

MICROBATCHES = 4


def exchange(pipe: treadle.Pipeline) -> None:
    with pipe.together("the exchange of parameters"):
        if pipe.groups.replica_group is not None:
            pipe.groups.replica_group.all_gather(torch.zeros(1000))


def later(pipe: treadle.Pipeline) -> None:
    pipe.resume_at(7)
    pipe.step(*make_batch(MICROBATCHES))


Call = Callable[[treadle.Pipeline], object]

STEP: Call = lambda pipe: pipe.step(*make_batch(MICROBATCHES))  # noqa: E731
LOCAL: Call = lambda pipe: take_step(pipe, *make_batch(MICROBATCHES), reduce=False)  # noqa: E731
NORM: Call = lambda pipe: pipe.grad_norm()  # noqa: E731
EVALUATE: Call = lambda pipe: pipe.evaluate(*make_batch(MICROBATCHES))  # noqa: E731
LARGER: Call = lambda pipe: pipe.evaluate(*make_batch(MICROBATCHES * 4))  # noqa: E731
TRACE: Call = lambda pipe: pipe.gather_trace()  # noqa: E731

CASES: list[tuple[str, Call, str, Call]] = [
    ("grad_norm() after 1 steps", NORM, "step() after 1 steps", STEP),
    ("step() after 1 steps", STEP, "grad_norm() after 1 steps", NORM),
    ("step() in no_sync() after 1 steps", LOCAL, "step() after 1 steps", STEP),
    ("evaluate() after 1 steps", EVALUATE, "step() after 1 steps", STEP),
    ("step() after 1 steps", STEP, "evaluate() after 1 steps", LARGER),
    ("evaluate() after 1 steps", LARGER, "step() after 1 steps", STEP),
    ("evaluate() after 1 steps", EVALUATE, "grad_norm() after 1 steps", NORM),
    ("gather_trace() after 1 steps", TRACE, "step() after 1 steps", STEP),
    ("gather_trace() after 1 steps", TRACE, "grad_norm() after 1 steps", NORM),
    ("the exchange of parameters after 1 steps", exchange, "step() after 1 steps", STEP),
    ("step() after 7 steps", later, "step() after 1 steps", STEP),
]


def different_calls(rank: int, pp: int, dp: int) -> list[str]:
    said = []
    for first, call, second, other in CASES:
        if "no_sync" in first + second and dp == 1:
            continue  # nothing is reduced, so it is the same call
        schedule, stages = schedule_of("1f1b", pp, MICROBATCHES), make_stages(pp)
        pipe = pipeline(schedule, stages, make_mesh(pp, dp), deadline_s=PATIENT_S)
        STEP(pipe)
        for stage in stages:
            stage.zero_grad() if call is LOCAL else None
        try:
            (call, other)[rank](pipe)
            said.append("nothing")
        except (ValueError, RankLostError) as error:
            said.append(f"{type(error).__name__} {error}")
        pipe.close()
        dist.barrier()
    return said


def hold_calls(pp: int, dp: int) -> None:
    found = check(run_ranks(2, different_calls, pp, dp))
    cases = [case for case in CASES if dp > 1 or "no_sync" not in case[0] + case[2]]
    for (first, _, second, _), both in zip(cases, zip(*found, strict=True), strict=True):
        wanted = f"rank 0 is in {first}, rank 1 is in {second}: all ranks make the same calls in the same order"
        for said in both:
            assert wanted in said, (both, wanted)
        assert any(said.startswith("DifferentCallsError") for said in both), both


def test_replicas_in_different_calls_name_both() -> None:
    hold_calls(pp=1, dp=2)


@pytest.mark.slow
def test_ranks_of_a_pipeline_in_different_calls_name_both() -> None:
    hold_calls(pp=2, dp=1)


calls = st.tuples(st.sampled_from(CALLS), st.integers(0, 2**36 - 1), st.integers(0, 2**20 - 1))


@given(calls, calls)
def test_numbers_tell_calls_apart_and_fit(one: tuple[str, int, int], other: tuple[str, int, int]) -> None:
    assert 0 <= number_of(*one) < 2**63
    said = contradiction(number_of(*one), number_of(*other))
    assert (said is None) is (one[:2] == other[:2])
    if said is not None:
        assert all(f"rank {rank} is in {call} after {step} steps" in said for call, step, rank in (one, other))
