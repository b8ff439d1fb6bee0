"""What a pipeline measures: every op once, in order, nothing before what it waits for; `treadle compare` reads it."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.support.cases import take_step
from tests.support.json_output import read_json
from tests.support.oracle import chunks_of, make_batch, make_mesh, make_stages, mean_loss
from tests.support.patience import HUNG_S
from tests.support.ranks import check, run_ranks
from treadle.costs import dump as dump_costs
from treadle.ir.ops import COMMUNICATION, LaneKind, OpKind
from treadle.ir.trace import MICROSECONDS
from treadle.lowering import LoweringOptions
from treadle.lowering.running import expected
from treadle.schedules import SCHEDULES, Size
from treadle.simulator import fit, simulate
from treadle.simulator.difference import unlike
from treadle.verifier import verify_program

TREADLE = str(Path(sys.executable).parent / "treadle")


def schedules(pp: int) -> list[treadle.Schedule]:
    """All schedules in small sizes."""
    found = []
    for family in SCHEDULES.values():
        size = family.nearest(Size(pp, family.default_vpp, 2 * pp))
        assert size is not None
        found.append(family.generate(size))
    return found


def run_traced(rank: int, pp: int, dp: int, *, reduce: bool = True) -> list[treadle.Trace]:
    """The traces of the second steps: of the whole mesh on the first rank, of its own pipeline on each other."""
    mesh, traces = make_mesh(pp, dp), []
    replica = mesh.get_local_rank("dp") if dp > 1 else 0
    for schedule in schedules(pp):
        own = chunks_of(schedule, mesh.get_local_rank("pp"), make_stages(schedule.placement.num_stages))
        pipe = treadle.Pipeline(own, schedule, mesh=mesh, loss_fn=mean_loss)
        for _ in range(2):
            take_step(pipe, *make_batch(schedule.num_microbatches, replica), reduce=reduce)
        own_trace, whole = pipe.gather_trace(), pipe.gather_mesh_trace()
        assert (whole is not None) == (rank == 0)
        traces.append(whole or own_trace)
        pipe.close()
    return traces


def local_traced(rank: int, pp: int, dp: int) -> list[treadle.Trace]:
    return run_traced(rank, pp, dp, reduce=False)


def hold(trace: treadle.Trace) -> None:
    """Everything a trace must keep, whatever took how long."""
    program, start, end = trace.program, trace.start, trace.end
    assert len(start) == len(end) == program.num_ops
    assert int(start.min()) == 0, "the first op starts the clock"
    assert bool((start <= end).all())
    lane = program.lane_of
    same_lane = lane[1:] == lane[:-1]
    overlap = np.flatnonzero(same_lane & (start[1:] < end[:-1]))
    assert not len(overlap), [str(program.op(int(i))) for i in overlap[:3]]
    reader = np.repeat(np.arange(program.num_ops), np.diff(program.dep_ptr))
    assert bool((program.dep >= 0).all())
    early = np.flatnonzero(end[program.dep] > start[reader])
    told = [(str(program.op(int(program.dep[i]))), str(program.op(int(reader[i])))) for i in early[:3]]
    assert not len(early), told
    compute = ~np.isin(program.lane_kind, COMMUNICATION)[lane]
    assert bool((end[compute] > start[compute]).all())
    assert 0 < trace.makespan < 60e9
    assert trace.measured
    assert trace.clock == MICROSECONDS


def ends_of_messages(trace: treadle.Trace) -> dict[tuple[str, str, int, int], set[tuple[int, int]]]:
    """The times of each message, by channel and label."""
    program = trace.program
    seen: dict[tuple[str, str, int, int], set[tuple[int, int]]] = {}
    for index in np.flatnonzero(np.isin(program.kind, [OpKind.SEND_F, OpKind.SEND_B, OpKind.RECV_F, OpKind.RECV_B])):
        op = program.op(int(index))
        src, dst = (op.lane.rank, op.lane.peer) if op.kind.is_send else (op.lane.peer, op.lane.rank)
        times = int(trace.start[index]), int(trace.end[index])
        seen.setdefault((op.kind.name[-1], f"{src}>{dst}", op.mb, op.chunk), set()).add(times)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(("pp", "dp"), [(2, 1), (4, 1), (2, 2)])
def test_a_trace_is_a_possible_run_of_its_program(pp: int, dp: int) -> None:
    ranks = check(run_ranks(pp * dp, run_traced, pp, dp))
    for place, schedule in enumerate(schedules(pp)):
        first, *others = (traces[place] for traces in ranks)
        hold(first)
        program = first.program
        assert program.num_ranks == pp * dp
        assert verify_program(program, expected(program)).clean
        assert first.about.startswith("measured, step 1")
        for rank, other in enumerate(others, 1):
            hold(other)
            assert other.program.num_ranks == pp
            if rank != rank % dp:  # the first other rank of its pipeline
                beside = others[rank % dp - 1] if rank % dp else first
                assert dp > 1 or unlike(beside.program, other.program) == ""
                if beside is not first or dp == 1:
                    assert np.array_equal(beside.start, other.start)
                    assert np.array_equal(beside.end, other.end)
        assert all(len(times) == 1 for times in ends_of_messages(first).values()), (
            "both ends of a message have one view"
        )
        copies = schedule.placement.num_pipes > 1
        reduces = int((program.kind == OpKind.REDUCE_GRAD).sum())
        assert reduces == (pp * dp * schedule.vpp if dp > 1 or copies else 0)


@pytest.mark.slow
def test_a_step_that_does_not_reduce_has_no_reductions() -> None:
    for rank, traces in enumerate(check(run_ranks(4, local_traced, 2, 2))):
        for trace in traces:
            hold(trace)
            assert not bool((trace.program.kind == OpKind.REDUCE_GRAD).any())
            assert not bool((trace.program.lane_kind == LaneKind.DP).any())
            assert trace.program.num_ranks == (4 if rank == 0 else 2)


def peak_of_traces(rank: int) -> tuple[int, int]:
    """The most memory that a rank takes for the trace of its pipeline, and for that of the mesh."""
    mesh, schedule = make_mesh(1, 4), treadle.generate("interleaved-overlap", pp=1, microbatches=512)
    pipe = treadle.Pipeline(chunks_of(schedule, 0, make_stages(2)), schedule, mesh=mesh, loss_fn=mean_loss)
    take_step(pipe, *make_batch(schedule.num_microbatches, rank), reduce=True)
    peaks = []
    tracemalloc.start()
    for gather in (pipe.gather_trace, pipe.gather_mesh_trace):
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        gather()
        peaks.append(tracemalloc.get_traced_memory()[1] - before)
    tracemalloc.stop()
    pipe.close()
    return peaks[0], peaks[1]


@pytest.mark.slow
def test_only_the_first_rank_has_memory_for_a_trace_of_the_mesh() -> None:
    first, *others = check(run_ranks(4, peak_of_traces))
    for of_pipeline, of_mesh in others:
        assert max(of_pipeline, of_mesh) < first[1] / 3


@pytest.fixture(scope="module")
def measured() -> list[treadle.Trace]:
    return check(run_ranks(2, run_traced, 2, 1))[0]


@pytest.mark.slow
def test_a_trace_has_the_form_of_what_is_planned(measured: list[treadle.Trace]) -> None:
    """Op by op the program that `treadle simulate` makes. Overlapped halves, which run in turn here, are apart."""
    for schedule, trace in zip(schedules(2), measured, strict=True):
        planned = treadle.lower(schedule, fit(trace), LoweringOptions())
        paired = bool(planned.joined.any())
        if schedule.placement.num_pipes == 1:
            assert (unlike(planned, trace.program) == "") != paired, schedule.name
        else:
            assert unlike(planned, trace.program) != ""


@pytest.mark.parametrize(
    ("name", "ending"), [("zb-h1", ".npz"), ("dualpipe", ".json.gz"), ("interleaved-overlap", ".json")]
)
def test_compare_reads_what_was_saved(measured: list[treadle.Trace], name: str, ending: str, tmp_path: Path) -> None:
    trace = measured[list(SCHEDULES).index(name)]
    predicted = simulate(trace.program, fit(trace))
    for file, saved in (("predicted", predicted), ("measured", trace)):
        treadle.save_trace(saved, tmp_path / f"{file}{ending}")
    told = compare(f"predicted{ending}", f"measured{ending}", cwd=tmp_path)
    assert told["why_not"] == ""
    assert told["ops"] is not None
    assert told["rows"][1]["makespan"]["value"] == pytest.approx(trace.makespan / 1000)


def test_compare_with_a_schedule_by_name(measured: list[treadle.Trace], tmp_path: Path) -> None:
    trace = measured[list(SCHEDULES).index("1f1b")]
    treadle.save_trace(trace, tmp_path / "measured.npz")
    (tmp_path / "costs.toml").write_text(dump_costs(fit(trace)))
    told = compare("1f1b", "measured.npz", "--pp", "2", "-m", "4", "--costs", "costs.toml", cwd=tmp_path)
    assert told["why_not"] == ""
    assert {group["name"] for group in told["ops"]["by_kind"]} == {"f", "b", "send_f", "send_b", "recv_f", "recv_b"}


def compare(*args: str, cwd: Path) -> dict[str, Any]:
    done = subprocess.run(
        [TREADLE, "compare", *args, "--json"], cwd=cwd, capture_output=True, text=True, timeout=HUNG_S
    )
    assert done.returncode == 0, done.stderr
    return read_json("compare", done.stdout)
