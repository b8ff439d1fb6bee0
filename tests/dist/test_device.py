"""A rank's device: times in the order in which they were taken, on this host's clock; and the device that tests run on."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from time import perf_counter_ns

import torch

from tests.support.patience import HUNG_S
from tests.support.paths import ROOT
from treadle.dist.device import device_of


def test_times_of_a_device_are_on_the_hosts_clock_and_in_order(device: torch.device) -> None:
    made = device_of(device, timedelta(seconds=60))
    before = perf_counter_ns()
    noted = [made.now() for _ in range(3)]
    made.catch_up()
    times = made.nanoseconds(noted)
    assert times == sorted(times)
    assert before - 1_000_000 <= times[0]
    assert times[-1] <= perf_counter_ns()


def test_a_device_that_is_not_there_is_told_at_once() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/dist/test_device.py", "-k", "clock"]
    environment = os.environ | {"TREADLE_TEST_DEVICE": "tpu"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HUNG_S, check=False)
    assert done.returncode != 0
    assert "TREADLE_TEST_DEVICE=tpu: " in done.stdout
    assert "give cpu or cuda" in done.stdout
