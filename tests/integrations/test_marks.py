"""Trainers that mark nothing, marked: torch's 1F1B and the schedules of the real Megatron-core, by their profiles."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.paths import ROOT
from treadle.integrations import marks
from treadle.integrations.marks import mark_megatron, mark_pipelining
from treadle.profiles.importing import import_profile


def run(num_ranks: int, *arguments: str) -> None:
    """Run a script or a module under torchrun, as its users do."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    path = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    done = subprocess.run(
        [*command, *arguments], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pp", "vpp", "num_mb", "group", "name"),
    [
        pytest.param(2, 1, 4, None, "1f1b", id="1f1b"),
        pytest.param(2, 2, 4, None, "interleaved", id="interleaved", marks=pytest.mark.nightly),
        pytest.param(2, 2, 6, 3, "interleaved", id="interleaved in groups of 3"),
    ],
)
def test_megatrons_schedules_are_read_from_a_marked_profile(
    pp: int, vpp: int, num_mb: int, group: int | None, name: str, tmp_path: Path
) -> None:
    sizes = [str(size) for size in (vpp, num_mb, group) if size is not None]
    run(pp, "-m", "tests.support.megatron_job", str(tmp_path), *sizes)
    found = import_profile([tmp_path])
    schedule = found.schedule
    assert (schedule.placement.pp, schedule.vpp, schedule.num_microbatches) == (pp, vpp, num_mb)
    assert schedule.num_cells == 2 * pp * vpp * num_mb, "a forward and a backward of each micro-batch and stage"
    if group is None:
        assert schedule.name == name
    assert len(found.steps.numbers) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("torchs", "name"), [("1F1B", "1f1b"), ("GPipe", "gpipe")])
def test_torchs_single_stage_schedules_are_read(torchs: str, name: str, tmp_path: Path) -> None:
    out = tmp_path / "profile"
    script = str(ROOT / "examples" / "profile_pipelining.py")
    run(2, script, "--schedule", torchs, "--microbatches", "4", "--output", str(out))
    found = import_profile([out])
    assert (found.schedule.name, found.schedule.num_microbatches) == (name, 4)


# -- the combined schedule and NVTX, which cannot run on a CPU -------------------------------------------------------


def test_megatrons_combined_schedule_opens_a_range_for_each_pair(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop is Megatron's; its combined step, which needs streams and Transformer Engine, gives a bare output."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import combined_1f1b

    opened: list[str] = []

    def open_range(name: str) -> Any:
        opened.append(name)
        return nullcontext()

    def step(*args: Any, **kwargs: Any) -> Any:
        return (SimpleNamespace() if args[2] is not None else None), 0, None

    monkeypatch.setattr(combined_1f1b, "set_streams", lambda: None)
    monkeypatch.setattr(combined_1f1b, "combined_forward_backward_step", step)
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_world_size", lambda: 1)
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda: 0)
    with mark_megatron(open_range):
        for _ in range(2):
            combined_1f1b.combined_1f1b_schedule_for_no_pipelining(
                *(
                    None,
                    None,
                    object(),
                    3,
                    None,
                    None,
                    [],
                    None,
                    False,
                    None,
                    False,
                    nullcontext,
                    0,
                    lambda first: first,
                )
            )
    one = ["PP:0F0", "PP:(0F1;0B0)OVERLAP_F_B", "PP:(0F2;0B1)OVERLAP_F_B", "PP:0B2"]
    assert opened == one + one, "micro-batches are counted anew in each step"
    assert combined_1f1b.combined_forward_backward_step is step


def test_nvtx_ranges_are_those_of_torch() -> None:
    assert marks._range(nvtx=True) is torch.cuda.nvtx.range
    assert marks._range(nvtx=False) is torch.profiler.record_function


def test_functions_are_put_back() -> None:
    from torch.distributed.pipelining.schedules import Schedule1F1B
    from torch.distributed.pipelining.stage import _PipelineStageBase

    before = (Schedule1F1B._step_microbatches, _PipelineStageBase.forward_one_chunk)
    with mark_pipelining():
        assert _PipelineStageBase.forward_one_chunk is not before[1]
    with pytest.raises(KeyError), mark_pipelining():
        raise KeyError
    assert (Schedule1F1B._step_microbatches, _PipelineStageBase.forward_one_chunk) == before
