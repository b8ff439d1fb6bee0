"""Arguments that mean nothing are refused in one sentence, and sizes and times are shown in one unit."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import treadle
from treadle.ir import Placement
from treadle.ir.ops import OpKind
from treadle.ir.show import show_bytes, show_time
from treadle.ir.steps import Steps
from treadle.ir.trace import Clock

SCHEDULE = treadle.generate("1f1b", pp=4, microbatches=8)
TRACE = treadle.simulate(SCHEDULE)


def lowered(**options: Any) -> treadle.Program:
    return treadle.lower(SCHEDULE, "unit", treadle.LoweringOptions(**options))


REFUSED: list[tuple[str, Callable[[], object]]] = [
    (r"a tie is of stages 0 to 3, .* got 0,7", lambda: lowered(layers=1, tied=((0, 7),))),
    (r"a tie is of stages 0 to 3, .* got -5,1", lambda: lowered(layers=1, tied=((-5, 1),))),
    (r"slowness is a share from 0.* got -0.5", lambda: treadle.simulate(SCHEDULE, slowness=-0.5)),
    (r"slowness is a share from 0.* got nan", lambda: treadle.simulate(SCHEDULE, slowness=float("nan"))),
    (r"slowness is a share from 0.* got inf", lambda: treadle.simulate(SCHEDULE, slowness=float("inf"))),
    (r"slowness is a factor for each of 4 ranks", lambda: treadle.simulate(SCHEDULE, slowness=np.ones(2))),
    (r"communicators are None or one of", lambda: treadle.verify(SCHEDULE, communicators="rank")),  # type: ignore[arg-type]
    (r"receives are one of sender, use", lambda: treadle.verify(SCHEDULE, receives="late")),  # type: ignore[arg-type]
    (r"receives are early or late", lambda: treadle.dumps(SCHEDULE, "torch-comms", receives="latest")),  # type: ignore[arg-type]
    (r"lowered already", lambda: treadle.compare(TRACE, TRACE, options=treadle.LoweringOptions(layers=2))),
    (r"lowered already", lambda: treadle.draw(TRACE, options=treadle.LoweringOptions(layers=2))),
    (r"lowered already", lambda: treadle.verify(TRACE, options=treadle.LoweringOptions(layers=2))),
    (r"names are one for each of 2, got 1", lambda: treadle.draw([SCHEDULE, SCHEDULE], names=["a"])),
    (r"a placement has 1 or more ranks, got 0", lambda: Placement.loop(0)),
    (r"layers of a stage are a whole number from 1, got 0", lambda: lowered(layers=0)),
    (r"layers of a stage are a whole number from 1, got True", lambda: lowered(layers=True)),
    (r"a model has at least 1 layer, got 2.5", lambda: lowered(model_layers=2.5)),
    (r"dp is a whole number from 1, got 2.5", lambda: lowered(dp=2.5)),
    (r"dense 1 is of a model whose number of layers is not known", lambda: lowered(dense=1)),
    (r"mtp 1 is of a model whose number of layers is not known", lambda: lowered(mtp=1)),
    (r"parts that are recomputed are attn and mlp, got attn; give", lambda: lowered(layers=1, recompute="attn")),
    (r"each once, got \(<OpKind.ATTN_W", lambda: lowered(layers=1, split=(OpKind.ATTN_W, OpKind.ATTN_W))),
    (r"the buckets of stage 1 begin at its blocks 0 to 1, got 5,0",
     lambda: lowered(layers=2, buckets=((1, 0), (5, 0), (1, 0), (1, 0)))),
]  # fmt: skip


@pytest.mark.parametrize(("message", "call"), REFUSED, ids=[message for message, _ in REFUSED])
def test_what_means_nothing_is_refused(message: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_a_tie_may_be_counted_from_the_last_stage() -> None:
    assert lowered(layers=1, tied=((0, -1),)).layout.tied == ((0, 3),)


def test_a_step_is_measured_if_its_trace_was() -> None:
    assert not Steps.of(TRACE).trace().measured
    assert Steps.of(replace(TRACE, measured=True)).trace().measured


def test_a_schedule_is_a_key() -> None:
    assert {SCHEDULE: 1}[treadle.generate("1f1b", pp=4, microbatches=8)] == 1


def test_a_ring_is_named_in_the_cycle_of_a_schedule_and_of_its_program() -> None:
    schedule = treadle.generate("zb-v", pp=4, microbatches=8)
    reports = [str(treadle.verify(each, ring=1)) for each in (schedule, treadle.lower(schedule, "unit"))]
    assert all(re.search(r"needs the buffer that is freed by F\d", report) for report in reports), reports


def test_sizes_and_times_round_into_the_next_unit() -> None:
    assert [show_bytes(size) for size in (1.2345e16, 999_999, 300)] == ["12.35 PB", "1 MB", "300 bytes"]
    assert [show_time(Clock("us", 1000), ticks) for ticks in (999_999_600, 999_000_000)] == ["1 s", "999 ms"]
    assert show_time(Clock("s", 10**9), 2.5e9) == "2.5 s"
    assert show_time(Clock("ns", 1), 1500) == "1.5 us"


@pytest.mark.parametrize("pp", [128, 1024])
def test_the_nearest_size_is_found_in_few_looks(pp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: what was looked through grew with ranks times chunks."""
    from treadle.schedules.family import Family

    looks = 0
    look = Family._why_not

    def counted(family: Family, size: Any) -> str | None:
        nonlocal looks
        looks += 1
        return look(family, size)

    monkeypatch.setattr(Family, "_why_not", counted)
    with pytest.raises(ValueError, match=f"the nearest size it can do is pp={pp} vpp=100"):
        treadle.generate("interleaved", pp=pp, vpp=100, microbatches=900_000)
    assert looks < 100 * pp  # 100 chunks, pp numbers of micro-batches around the most that is done
