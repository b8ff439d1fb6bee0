"""`treadle selfcheck`: a run on this machine, faults that it has to find, and what it prints."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import treadle.selfcheck
from tests.support.command import treadle as run_treadle
from tests.support.json_output import read_json
from tests.support.patience import PATIENT_S
from tests.support.rank_pool import server
from treadle.cli.app import app
from treadle.runtime.model.gradient_bucket import OuterProduct
from treadle.runtime.model.gradients import Gradients
from treadle.schedules import SCHEDULES
from treadle.selfcheck import CheckResult, SelfcheckReport, Setup, check_first, check_gradients, check_lanes
from treadle.selfcheck.check_report import FailedError, Passed, SkippedError
from treadle.selfcheck.checks import Check, all_checks, run_check
from treadle.selfcheck.models import MeshShape
from treadle.selfcheck.ranks import _gather, run_ranks

HERE = ("--device", "cpu", "--ranks", "2")
TWO = Setup(num_ranks=2, quick=True, device_type="cpu", deadline_s=PATIENT_S)


@pytest.fixture(autouse=True, scope="module")
def forkserver() -> None:
    """Ranks of selfcheck are forked from the server of all tests, which has more imported than their own would."""
    server()


@pytest.mark.slow
def test_selfcheck_passes_here(tmp_path: Path) -> None:
    done = run_treadle("selfcheck", "--quick", *HERE, "-o", "report.json", cwd=tmp_path)
    report = read_json("selfcheck", (tmp_path / "report.json").read_text())
    assert done.returncode == 0, done.stdout + done.stderr
    assert (report["ok"], report["num_failed"], report["backend"]) == (True, 0, "gloo")
    status = {check["name"]: check["status"] for check in report["checks"]}
    must = {"lanes", "experts", "overlap", "offload", "weight update", *(f"gradients: {name}" for name in SCHEDULES)}
    assert {name for name, what in status.items() if what == "passed"} >= must
    measured = {check["name"]: check["numbers"] for check in report["checks"]}
    assert all(measured[name]["ratio"] > 0 for name in ("overlap", "offload", "weight update"))
    assert all(f"{name} passed in" in done.stderr for name in must)
    assert "0 failed in" in done.stdout


def loses_a_message(setup: Setup, rank: int) -> Passed:
    if rank == 1:
        raise RuntimeError("NCCL error: unhandled system error")
    return check_first.send_message(setup, rank)


def test_the_layer_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [each.name for each in all_checks()][:4] == list(check_first.LAYERS)
    broken = replace(check_first.LAYERS["message"], run=loses_a_message)
    monkeypatch.setitem(check_first.LAYERS, "message", broken)
    found = {
        name: run_check(Check(name, partial(check_first.check_layer, name=name)), TWO) for name in check_first.LAYERS
    }
    assert [result.status for result in found.values()] == ["passed", "passed", "failed", "passed"]
    assert "message: rank 1: RuntimeError: NCCL error" in found["message"].about
    assert found["message"].advice.startswith("this is Treadle's, as torch's own all-reduce went through; ")


def wrong_gradient(setup: Setup, rank: int, name: str, shape: MeshShape) -> float:
    """The comparison in a process whose deferred weight gradients are half as large again on rank 1."""
    add = Gradients.add

    def wrong(self: Gradients, param: Tensor, grad: Tensor | OuterProduct) -> None:
        whole = grad.made() if isinstance(grad, OuterProduct) else grad
        add(self, param, whole * (1.5 if rank == 1 else 1.0))

    Gradients.add = wrong  # type: ignore[method-assign]
    return check_gradients.compare_rank(setup, rank, name, shape)


@pytest.mark.slow
def test_a_wrong_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    check = Check("gradients: zb-h1", partial(check_gradients.check_gradients, name="zb-h1"))
    right = run_check(check, TWO)
    assert (right.status, right.advice) == ("passed", "")
    assert right.numbers["off_by"] <= TWO.tolerance
    monkeypatch.setattr(check_gradients, "compare_rank", wrong_gradient)
    found = run_check(check, TWO)
    assert found.status == "failed"
    assert "zb-h1, PP2 of MoE layers, rank 1: the gradient of stage 1 0." in found.about
    assert "is off by 5.0e-01 of its largest entry, allowed 1e-10" in found.about
    assert "do not train on this machine" in found.advice


class Reversed:
    """Lanes that run what they are given when all is there, the last first."""

    ahead = False
    failed: int | None = None

    def __init__(self) -> None:
        self.ops: list[Callable[[], None]] = []

    def begin(self) -> None:
        self.ops = []

    def launch(self, lane: int, op: int, run: Callable[[], None], after: Sequence[int]) -> None:
        self.ops.append(run)

    def finish(self) -> None:
        for run in reversed(self.ops):
            run()

    def times(self) -> tuple[list[int], list[int]]:
        return [0] * len(self.ops), [0] * len(self.ops)

    def close(self) -> None:
        pass


def test_lanes_out_of_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_lanes, "make_real_lanes", lambda device, deadline_s: Reversed())
    with pytest.raises(FailedError, match="ops of a lane ran out of order"):
        check_lanes.lanes_in_rank(TWO, 0)


def one_fails(setup: Setup, rank: int, how: str) -> int:
    if rank == 1 and how == "raise":
        raise ValueError("no")
    if rank == 1 and how == "die":
        os._exit(7)
    if rank == 1 and how == "skip":
        raise SkippedError("not here")
    return rank


@pytest.mark.parametrize(
    ("how", "said"), [("die", "rank 1 ended with exit code 7"), ("raise", "rank 1: ValueError: no")]
)
def test_a_rank_that_fails_is_told(how: str, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FailedError) as error:
        run_ranks(TWO, 2, one_fails, how)
    assert error.value.found == said
    assert "read the first error above" in error.value.advice
    capfd.readouterr()


def test_a_rank_that_ends_while_it_tells_is_told() -> None:
    here, there = mp.Pipe(duplex=False)
    os.write(there.fileno(), struct.pack("!i", 100) + bytes(10))  # a part of a message of 100 bytes
    there.close()
    process = SimpleNamespace(join=lambda: None, exitcode=-9)
    with pytest.raises(FailedError) as error:
        _gather([(process, here)], time.monotonic() + PATIENT_S)
    assert error.value.found == "rank 0 ended with exit code -9"
    here.close()


@pytest.mark.slow
def test_ranks_return_or_skip() -> None:
    assert run_ranks(TWO, 2, one_fails, "not") == [0, 1]
    with pytest.raises(SkippedError, match="not here"):
        run_ranks(TWO, 2, one_fails, "skip")


def test_a_check_that_raises_has_failed() -> None:
    def raises(setup: Setup) -> Passed:
        raise OSError("no room")

    found = run_check(Check("one", raises), TWO)
    assert (found.status, found.about) == ("failed", "OSError: no room")
    assert "report it" in found.advice


def test_a_schedule_that_does_not_fit_the_ranks_is_skipped() -> None:
    three = Setup(num_ranks=3, quick=True, device_type="cpu")
    found = run_check(Check("gradients: dualpipe", partial(check_gradients.check_gradients, name="dualpipe")), three)
    assert found.status == "skipped"
    assert "even" in found.about


def test_setups_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="ranks are 2 or more"):
        Setup(num_ranks=1)
    with pytest.raises(ValueError, match=r"device 'tpu' is not here .* give cpu or sim, or leave it out"):
        Setup(device_type="tpu")
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    assert Setup().kind == (kind.type if kind is not None else "cpu")


def reported(*checks: CheckResult) -> Callable[..., SelfcheckReport]:
    def run_checks(setup: Setup, tell: Any, settings: dict[str, str]) -> SelfcheckReport:
        for check in checks:
            tell(check.name, None)
            tell(check.name, check)
        machine = treadle.selfcheck.setup.describe_machine()
        return SelfcheckReport(machine, settings, "cpu", "gloo", setup.num_ranks, setup.quick, 1.0, checks)

    return run_checks


GOOD = CheckResult("lanes", "passed", "in order", "", 0.5, {"ratio": 1.0})
SKIPPED = CheckResult("stream checker", "skipped", "not here", "", 0.0, {})
BAD = CheckResult("gradients: 1f1b", "failed", "off by 1", "do not train", 2.0, {})


@pytest.mark.parametrize(("results", "code"), [((GOOD, SKIPPED), 0), ((GOOD, SKIPPED, BAD), 1)])
def test_what_is_printed(
    results: tuple[CheckResult, ...], code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(treadle.selfcheck, "run_checks", reported(*results))
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    written = tmp_path / "report.json"
    done = CliRunner().invoke(app, ["selfcheck", "--ranks", "2", "-o", str(written)])
    assert done.exit_code == code
    assert "NCCL_DEBUG=INFO" in done.stdout
    assert ("what to do  gradients: 1f1b: do not train" in done.stdout) == bool(code)
    assert f"1 passed, 1 skipped, {code} failed in 1 s" in done.stdout
    report = read_json("selfcheck", written.read_text())
    assert report["settings"]["NCCL_DEBUG"] == "INFO"
    printed = CliRunner().invoke(app, ["selfcheck", "--ranks", "2", "--json"])
    assert printed.exit_code == code
    assert read_json("selfcheck", printed.stdout) == json.loads(written.read_text())


def test_a_report_needs_a_directory(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["selfcheck", "-o", str(tmp_path / "none" / "report.json")])
    assert isinstance(done.exception, ValueError)
    assert "there is no directory" in str(done.exception)
