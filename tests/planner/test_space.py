"""The space that is searched where a knob has no value: what makes sense for a model and a cluster."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from treadle.estimate import Job, load_cluster, load_model
from treadle.estimate.activations import ActivationCut, block_activations, checkpointed
from treadle.estimate.op_costs import estimate_costs
from treadle.planner.plan_files import untrainable
from treadle.planner.space import TRAINED_RECOMPUTE, SearchSpace, candidates, fill, recompute_sets


@pytest.mark.parametrize("model", ["llama3-70b", "qwen3-30b-a3b", "deepseek-v3", "gpt-oss-120b"])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_each_set_of_recomputed_modules_saves_less_and_takes_longer(model: str, precision: str) -> None:
    shape, found = load_model(model), []
    for modules in recompute_sets(shape):
        job = Job(shape, load_cluster("h100:64"), recompute=modules, precision=precision, global_batch_size=64)
        cut = ActivationCut.of(job, "p2p", fused_loss=True)
        block = checkpointed(cut, "t") if "full" in modules else block_activations(cut, "t")
        layer = estimate_costs(job, inline_recompute=True).layer
        found.append((block.saved, sum(time for name, time in layer.items() if not name.endswith("_r"))))
    assert all(less < more for (more, _), (less, _) in pairwise(found))
    assert all(faster < slower for (_, faster), (_, slower) in pairwise(found))


def test_full_recomputation_repeats_the_exchanges_with_experts() -> None:
    job = Job(load_model("qwen3-30b-a3b"), load_cluster("h100:64"), ep=16, global_batch_size=64, recompute=("full",))
    once, twice = estimate_costs(job).layer, estimate_costs(job, inline_recompute=True).layer
    for part in ("dispatch", "combine"):
        assert twice[f"{part}_b"] == once[f"{part}_b"] + once[f"{part}_f"] > once[f"{part}_b"]


@pytest.mark.parametrize(
    ("model", "cluster", "seq_len", "cp"),
    [
        ("llama3-8b", "h100:8", 4096, (1, 2)),
        ("llama3-8b", "h100:16", 4096, (1,)),
        ("llama3-8b", "h100:16", 8192, (1, 2)),
        ("qwen3-30b-a3b", "h100:8", 4096, (1,)),
        ("qwen3-30b-a3b", "h100:64", 32768, (1, 2, 4, 8)),
        ("llama3-405b", "h100:1024", 131072, (1, 2, 4, 8, 16)),
    ],
)
def test_a_rank_keeps_a_sensible_part_of_a_sequence(
    model: str, cluster: str, seq_len: int, cp: tuple[int, ...]
) -> None:
    assert fill(SearchSpace(), load_model(model), load_cluster(cluster), seq_len).cp == cp


@pytest.mark.parametrize(
    ("model", "pp", "vpps"),
    [("llama3-70b", 4, {2, 4, 5}), ("qwen3-235b-a22b", 8, {2, 3, 4, 6}), ("llama3-405b", 8, {2, 4, 8})],
)
def test_chunks_divide_the_layers_of_a_rank(model: str, pp: int, vpps: set[int]) -> None:
    space = SearchSpace(tp=(8,), pp=(pp,), ep=(1,), micro_batch_size=(1,), schedules=("interleaved",))
    found = candidates(load_model(model), load_cluster("h100:1024"), space, global_batch_size=1024, seq_len=4096)
    assert {each.job.vpp for each in found} == vpps


def test_parameters_are_cut_over_replicas_of_dense_models_without_a_pipeline() -> None:
    def shardings(model: str, pp: int) -> set[str]:
        space = SearchSpace(tp=(1,), pp=(pp,), micro_batch_size=(1,), schedules=("1f1b",), recompute=((),))
        found = candidates(load_model(model), load_cluster("h100:16"), space, global_batch_size=64, seq_len=4096)
        return {each.job.sharding for each in found}

    assert shardings("llama3-8b", 1) == {"optimizer", "gradients", "parameters"}
    assert shardings("llama3-8b", 2) == shardings("qwen3-30b-a3b", 1) == {"optimizer"}


def test_a_space_of_the_trainer_has_jobs_that_it_can_run() -> None:
    space = SearchSpace(
        tp=(1,), cp=(1,), pp=(1,), micro_batch_size=(1,), recompute=TRAINED_RECOMPUTE, sharding=("optimizer",)
    )
    model, cluster = load_model("llama3-8b"), load_cluster("h100:8")
    found = list(candidates(model, cluster, space, global_batch_size=64, seq_len=4096))
    assert found
    assert all(untrainable(each.job) is None for each in found)
    changes: list[dict[str, Any]] = [{"recompute": ("layernorm",)}, {"sharding": "parameters"}, {"gradient_bytes": 2}]
    assert all(untrainable(replace(found[0].job, **each)) is not None for each in changes)
