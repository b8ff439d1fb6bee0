"""A Pipeline of Treadle under torch.profiler: every op is in the file, on every lane, as the trace has it."""

from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import treadle
from tests.profiles.test_torch_pipelining import SlowStage
from tests.runtime.run.test_layers import Case, batch, own_part, whole_model
from tests.support.patience import PATIENT_S
from tests.support.ranks import check, run_ranks
from treadle.ir.ops import LaneKind, OpKind
from treadle.ir.program import Program
from treadle.profiles.readers.kineto import KinetoReader
from treadle.profiles.recording import RankRecording

pytestmark = pytest.mark.slow

PP, MICROBATCHES = 2, 4
LAYERS = Case("1f1b")


def run_cells(rank: int, directory: Path) -> treadle.Trace | None:
    """The trace of the profiled step, which is the second, on rank 0."""
    mesh = init_device_mesh("cpu", (PP,), mesh_dim_names=("pp",))
    schedule = treadle.generate("1f1b", pp=PP, microbatches=MICROBATCHES)
    torch.manual_seed(0)
    pipe = treadle.Pipeline({0: SlowStage()}, schedule, mesh=mesh, loss_fn=nn.functional.mse_loss)
    return profiled(pipe, torch.randn(2, MICROBATCHES, 4, 8), directory / f"rank{rank}_trace.json.gz")


def run_layers(rank: int, directory: Path) -> treadle.Trace | None:
    """The same at the grain of layers, with lanes that are threads."""
    mesh = init_device_mesh("cpu", (LAYERS.pp, LAYERS.ep), mesh_dim_names=("pp", "ep"))
    pp_rank, ep_rank = divmod(rank, LAYERS.ep)
    stages = {0: own_part(whole_model(LAYERS)[pp_rank], LAYERS, ep_rank)}
    options = treadle.RunOptions(deadline_s=PATIENT_S, lanes="thread")
    loss_fn = nn.functional.mse_loss
    pipe = treadle.Pipeline(stages, LAYERS.schedule, mesh=mesh, loss_fn=loss_fn, options=options)
    both = torch.stack([tensor[ep_rank] for tensor in batch(LAYERS)])
    return profiled(pipe, both, directory / f"rank{rank}_trace.json.gz")


def profiled(pipe: treadle.Pipeline, both: torch.Tensor, path: Path) -> treadle.Trace | None:
    pipe.step(both[0], both[1])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        pipe.step(both[0], both[1])
    profile.export_chrome_trace(str(path))
    trace = pipe.gather_mesh_trace()
    pipe.close()
    return trace


def own_ops(program: Program, rank: int) -> dict[tuple[int, int, int, int], int]:
    """The ops of a rank by kind, chunk, micro-batch and layer."""
    found: dict[tuple[int, int, int, int], int] = {}
    for index in np.flatnonzero(program.lane_rank[program.lane_of] == rank):
        op = program.op(int(index))
        found[op.kind, op.chunk, op.mb, op.layer] = op.index
    return found


def marks(rank: RankRecording) -> dict[tuple[int, int, int, int], int]:
    """The marks of a rank; it has one chunk."""
    columns = (rank.kind.tolist(), rank.mb.tolist(), rank.layer.tolist())
    return {(kind, 0, mb, layer): at for at, (kind, mb, layer) in enumerate(zip(*columns, strict=True))}


def test_cells_under_the_profiler_are_those_of_the_trace(tmp_path: Path) -> None:
    trace = check(run_ranks(PP, run_cells, tmp_path))[0]
    assert trace is not None
    recording = KinetoReader().read(sorted(tmp_path.iterdir()), lambda _: None)
    assert recording.remarks == ()
    off = []
    for rank in recording.ranks:
        ops, found = own_ops(trace.program, rank.rank), marks(rank)
        assert found.keys() == ops.keys()
        assert len(rank) == len(found)
        for label, at in found.items():
            if OpKind(label[0]).lane is LaneKind.COMPUTE:
                took = trace.end[ops[label]] - trace.start[ops[label]]
                off.append((rank.end[at] - rank.start[at]) / took - 1)
    assert abs(statistics.median(off)) < 0.01, off


def test_ops_of_lanes_that_are_threads_are_in_the_file_too(tmp_path: Path) -> None:
    trace = check(run_ranks(LAYERS.world, run_layers, tmp_path))[0]
    assert trace is not None
    recording = KinetoReader().read(sorted(tmp_path.iterdir()), lambda _: None)
    assert recording.remarks == ()
    assert (recording.pp, len(recording.ranks)) == (LAYERS.pp, LAYERS.world)
    for rank in recording.ranks:
        ops, found = own_ops(trace.program, rank.rank), marks(rank)
        assert found.keys() == ops.keys()
        assert len(rank) == len(found)
        assert set(rank.step.tolist()) == {0}
        lanes = {OpKind(kind).lane for kind, *_ in found}
        assert {LaneKind.COMPUTE, LaneKind.EP, LaneKind.HOST} <= lanes
        same = [at for label, at in found.items() if not OpKind(label[0]).lane.communicates]
        mine = [ops[label] for label in found if not OpKind(label[0]).lane.communicates]
        moved = rank.start[same] - trace.start[mine]
        assert np.abs(moved - np.median(moved)).max() < 1e9, "on one clock"
