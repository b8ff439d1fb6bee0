"""Threads that others wait for run as soon as they wake, where Linux lets them ask for that."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from pathlib import Path

import pytest

from ranks import check, run_ranks
from weft.runtime.groups import Circle
from weft.runtime.lanes.thread import ThreadLanes
from weft.runtime.prompt import SLICE_NS, be_prompt, starting_prompt_threads


def slices() -> dict[int, int]:
    """Of all threads of this process, by number."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        for line in (task / "sched").read_text().splitlines():
            if line.startswith("se.slice"):
                found[int(task.name)] = int(line.split(":")[1])
    return found


def own() -> int:
    return slices()[threading.get_native_id()]


def can_ask() -> bool:
    release = os.uname().release.split(".")
    return (int(release[0]), int(release[1])) >= (6, 12) and Path("/proc/self/sched").exists()


pytestmark = pytest.mark.skipif(not can_ask(), reason="needs Linux 6.12, which lets threads ask for a slice")


def test_a_thread_asks_for_itself_and_keeps_its_priority() -> None:
    seen: dict[str, int] = {}

    def ask() -> None:
        usual, nice = own(), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        before = be_prompt()
        seen.update(usual=usual, before=before, prompt=own())
        be_prompt(before)
        seen.update(after=own(), kept=nice == os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert seen["usual"] == seen["before"] == seen["after"] > seen["prompt"] == SLICE_NS
    assert seen["kept"]


def test_threads_that_are_started_inside_stay_prompt() -> None:
    usual, told = own(), threading.Event()
    slice_ns: list[int] = []

    def work() -> None:
        told.wait()
        slice_ns.append(own())

    thread = threading.Thread(target=work)
    with starting_prompt_threads():
        thread.start()
    told.set()
    thread.join()
    assert slice_ns == [SLICE_NS]
    assert own() == usual


def of_a_group(rank: int) -> tuple[int, set[int]]:
    before = slices()
    circle = Circle("prompt", [0, 1], rank, timedelta(seconds=20), lambda work: None)
    now = slices()
    del circle
    return now[threading.get_native_id()], {now[task] for task in now.keys() - before.keys()}


def test_threads_of_communicators_are_prompt_and_the_callers_is_not() -> None:
    for caller, threads in check(run_ranks(2, of_a_group)):
        assert caller > SLICE_NS
        assert threads == {SLICE_NS}


def test_lanes_are_prompt_and_the_one_that_computes_is_not() -> None:
    seen: list[int] = []
    lanes = ThreadLanes(2, 2, 10.0)
    lanes.begin()
    for op, lane in enumerate((1, 0)):
        lanes.launch(lane, op, lambda: seen.append(own()), range(op))
    lanes.finish()
    lanes.close()
    assert seen[0] == SLICE_NS < seen[1]
