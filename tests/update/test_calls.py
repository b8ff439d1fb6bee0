"""Calls that are wrong, come at once, or break off: refused or told to all ranks, and the next one succeeds."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.patience import PATIENT_S
from tests.support.ranks import check, run_ranks
from tests.support.update.engines import SMALL
from tests.support.update.workers import Trouble, Workers, ask_once
from treadle.update import Source, UpdateError, UpdateOptions, Updater
from treadle.update.adapters.plain import digest_of
from treadle.update.coordinator.rank_links import RankLinks
from treadle.update.protocol.control import Fault, FromCoordinator, Proceed, ToCoordinator
from treadle.update.protocol.record import MOST
from treadle.update.protocol.update_messages import Answer
from treadle.update.rank.worker_client import WorkerClient
from treadle.weights.tensor_boxes import Box, Holding, Piece, Tensor
from treadle.wire.codec import encode
from treadle.wire.link import Link
from treadle.wire.listeners import listen_at_path

pytestmark = pytest.mark.slow

OPTIONS = UpdateOptions(SMALL, deadline_s=PATIENT_S, drain_s=1)
NO_VERSIONS: dict[str, Any] = {"bool True": True, "float 2.0": 2.0, "int 0": 0, "NoneType None": None, "str '3'": "3"}
SHAPES = {"w": ((64, 8), "float32"), "c": ((5, 3), "complex64"), "u": ((7,), "uint64"), "x": ((4, 4), "float32")}


def want() -> Holding:
    tensors = {name: Tensor(name, shape, dtype) for name, (shape, dtype) in SHAPES.items()}
    return Holding(tensors, (tuple(Piece(name, Box.whole(t.shape)) for name, t in tensors.items()),) * 2)


def state(version: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(version)
    raw = {name: torch.randint(-(2**62), 2**62, (1024,), generator=made) for name in SHAPES}
    return {
        name: raw[name].view(getattr(torch, dtype))[: np.prod(shape)].reshape(shape)
        for name, (shape, dtype) in SHAPES.items()
    }


def source(version: int) -> Source:
    return Source.of(state(version))


def outcome(call: Callable[[], Any]) -> str:
    """What a call raises, nothing if it succeeds."""
    try:
        call()
    except (UpdateError, ValueError, RuntimeError, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def interrupt(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


class Unreadable:
    """A source that fails when it is asked what it has."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {}

    @property
    def has(self) -> Any:
        raise RuntimeError("the trainer is not ready")

    def local(self, piece: Piece) -> Any:
        raise AssertionError


def run(rank: int, sockets: Path, ledger: Path) -> dict[str, list[str]]:
    """What each case raised on this rank: first the call that is wrong, then the next one."""
    told: dict[str, list[str]] = {}
    with Updater(sockets, ledger=ledger, options=OPTIONS) as updater:
        version = 0

        def case(name: str, call: Callable[[], Any]) -> None:
            nonlocal version
            first = outcome(call)
            dist.barrier()
            version += 2
            told[name] = [first, outcome(lambda: updater.update(source(version), version))]

        for name, wrong in NO_VERSIONS.items():
            told[name] = [outcome(partial(updater.update, source(1), wrong))]
        told["base"] = [outcome(lambda: updater.update(source(1), 1, changed=["w"], base=True))]
        told["recover"] = [outcome(lambda: updater.recover(source(1), version=True))]
        told["changed text"] = [outcome(lambda: updater.update(source(1), 1, changed="weight", base=1))]
        told["changed surrogate"] = [outcome(lambda: updater.update(source(1), 1, changed=["w\udc80"], base=1))]
        three, one = cast("Any", 3), cast("Any", np.int64(1))
        told["changed number"] = [outcome(lambda: updater.update(source(1), 1, changed=[three], base=1))]
        case("numpy", lambda: updater.update(source(1), one))
        case("malformed", lambda: malformed(updater, rank, version + 1))
        client, worker = updater.context.coordinator, updater.context.worker

        def interrupted(of: Any, method: str) -> None:
            with patch.object(of, method, interrupt) if rank == 1 else nullcontext():
                updater.update(source(version + 1), version + 1)

        case("interrupted before its entry", lambda: interrupted(worker, "connect"))
        case("interrupted before Go", lambda: interrupted(client, "hear"))
        case("fails before its entry", lambda: updater.update(Unreadable() if rank else source(9), version + 1))
        case("at once", lambda: at_once(updater, version + 1))
    return told


def malformed(updater: Updater, rank: int, version: int) -> None:
    """Rank 1's entry is a whole frame, and no message; rank 0 begins when the coordinator has read it."""
    client = updater.context.coordinator
    sent = patch.object(client, "send", lambda message, phase: client._link.send_encoded(b"\xc1" * 9))
    if rank == 0:
        time.sleep(0.5)
    with sent if rank == 1 else nullcontext():
        updater.update(source(version), version)


