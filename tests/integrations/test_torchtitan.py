"""A schedule in torchtitan: what does not fit a job is refused; its own trainer makes the gradients of one process.

`.ci/torchtitan` runs the trainer's tests, with a torchtitan in an environment of its own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import treadle
from tests.support.paths import ROOT
from treadle.integrations.torchtitan import Wanted, check_job, check_unshards, cut_of, pipelining_fn

MOST_DIFFERENCE = 1e-6
"""Of a gradient's norm, in float32."""
LAYERS, NUM_MICROBATCHES = 6, 4
"""Of torchtitan's debug model, and of a step (tests/support/titan_job.py)."""

needs_torchtitan = pytest.mark.skipif(
    importlib.util.find_spec("torchtitan") is None,
    reason="torchtitan is not installed here; .ci/torchtitan runs these tests where it is",
)


def write(path: Path, name: str, form: str = "torch-csv", *, fsdp: bool = False, pp: int = 2) -> Path:
    schedule = treadle.generate(name, pp=pp, microbatches=NUM_MICROBATCHES)
    more: dict[str, Any] = {} if form == "torch-csv" else {"receives": "late", "fsdp": fsdp}
    path.write_text(treadle.dumps(schedule, form, **more))
    return path


@pytest.mark.parametrize(
    ("job", "problem"),
    [
        (Wanted(4, 4, 6, False), "2 ranks and parallelism.pipeline_parallel_degree is 4; write the file with --pp 4"),
        (Wanted(2, 8, 6, False), "4 micro-batches, and .* is 8; write the file with -m 8"),
        (Wanted(2, 4, 3, False), "4 stages and the model 3 layers"),
        (Wanted(2, 4, 6, True), "splits backwards into dgrad and wgrad, .* set activation_checkpoint to None"),
    ],
)
def test_a_file_that_does_not_fit_the_job_is_refused(job: Wanted, problem: str, tmp_path: Path) -> None:
    path = write(tmp_path / "zbv.csv", "zb-v")
    schedule = treadle.load(path)
    assert isinstance(schedule, treadle.Schedule)
    check_job(path, schedule, Wanted(2, 4, 6, False))
    with pytest.raises(ValueError, match=problem):
        check_job(path, schedule, job)


def test_messages_without_unshard_are_refused_for_stages_under_fsdp(tmp_path: Path) -> None:
    from torch.distributed.fsdp import FSDPModule

    class Sharded(FSDPModule, torch.nn.Linear):  # as fully_shard makes it: a class with FSDPModule first
        def __new__(cls, *args: object, **kwargs: object) -> Sharded:
            return torch.nn.Linear.__new__(cls)

    part = torch.nn.Sequential(Sharded(2, 2))
    path = write(tmp_path / "late.csv", "1f1b", "torch-comms")
    check_unshards(path, [torch.nn.Linear(2, 2)])
    check_unshards(write(tmp_path / "cells.csv", "1f1b"), [part])
    check_unshards(write(tmp_path / "with.csv", "1f1b", "torch-comms", fsdp=True), [part])
    with pytest.raises(ValueError, match=r"messages and no UNSHARD, .* --format torch-comms --fsdp"):
        check_unshards(path, [part])


def test_a_file_that_is_not_clean_is_refused_before_any_stage_is_made() -> None:
    with pytest.raises(ValueError, match=r"(?s)is not clean, so it is not run:\nT204 rank 1"):
        pipelining_fn(ROOT / "examples" / "torch" / "zbv_defer_pp_recv.csv")


def test_a_layout_of_balance_names_modules() -> None:
    first, last = ["tok_embeddings", "layers.0", "layers.1"], ["layers.5", "norm", "lm_head"]
    assert cut_of("Et*2|t|tt|tL", 4, LAYERS) == [first, ["layers.2"], ["layers.3", "layers.4"], last]
    for wrong in ("Et*2|t*3|tL", "Et*2|t|tt|ttL", "Et*2|t|tt|tmL"):
        with pytest.raises(ValueError, match="the job 4 and 6, without MTP blocks; 'treadle balance' prints one"):
            cut_of(wrong, 4, LAYERS)


# -- torchtitan's trainer ----------------------------------------------------------------------------------------------


def train(world: int, out: Path, *arguments: str) -> dict[str, Tensor]:
    """Run a step of the trainer on so many processes, and return all gradients by name."""
    out.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    command += ["-m", "tests.support.titan_job", str(out), *arguments]
    path = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, cwd=out, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {name: grad for rank in range(world) for name, grad in torch.load(out / f"{rank}.pt").items()}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    return train(1, tmp_path_factory.mktemp("titan") / "one")


@needs_torchtitan
@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "layout"),
    [
        (lambda path: write(path, "zb-v"), "Ett|tt|t|tL"),
        (lambda path: write(path, "dualpipev", "torch-comms", fsdp=True), None),
        (lambda path: write(path, "interleaved"), None),
    ],
    ids=["zb-v cut by a layout", "dualpipev with late messages", "interleaved"],
)
def test_its_trainer_makes_the_gradients_of_one_process(
    make: Callable[[Path], Path], layout: str | None, reference: dict[str, Tensor], tmp_path: Path
) -> None:
    path = make(tmp_path / "schedule.csv")
    grads = train(2, tmp_path / "out", str(path), *([layout] if layout is not None else []))
    assert grads.keys() == reference.keys()
    apart = {name: float((grads[name] - right).norm() / right.norm()) for name, right in reference.items()}
    worst = max(apart, key=lambda name: apart[name])
    print(f"{path.name} {len(apart)} gradients, {worst} {apart[worst]:.1e}")  # noqa: T201
    assert apart[worst] < MOST_DIFFERENCE
