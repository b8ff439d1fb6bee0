"""Embedding and head may be stages of their own: Llama 3.1 405B on PP16 VPP8 has 126 layers on 128 stages."""

from __future__ import annotations

from treadle.estimate import load_model
from treadle.planner import SearchSpace, find_plan


def test_a_plan_puts_embedding_and_head_on_stages_of_their_own() -> None:
    space = SearchSpace(tp=(1,), pp=(17,), vpp=(2,), micro_batch_size=(1,), schedules=("interleaved",), recompute=((),))
    layout = find_plan(load_model("llama3-8b"), "h100:17", space=space, tokens_per_batch=17 * 4096).best.job.layout
    assert layout == ("E", *("t",) * 32, "L")
