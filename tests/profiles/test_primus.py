"""Primus's files: one model as 1F1B and as interleaved 1F1B on eight GPUs, imported, replayed and predicted."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from treadle.ir.crossings import crossings
from treadle.ir.ops import OpKind
from treadle.profiles.imported import Imported
from treadle.profiles.importing import import_profile
from treadle.profiles.reader import Opening
from treadle.profiles.readers.primus import PrimusReader
from treadle.profiles.recording import UNKNOWN, Recording
from treadle.simulator import fit
from treadle.simulator.gaps import own_durations
from treadle.simulator.predict import Durations
from treadle.simulator.stage_fitting import fit_stages

DATA = Path(__file__).parent.parent / "data" / "primus"
CUT = ("E" + 8 * "t", *6 * (8 * "t",), 8 * "t" + "L")


@cache
def imported(run: str) -> Imported:
    return import_profile([DATA / run])


@pytest.mark.parametrize(("run", "name", "vpp"), [("pp8", "1f1b", None), ("pp8_vpp2", "interleaved", 2)])
def test_the_schedule_of_a_run_is_named(run: str, name: str, vpp: int | None) -> None:
    assert imported(run).named
    assert imported(run).schedule == treadle.generate(name, pp=8, vpp=vpp, microbatches=16)
    assert imported(run).steps.numbers == tuple(range(1, 21))


@pytest.mark.parametrize("run", ["pp8", "pp8_vpp2"])
def test_ranks_are_on_one_clock(run: str) -> None:
    steps = imported(run).steps
    found = crossings(steps.program)
    assert (steps.end[:, found.maker] <= steps.start[:, found.reader]).all()


@pytest.mark.parametrize(("run", "median_ms"), [("pp8", 3245.27), ("pp8_vpp2", 2876.11)])
def test_ops_with_their_own_durations_give_the_measured_steps_within_half_a_percent(run: str, median_ms: float) -> None:
    steps = imported(run).steps
    assert abs(np.median(steps.makespans) / 1e6 - median_ms) < 1
    replayed = [treadle.simulate(steps.program, Durations(took)).makespan for took in own_durations(steps)]
    assert abs(np.median(np.array(replayed) / steps.makespans) - 1) < 0.005


def test_costs_fitted_to_1f1b_predict_the_interleaved_run_within_six_percent() -> None:
    """One cost for all stages is 12 % off: the last stage has the head, and two chunks a rank halve the rest only."""
    measured = float(np.median(imported("pp8_vpp2").steps.makespans))
    schedule = imported("pp8_vpp2").schedule
    by_stage = fit_stages(imported("pp8").steps, CUT)
    predicted = treadle.simulate(treadle.lower(schedule, by_stage), by_stage)
    assert predicted.program.layout.blocks[-1] == "ttttL"
    assert abs(predicted.makespan / measured - 1) < 0.06
    alike = fit(imported("pp8").steps.trace())
    took = {"f": alike.cells["f"] / 2, "b": alike.cells["b"] / 2}
    program = imported("pp8_vpp2").program
    each = np.where(program.kind == OpKind.F, took["f"], np.where(program.kind == OpKind.B, took["b"], 0))
    mean = treadle.simulate(program, Durations(each.astype(np.int64)))
    assert 0.10 < 1 - mean.makespan / measured < 0.13


def written(directory: Path, ranks: list[dict[str, Any]], **config: int) -> list[Path]:
    sizes = {"pp_size": len(ranks), "vp_size": 1, "num_mbs": 2, "dp_size": 1, **config}
    (directory / "config.json").write_text(json.dumps(sizes))
    for rank, content in enumerate(ranks):
        (directory / f"pp_rank_{rank}.json").write_text(json.dumps(content, indent=2))
    return sorted(directory.iterdir())


def read(paths: list[Path]) -> Recording:
    reader = PrimusReader()
    assert all(reader.recognises(Opening.of(path)) for path in paths)
    return reader.read(paths, lambda _: None)


def test_named_microbatches_split_backwards_and_overlapped_pairs_are_read(tmp_path: Path) -> None:
    step = {
        "fwd_start": [0, 10],
        "fwd_end": [10, 30],
        "fwd_minibatch": [0, 1],
        "fwd_chunk": [0, 0],
        "bwd_start": [10, 30],
        "bwd_end": [30, 40],
        "bwd_minibatch": [0, 1],
        "bwd_chunk": [0, 0],
        "wgrad_start": [40, 45],
        "wgrad_end": [45, 50],
        "wgrad_minibatch": [0, 1],
        "wgrad_chunk": [0, 0],
        "total": 50,
    }
    recording = read(written(tmp_path, [{"1": step, "2": step}]))
    (rank,) = recording.ranks
    first = rank.step == 1
    assert [OpKind(kind).name for kind in rank.kind[first]] == ["F", "F", "I", "I", "W", "W"]
    assert rank.mb[first].tolist() == [0, 1, 0, 1, 0, 1]
    assert rank.joined[first].tolist() == [False, False, True, False, False, False]
    assert rank.start[~first].min() == 50_000_000  # one step behind the other
    assert (recording.pp, recording.vpp, recording.num_mb) == (1, 1, 2)


def test_what_is_not_named_stays_unknown(tmp_path: Path) -> None:
    step = {"fwd_start": [0, 1], "fwd_end": [1, 2], "bwd_start": [2, 3], "bwd_end": [3, 4], "odd": 1, "memory": 3.5}
    recording = read(written(tmp_path, [{"1": step}], dp_size=4))
    assert set(recording.ranks[0].mb.tolist()) == {UNKNOWN}
    said = " ".join(map(str, recording.remarks))
    assert "'odd' are not known" in said
    assert "reserved memory" in said
    assert "first of 4 replicas" in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"fwd_end": [1]}, "an end for each of the 2 starts"),
        ({"bwd_end": [1, 2]}, "none before it"),
        ({"fwd_start": ["a", 1]}, "fwd_start is a list of milliseconds"),
        ({"fwd_minibatch": [0]}, "a number for each of 2, got 1"),
        ({"total": 0.004}, "its units are mixed"),
    ],
)
def test_steps_that_contradict_themselves_are_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    step = {"fwd_start": [0, 1], "fwd_end": [1, 2], "bwd_start": [2, 3], "bwd_end": [3, 4], "total": 4}
    with pytest.raises(ValueError, match=said) as raised:
        read(written(tmp_path, [{"1": step | change}]))
    assert "pp_rank_0.json" in str(raised.value)
