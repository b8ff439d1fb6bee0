"""A profile of parts of layers: DeepSeek's published one, as an extract, becomes lanes that can be drawn and fitted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import treadle
from tests.support.paths import ROOT
from treadle.diagnosis import analyse
from treadle.ir.ops import LaneKind, OpKind
from treadle.profiles.assemble_run import assemble
from treadle.profiles.importing import import_profile, read_recording

TRAIN = ROOT / "tests" / "data" / "deepseek" / "train.json.gz"


def test_an_overlapped_pair_of_four_layers_is_read_as_lanes() -> None:
    imported = import_profile([TRAIN])
    program, trace = imported.program, imported.steps.trace()
    assert imported.remarks == ()
    assert [str(cell) for cell in imported.schedule.rows[0]] == ["(F1.0|B0.0)"]
    assert program.layout.blocks == ("tttt",)
    assert (program.num_ops, program.num_lanes) == (40, 2)
    for lane in range(2):  # a lane does one thing at a time
        ops = slice(*program.lane_ptr[lane : lane + 2])
        assert (trace.start[ops][1:] >= trace.end[ops][:-1]).all()
    assert trace.makespan == 129_012_000
    waits = np.repeat(np.arange(program.num_ops), np.diff(program.dep_ptr))
    assert len(waits) == 40 - 2 - 8  # not the first of forward and backward, nor wgrads, which follow on their lane
    assert (trace.start[waits] >= trace.end[program.dep]).all()


def test_its_costs_predict_it() -> None:
    steps = import_profile([TRAIN]).steps
    costs = treadle.fit(steps.trace())
    again = treadle.simulate(steps.program, costs)
    assert again.makespan == pytest.approx(steps.makespans[0], rel=0.02)
    assert costs.layer["attn_f"] == 4_584_500
    compute = np.isin(steps.program.lane_kind[steps.program.lane_of], LaneKind.COMPUTE)
    assert set(map(OpKind, steps.program.kind[~compute].tolist())) == {
        OpKind.DISPATCH_F,
        OpKind.COMBINE_F,
        OpKind.COMBINE_B,
        OpKind.DISPATCH_B,
    }
    assert analyse(steps).cause.what == "none"


def test_two_ranks_of_parts_are_refused() -> None:
    recording = read_recording([TRAIN])
    (rank,) = recording.ranks
    with pytest.raises(ValueError, match="parts of layers are read of one rank, got 2; give one file"):
        assemble(replace(recording, ranks=(rank, replace(rank, rank=1, source="other"))))
