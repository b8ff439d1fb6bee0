"""The table of ops: numbers that files hold, complete rows, and the tables that are read from them."""

from __future__ import annotations

from collections import Counter

import pytest

from treadle.costs.format import SECTIONS
from treadle.ir import ops
from treadle.ir.ops import KIND_OF, LaneKind, OpKind, OpPart, OpPhase, OpRole

IN_FILES = """
    F B I W SEND_F SEND_B RECV_F RECV_B ATTN_F COUNTS HOST DISPATCH_F MLP_F COMBINE_F COMBINE_B MLP_B DISPATCH_B
    ATTN_B MLP_W ATTN_W OFFLOAD ONLOAD REDUCE_GRAD H2D BROADCAST RELOAD EMBED_F EMBED_B HEAD_F HEAD_B HEAD_W MTP_F
    MTP_B MTP_W ATTN_R MLP_R REDUCE_TIED CLIP OPTIMIZER GATHER_PARAMS GC REDUCE_LAYERNORM REDUCE_SCATTER SEND_BUCKET
    RECV_BUCKET
"""
"""Kinds in the order of their numbers, as the first files have them."""

LANES_IN_FILES = """
    COMPUTE SEND RECV EP OUT IN DP HOST H2D BROADCAST RELOAD TIED WORLD TP
"""


def test_numbers_in_files_stay() -> None:
    assert [kind.name for kind in OpKind][: len(IN_FILES.split())] == IN_FILES.split()
    assert [int(kind) for kind in OpKind] == list(range(len(OpKind)))
    assert [lane.name for lane in LaneKind][: len(LANES_IN_FILES.split())] == LANES_IN_FILES.split()
    assert [int(lane) for lane in LaneKind] == list(range(len(LaneKind)))


def test_a_number_or_a_name_gives_the_row() -> None:
    assert OpKind(17) is OpKind["ATTN_B"] is OpKind.ATTN_B
    assert repr(OpKind.ATTN_B) == "<OpKind.ATTN_B: 17>"


@pytest.mark.parametrize("kind", OpKind)
def test_rows_are_complete(kind: OpKind) -> None:
    assert len(kind.letter) == 1
    assert kind.box
    assert kind.about
    assert kind.cost in (*SECTIONS, "")
    assert (kind.cost == "") == (kind.role in (OpRole.MEASURED, OpRole.UPDATE))
    assert (kind.part is None) == (kind.role not in (OpRole.ACTION, OpRole.COMPUTE, OpRole.EXCHANGE))
    if kind.cost:
        assert SECTIONS[kind.cost].key(kind.cost_key)
    if kind.size_key:
        assert SECTIONS["moved_bytes"].key(kind.size_key)


def test_a_part_has_one_kind_in_a_phase() -> None:
    labels = Counter((kind.part, kind.phase) for kind in OpKind if kind.part is not None)
    assert set(labels.values()) == {1}
    assert labels.keys() == KIND_OF.keys()


def test_every_part_has_a_forward() -> None:
    assert {part for part, phase in KIND_OF if phase is OpPhase.F} == set(OpPart)


def test_a_wgrad_and_a_recompute_have_a_backward() -> None:
    for kind in OpKind:
        if kind.phase in (OpPhase.W, OpPhase.R):
            assert kind.in_phase(OpPhase.B) is not None


def test_the_parts_of_a_layer_are_in_order() -> None:
    assert [kind.name for kind in ops.FORWARD] == IN_FILES.split()[8:14]
    assert [kind.name for kind in ops.BACKWARD] == IN_FILES.split()[14:18]
    assert [kind.name for kind in ops.WEIGHTS] == ["MLP_W", "ATTN_W", "MTP_W", "HEAD_W"]


def test_a_step_ends_in_five_ways() -> None:
    ways = [[kind.name for kind in kinds] for kinds in ops.STEP_ENDS]
    clip, optimizer, gather = "CLIP", "OPTIMIZER", "GATHER_PARAMS"
    assert ways == [[], [optimizer], [clip, optimizer], [optimizer, gather], [clip, optimizer, gather]]


def test_an_array_by_kind_has_its_numbers_as_indices() -> None:
    lanes = ops.column(lambda kind: kind.lane, "uint8")
    assert all(lanes[kind] == kind.lane for kind in OpKind)
