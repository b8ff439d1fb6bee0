"""A rank's device: times in order, on this host's clock; when it is late; and the device that tests run on."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from datetime import timedelta
from time import perf_counter_ns
from typing import Any

import pytest
import torch

from tests.support.doubles import double_of
from tests.support.paths import ROOT
from tests.support.patience import HUNG_S
from treadle.dist import device as device_module
from treadle.dist import streams as streams_module
from treadle.dist.device import GpuLateError, StreamDevice, device_of
from treadle.dist.streams import Accelerator


def test_times_of_a_device_are_on_the_hosts_clock_and_in_order(device: torch.device) -> None:
    made = device_of(device, timedelta(seconds=60))
    before = perf_counter_ns()
    noted = [made.now() for _ in range(3)]
    made.catch_up()
    times = made.nanoseconds(noted)
    assert times == sorted(times)
    assert before - 1_000_000 <= times[0]
    assert times[-1] <= perf_counter_ns()


@pytest.mark.slow
def test_a_device_that_is_not_there_is_told_at_once() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/dist/test_device.py", "-k", "clock"]
    environment = os.environ | {"TREADLE_TEST_DEVICE": "tpu"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HUNG_S, check=False
    )
    assert done.returncode != 0
    assert "TREADLE_TEST_DEVICE=tpu: " in done.stdout
    assert "give cpu, cuda or sim" in done.stdout


# -- lateness, by a device double and a clock of its own ---------------------------------------------------------------


class Clock:
    """A clock that asking and sleeping move on, in place of the module `time`; a sleep is a timer's slack longer."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        self.now_s += 1e-6
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += max(seconds, 6e-5)


class SlowStreams(Accelerator):
    """Streams whose events are reached one after the other, `every_s` apart, none from `stops_s` on."""

    def __init__(self, clock: Clock, every_s: float, stops_s: float) -> None:
        self.clock, self.every_s, self.stops_s, self.num = clock, every_s, stops_s, 0

    def event(self, device: torch.device, *, timed: bool = False) -> Any:
        self.num += 1
        streams, reached_s = self, self.num * self.every_s

        @double_of("torch.Event")
        class Event:
            def query(self) -> bool:
                """torch 2.13 c10/core/Event.h:118-120: True once the device has come to it."""
                return streams.clock.now_s >= reached_s and reached_s < streams.stops_s

        return Event()


class Watcher:
    """Notes when it looks; from `lost_s` on a rank is lost."""

    def __init__(self, clock: Clock, lost_s: float) -> None:
        self.clock, self.lost_s, self.looked_s = clock, lost_s, [clock.now_s]

    def refuse_void(self) -> None:
        if self.clock.now_s >= self.lost_s:
            raise ConnectionError("a rank is lost")

    def look(self) -> None:
        self.looked_s.append(self.clock.now_s)


def wait_for_ops(
    monkeypatch: pytest.MonkeyPatch, num: int, *, stops_s: float = 1e9, lost_s: float = 1e9
) -> tuple[Clock, Watcher]:
    """Waits with a deadline of 10 s for a device that takes 3 s for each op."""
    clock = Clock()
    monkeypatch.setattr(device_module, "time", clock)
    monkeypatch.setattr(streams_module, "time", clock)
    monkeypatch.setattr(streams_module, "LONG_PAUSE_S", 0.04)
    made = StreamDevice(torch.device("cpu"), timedelta(seconds=10), SlowStreams(clock, 3.0, stops_s))
    watcher = Watcher(clock, lost_s)
    made.observe(watcher)
    for _ in range(num):
        made.now()
    try:
        made.catch_up()
    except Exception as error:
        error.args = (error.args[0], round(clock.now_s))
        raise
    return clock, watcher


@pytest.mark.parametrize("after_s", [0.00003, 0.00015, 0.001, 0.004])
@pytest.mark.parametrize("wait", ["for an event", "for numbers"])
def test_a_short_wait_ends_within_200_us_of_its_event(
    monkeypatch: pytest.MonkeyPatch, wait: str, after_s: float
) -> None:
    """A dispatch is launched as soon as its counts are there."""
    clock = Clock()
    monkeypatch.setattr(device_module, "time", clock)
    monkeypatch.setattr(streams_module, "time", clock)
    made = StreamDevice(torch.device("cpu"), timedelta(seconds=10), SlowStreams(clock, after_s / 2, 1e9))
    begun_s, event = clock.now_s, made.now()
    made.await_event(event) if wait == "for an event" else streams_module._poll(event)
    assert clock.now_s >= after_s
    assert clock.now_s - begun_s < after_s + 0.0002


def test_a_step_may_take_longer_than_the_deadline_while_its_ops_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, watcher = wait_for_ops(monkeypatch, 10)
    assert clock.now_s > 3 * 10
    pauses_s = [later - earlier for earlier, later in itertools.pairwise(watcher.looked_s)]
    assert max(pauses_s) < 2 * StreamDevice.LOOK_S + 0.04


def test_a_device_that_stops_is_late_a_deadline_after_its_last_op(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GpuLateError, match="the GPU has finished no op within 10 s") as error:
        wait_for_ops(monkeypatch, 10, stops_s=20.0)
    assert error.value.args[1] == 18 + 10


def test_a_wait_for_a_device_ends_when_its_work_is_void(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConnectionError, match="a rank is lost") as error:
        wait_for_ops(monkeypatch, 10, stops_s=1.0, lost_s=4.0)
    assert error.value.args[1] == 4
