"""What ranks tell each other before the first step comes back whole; reasons to reject a pipeline reach all ranks."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import partial

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import treadle
from tests.support.cases import refusal
from tests.support.devices import DEVICE_TYPE
from tests.support.ranks import check, run_ranks
from treadle.dist.groups import next_name
from treadle.dist.mesh_position import mesh_position
from treadle.dist.rank_groups import Groups
from treadle.runtime.agreement import Claim, agree, digest_of
from treadle.runtime.handshake import Handshake, RankStages
from treadle.runtime.parameter_claims import digests_of


@st.composite
def rank_stages(draw: st.DrawFn) -> RankStages:
    vpp = draw(st.integers(1, 5))
    flags = st.lists(st.booleans(), min_size=vpp, max_size=vpp)
    layers = st.lists(st.integers(0, 1 << 20), min_size=vpp, max_size=vpp)
    blocks = st.lists(st.text("EdtmL"), min_size=vpp, max_size=vpp)
    return RankStages(
        draw(flags), draw(layers), draw(flags), draw(blocks), draw(st.lists(st.text())), draw(st.lists(st.text()))
    )


@given(rank_stages())
def test_stages_come_back_whole(stages: RankStages) -> None:
    assert RankStages.decode(stages.encode()) == stages


def test_replicas_may_differ_in_what_they_can_split_only() -> None:
    schedule = treadle.generate("1f1b", pp=1, microbatches=2)
    one, other = RankStages([True], [3], [True], ["ttt"], [], []), RankStages([False], [3], [True], ["ttt"], [], [])
    claims = [claim.facts for claim in one.claims(schedule.placement, 0)]
    assert claims == [claim.facts for claim in other.claims(schedule.placement, 0)]
    for odd in (RankStages([True], [4], [True], ["tttt"], [], []), RankStages([True], [3], [True], ["ttt"], [], ["x"])):
        assert claims != [claim.facts for claim in odd.claims(schedule.placement, 0)]
    assert Handshake.of([[one, other]], schedule).splits == {(0, 0): False}
    assert Handshake.of([[one]], schedule).splits == {(0, 0): True}


def test_digests_fit_into_a_tensor_and_tell_texts_apart() -> None:
    assert 0 <= digest_of(["attn"]) < 2**63
    assert digest_of(["attn"]) != digest_of(["mlp"])


def refusals_of_facts(rank: int) -> list[str]:
    """What ranks raise for problems of two of them, and for facts of the run, of a stage, and of one thing twice."""
    position = mesh_position(init_device_mesh(DEVICE_TYPE, (2, 2), mesh_dim_names=("pp", "dp")))
    groups = Groups.make(next_name(position), position, timedelta(seconds=60))
    run = {"seed": "0", "lr": "0.5" if rank == 2 else "0.25", "long": "x" * 99}
    stage, tie = f"stage {position.pp_rank}", "{} differ; {}"
    said = [
        refusal(partial(agree, groups, [Claim("the run", run)], problem, doing="read"))
        for problem in (ValueError(f"no text {rank}") if rank in (1, 3) else None, None)
    ]
    calls: list[list[Claim]] = [
        [Claim("the run", {"seed": "0"}), Claim(stage, {"e": str(rank // 3)}, "{}; a stage is the same")],
        [Claim("tie", {"value": str(rank)}, tie, "weight") for rank in ((0, 0, 1) if rank == 3 else (0,))],
        [Claim("tie", {"value": "x" * 200 + str(rank // 2)})],
        [Claim(stage, {"e": stage})],
    ]
    said += [refusal(partial(agree, groups, claims)) for claims in calls]
    told = agree(groups, told=rank // 2)
    groups.close()
    return [*said, repr(told)]


def test_ranks_raise_the_problem_of_one_and_name_facts_that_differ() -> None:
    problems, facts, stages, ties, longs, same, told = zip(*check(run_ranks(4, refusals_of_facts)), strict=True)
    quoted, host = "rank 1 could not read: no text 1", os.uname().nodename
    assert problems == (quoted, "no text 1", quoted, "no text 3")
    apart = f"rank 0 ({host}, 3 ranks alike) and rank 2 ({host}) differ in lr (0.25 and 0.5)"
    assert {*facts} == {f"{apart}; these must be the same on all ranks"}
    assert {*stages} == {f"rank 2 ({host}) and rank 3 ({host}) differ in e (0 and 1); a stage is the same"}
    two = f"weight on rank 0 ({host}, 4 ranks alike) and weight on rank 3 ({host}) differ in value (0 and 1)"
    assert {*ties} == {f"{two} differ; {{}}"}
    assert all(" digest " in said for said in longs)
    assert {*same} == {"not refused"}
    assert {*told} == {"[[0], [1]]"}


def test_digests_depend_on_bits_and_places() -> None:
    torch.manual_seed(0)
    value = torch.randn(3, 8191)
    nan = value.index_fill(0, torch.tensor(1), float("nan"))
    swapped = value[[1, 0, 2]]
    wide = torch.randn(70_000)
    moved = wide.clone()
    moved[[0, 65_536]] = wide[[65_536, 0]]  # into the next piece
    kinds = [value, value.bfloat16(), value.double(), value.to(torch.complex64), value.to(torch.float8_e5m2)]
    params = [value, nan, swapped, -value, wide, moved, *kinds[1:], torch.zeros(4), -torch.zeros(4), value.t()]
    digests = digests_of([nn.Parameter(each) for each in params])
    assert len({*digests}) == len(digests)
    again = [nn.Parameter(each.clone()) for each in (value, nan, torch.tensor(1.0), torch.zeros(0))]
    assert digests_of(again)[:2] == digests[:2]
    assert digests_of([]) == []
