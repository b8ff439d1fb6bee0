"""A worker and its engine: when the worker closes the engine, and when it unmaps buffers."""

from __future__ import annotations

import pytest

from tests.support.update.engines import Noting, begin, plan_of, served
from treadle.update import UpdateOptions
from treadle.update.protocol import rank
from treadle.update.protocol.control import Phase
from treadle.update.protocol.update_messages import Begin, Grant, Move, Refused, Status
from treadle.update.worker.worker import Worker
from treadle.wire.errors import WireError


def begins(worker: Worker, message: Begin) -> bool:
    told = worker.handle(message)
    return isinstance(told, Status) and told.state == "loading"


def test_an_engine_that_is_open_is_closed_by_what_comes_first() -> None:
    """A new endpoint around an engine that serves: its worker knows nothing of that."""
    for closing in ("settle", "begin"):
        engine = Noting()
        engine.gate.open(1)
        worker, plan = Worker(engine, 0), plan_of(engine)
        assert worker.state == "lapsed"
        worker.handle(plan)
        first = Grant(5, None, ()) if closing == "settle" else begin(5, 2, plan)
        answer = worker.handle(first)
        assert isinstance(answer, Status), answer
        assert engine.gate.version is None, closing


def test_an_engine_that_opens_after_it_said_it_could_not_is_closed_before_it_is_loaded() -> None:
    engine = Noting()
    engine.late = True
    worker, plan = served(engine)
    assert (worker.state, engine.gate.version) == ("lapsed", 1)
    assert begins(worker, begin(2, 2, plan))
    assert engine.gate.version is None


def test_the_way_back_is_kept_while_requests_are_served() -> None:
    engine = Noting()
    worker, plan = served(engine)
    assert (worker.state, engine.gate.version) == ("serving", 1)
    assert begins(worker, begin(2, 2, plan))
    assert engine.given == [True]
    assert engine.gate.version is None


def test_settling_closes_as_it_is_told() -> None:
    engine = Noting()
    worker, _ = served(engine)
    engine.closes.clear()
    told = worker.handle(Grant(3, 7, (2,), "abort", 12.5))
    assert isinstance(told, Status)
    assert (told.state, engine.closes) == ("lapsed", [("abort", 12.5)])


def test_buffers_go_with_the_update_rank_unless_another_took_over() -> None:
    worker, _ = served(Noting())
    assert len(worker._buffers) == 1
    worker.release(lambda: True)
    assert len(worker._buffers) == 1
    worker.release()
    assert worker._buffers == []


def test_a_bucket_of_another_plan_than_the_attempt_began_with_is_refused() -> None:
    engine = Noting()
    worker, plan = served(engine)
    assert begins(worker, begin(2, 2, plan))
    told = worker.handle(Move(2, "other", 0, 0, out=False, checked=False))
    assert told == Refused("order", f"the attempt began with plan {plan.digest}, not other", 2)


@pytest.mark.parametrize(
    ("phase", "state", "expected"), [("begin", "serving", "loading"), ("finish", "loading", "staged")]
)
def test_a_worker_that_has_not_done_what_it_was_asked_gives_no_vote(phase: Phase, state: str, expected: str) -> None:
    status = Status(0, 1, state, 1, 3, 0)  # type: ignore[arg-type]
    with pytest.raises(WireError, match=f"it is {state} where {expected} was expected"):
        rank.answered(rank.RankState(0, UpdateOptions(), phase, 3), status)
