"""What ranks tell each other before the first step comes back whole; reasons to reject a pipeline reach all ranks."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.support.devices import DEVICE_TYPE
from tests.support.ranks import check, run_ranks
from treadle.dist.groups import next_name
from treadle.dist.mesh_position import mesh_position
from treadle.dist.rank_groups import Groups
from treadle.runtime.agreement import agree_to_start, difference, digest_of, raise_for_all
from treadle.runtime.handshake import RankStages, digests_of


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


def test_replicas_agree_whether_or_not_they_can_split() -> None:
    one, other = RankStages([True], [3], [True], ["ttt"], [], []), RankStages([False], [3], [True], ["ttt"], [], [])
    assert one.agrees_with(other)
    assert not one.agrees_with(RankStages([True], [4], [True], ["tttt"], [], []))
    assert not one.agrees_with(RankStages([True], [3], [True], ["ttt"], [], ["positions"]))


def test_digests_fit_into_a_tensor_and_tell_texts_apart() -> None:
    assert 0 <= digest_of(["attn"]) < 2**63
    assert digest_of(["attn"]) != digest_of(["mlp"])


def rejected(rank: int) -> list[str]:
    """What ranks raise for reasons of two of them, for a fact that one has other, and for a fact of a part of them."""
    deadline = timedelta(seconds=60)
    position = mesh_position(init_device_mesh(DEVICE_TYPE, (2, 2), mesh_dim_names=("pp", "dp")))
    groups = Groups.make(next_name(position), position, deadline)
    said = []
    with pytest.raises(ValueError, match="do not fit") as error:
        raise_for_all(groups, f"the stages of {rank} do not fit" if rank in (1, 3) else None)
    said.append(str(error.value))
    with pytest.raises(ValueError, match="lr") as error:
        agree_to_start(groups, {"seed": "0", "lr": "0.5" if rank == 2 else "0.25", "long": "x" * 99}, None)
    said.append(str(error.value))
    with pytest.raises(ValueError, match="no text") as error:
        agree_to_start(groups, {"seed": str(rank)}, ValueError("no text") if rank == 0 else None, doing="read")
    said.append(str(error.value))
    agree_to_start(groups, {"seed": "0"}, None)
    over = [group for group in (groups.dp_group, groups.pp_group) if group is not None]
    said.append(str(difference(groups, over, {0: {"a": "1"}, 1 + rank % 2: {"e": str(rank // 3)}}, num_parts=3)))
    assert difference(groups, over, {rank: {"a": str(rank)}}, num_parts=4) is None
    dist.barrier()
    groups.close()
    return said


def test_ranks_raise_the_reason_of_one_and_name_facts_that_differ() -> None:
    found = check(run_ranks(4, rejected))
    reasons, facts, problems, parts = zip(*found, strict=True)
    quoted = "rank 3 rejected the pipeline: the stages of 3 do not fit"
    assert reasons == (
        quoted,
        "rank 1: the stages of 1 do not fit",
        quoted,
        "rank 3: the stages of 3 do not fit",
    )
    host = os.uname().nodename
    apart = f"rank 0 ({host}, 3 ranks alike) and rank 2 ({host}) differ in lr (0.25 and 0.5)"
    assert set(facts) == {f"{apart}; these must be the same on all ranks"}
    assert problems == ("no text", *["rank 0 could not read: no text"] * 3)
    assert set(parts) == {f"rank 1 ({host}) and rank 3 ({host}) differ in e (0 and 1)"}


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