def at_once(updater: Updater, version: int) -> None:
    """While an update runs, another thread begins one, and the callback itself does; what both hear is raised."""
    heard: list[str] = []

    def meanwhile(done: int, total: int) -> None:
        if not heard:
            thread = threading.Thread(target=lambda: heard.append(outcome(updater.recover)))
            thread.start()
            thread.join(PATIENT_S)
            heard.append(outcome(lambda: updater.update(source(version), version)))

    with patch.object(updater.context, "progress", meanwhile):
        updater.update(source(version), version)
    raise ValueError(" and ".join(heard))


def test_calls_that_are_wrong_or_break_off_leave_the_updater_as_it_was() -> None:
    with Workers(want()) as workers:
        first, second = check(run_ranks(2, run, workers.sockets, workers.ledger))
        for told in (first, second):
            for given in NO_VERSIONS:
                assert told[given] == [f"ValueError: version is a whole number from 1 to {MOST}, got {given}"]
            assert "ValueError: base is a whole number" in told["base"][0]
            assert "ValueError: version is a whole number" in told["recover"][0]
            assert told["changed text"] == [
                "ValueError: changed is a collection of tensor names, got str 'weight'; give ['weight']"
            ]
            assert r"got str 'w\udc80'" in told["changed surrogate"][0]
            assert "got int 3" in told["changed number"][0]
            assert told["numpy"] == ["", ""]
            assert "UpdateError: update rank 1 (process" in told["malformed"][0], told["malformed"]
            assert "is malformed" in told["malformed"][0]
            assert told["at once"][0].count("this updater is in an update or recovery already") == 2, told["at once"]
            late = {name: texts[1:] for name, texts in told.items() if texts[1:] not in ([], [""])}
            assert not late, "the call after it failed"
        for name in ("interrupted before its entry", "interrupted before Go"):
            assert second[name][0] == "KeyboardInterrupt: "
            assert "update rank 1, in phase enter" in first[name][0], first[name]
            assert "KeyboardInterrupt" in first[name][0]
        for told in (first, second):
            assert "RuntimeError: the trainer is not ready" in told["fails before its entry"][0]
        answers = [ask_once(workers.sockets, worker) for worker in range(2)]
        last = 2 * sum(len(texts) == 2 for texts in first.values())
        for answer in answers:
            assert isinstance(answer, Answer)
            assert (answer.version, answer.body.decode()) == (last, digest_of(state(last))), "every bit of every dtype"


def breaks_off_twice(rank: int, sockets: Path, ledger: Path) -> list[str]:
    """Rank 1 is interrupted a second time, while it waits for its worker to go back."""
    with Updater(sockets, ledger=ledger, options=OPTIONS) as updater:
        told = [outcome(lambda: updater.update(source(1), 1))]
        with patch.object(WorkerClient, "await_answers", interrupt if rank == 1 else WorkerClient.await_answers):
            told.append(outcome(lambda: updater.update(source(2), 2)))
        dist.barrier()
        return [*told, outcome(lambda: updater.update(source(3), 3))]


def test_answers_to_an_attempt_that_broke_off_are_not_taken_for_those_to_the_next() -> None:
    with Workers(want()) as workers:
        workers.tell(0, Trouble("raise", "load", 1))  # in the second update: the first loads once
        workers.tell(1, Trouble("hang", "load", 1, hang_s=1.0))
        first, second = check(run_ranks(2, breaks_off_twice, workers.sockets, workers.ledger))
        assert (first[0], second[0]) == ("", "")
        assert "trouble in load" in first[1]
        assert second[1] == "KeyboardInterrupt: "
        assert (first[2], second[2]) == ("", "")


def test_a_rank_that_takes_no_message_keeps_none_from_the_others(place: Path) -> None:
    """The layouts of a large model are more than a connection holds; leases of others run out meanwhile."""
    links = RankLinks(listen_at_path(place / "c.sock", ToCoordinator), 2)
    ends: list[Link[FromCoordinator]] = []
    for rank in range(2):
        ours, theirs = socket.socketpair()
        links._ranks[rank] = Link(ours, ToCoordinator)
        ends.append(Link(theirs, FromCoordinator))
        ends[rank].trust()
    bodies = [encode(Proceed(number, "load")) for number in range(3)]
    large = encode(Fault(7, "w", "load", -1, "x" * (4 << 20)))
    for rank, body in ((0, large), (0, bodies[1]), (1, bodies[2])):
        links.tell(rank, body, PATIENT_S)
    assert ends[1].receive(PATIENT_S) == Proceed(2, "load")
    assert isinstance(ends[0].receive(PATIENT_S), Fault), "all of it, once it is taken"
    assert ends[0].receive(PATIENT_S) == Proceed(1, "load")
    links.close()
