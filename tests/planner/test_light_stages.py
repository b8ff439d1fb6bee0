"""Where nothing fits, the first rank, which keeps the activations of most micro-batches, gets fewer layers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from treadle.planner import SearchSpace, find_plan
from treadle.planner.ranked_search import SearchResult

_SPACE = SearchSpace(
    tp=(2,),
    cp=(2,),
    pp=(8,),
    vpp=(4,),
    micro_batch_size=(1,),
    schedules=("interleaved",),
    recompute=((),),
    offload=((),),
    gradient_bytes=(2,),
    precision=("mxfp8",),
    balanced=(True,),
)


def _found(space: SearchSpace, limit_gib: int) -> SearchResult:
    tokens = 1536 * 8192
    return find_plan(
        "llama3-405b", "gb300:256", tokens_per_batch=tokens, seq_len=8192, space=space, memory_limit=limit_gib << 30
    )


def test_the_embedding_counts_as_a_layer_where_nothing_fits_otherwise() -> None:
    """Megatron-Bridge runs it so: on 8 ranks of GB300, with 126 layers and both ends as one each."""
    fastest, lighter = _found(_SPACE, 270).best, _found(_SPACE, 246).best
    assert fastest.job.layout is not None
    assert lighter.job.layout is not None
    assert (fastest.job.layout[0], lighter.job.layout[0]) == ("Etttt", "Ettt")
    assert fastest.memory_bytes > 246 << 30 >= lighter.memory_bytes
    assert lighter.step_s > fastest.step_s


def test_a_layout_that_is_given_stays() -> None:
    layout = ("Etttt", *("tttt",) * 30, "ttL")
    with pytest.raises(ValueError, match="none of 1 candidates fits"):
        _found(replace(_SPACE, layout=(layout,)), 246)
