"""What ranks tell each other before the first step comes back whole; reasons to reject a pipeline reach all ranks."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from tests.support.devices import DEVICE_TYPE
from tests.support.ranks import check, run_ranks
from treadle.dist.groups import next_name
from treadle.dist.mesh_position import mesh_position
from treadle.dist.rank_groups import Groups
from treadle.runtime.handshake import RankStages, StartTerms, digest_of, raise_for_all

int64s = st.integers(-(2**63), 2**63 - 1)


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


@given(st.builds(StartTerms, int64s, int64s, int64s, int64s, int64s))
def test_terms_come_back_whole(terms: StartTerms) -> None:
    assert StartTerms.decode(torch.tensor(terms.encode(), dtype=torch.int64).tolist()) == terms


def test_replicas_agree_whether_or_not_they_can_split() -> None:
    one, other = RankStages([True], [3], [True], ["ttt"], [], []), RankStages([False], [3], [True], ["ttt"], [], [])
    assert one.agrees_with(other)
    assert not one.agrees_with(RankStages([True], [4], [True], ["tttt"], [], []))
    assert not one.agrees_with(RankStages([True], [3], [True], ["ttt"], [], ["positions"]))


def test_digests_fit_into_a_tensor_and_tell_texts_apart() -> None:
    assert 0 <= digest_of(["attn"]) < 2**63
    assert digest_of(["attn"]) != digest_of(["mlp"])


def rejected(rank: int) -> str:
    deadline = timedelta(seconds=20)
    position = mesh_position(init_device_mesh(DEVICE_TYPE, (2, 2), mesh_dim_names=("pp", "dp")))
    groups = Groups.make(next_name(position), position, deadline)
    reason = f"the stages of {rank} do not fit" if rank in (1, 3) else None
    with pytest.raises(ValueError, match="do not fit") as error:
        raise_for_all(groups, reason)
    dist.barrier()
    groups.close()
    return str(error.value)


def test_ranks_without_a_reason_quote_the_one_that_rejected() -> None:
    quoted = "rank 3 rejected the pipeline: the stages of 3 do not fit"
    assert check(run_ranks(4, rejected)) == [
        quoted,
        "rank 1: the stages of 1 do not fit",
        quoted,
        "rank 3: the stages of 3 do not fit",
    ]
