"""What Megatron-LM refuses, the search refuses; megatron-core's own configuration is the oracle."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from treadle.estimate import Job, load_cluster, load_model
from treadle.estimate.job_stages import stage_rows
from treadle.planner.job_estimate import estimate_job
from treadle.planner.space import SearchSpace, candidates
from treadle.trainers.megatron import REFUSALS, flags, refusal

QWEN = load_model("qwen3-30b-a3b")
FLAGS: dict[str, Callable[[Job], Any]] = {
    "overlap_moe_expert_parallel_comm": lambda job: job.schedule == "interleaved-overlap",
    "expert_model_parallel_size": lambda job: job.ep,
    "pipeline_model_parallel_size": lambda job: job.pp,
    "virtual_pipeline_model_parallel_size": lambda job: job.vpp,
}


def job(**given: Any) -> Job:
    sizes = {"pp": 4, "vpp": 2, "ep": 8, "schedule": "interleaved-overlap", "global_batch_size": 128}
    return Job(QWEN, load_cluster(f"{given.pop('gpu', 'b200')}:64"), **{**sizes, **given})


def megatron_core_refuses(each: Job) -> bool:
    config = pytest.importorskip("megatron.core.transformer.transformer_config")
    recompute: dict[str, Any] = {}
    if "full" in each.recompute:
        recompute = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
    elif each.recompute:
        recompute = {"recompute_granularity": "selective", "recompute_modules": list(each.recompute)}
    graphs: dict[str, Any] = {}
    if each.cuda_graph == "partial":
        scope = ["attn", "moe_router", "moe_preprocess"]
        graphs = {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": scope}
    try:
        import torch

        config.TransformerConfig(
            num_layers=48,
            hidden_size=2048,
            num_attention_heads=32,
            num_moe_experts=128,
            moe_token_dispatcher_type="alltoall",
            moe_grouped_gemm=True,
            add_bias_linear=False,
            bf16=True,
            params_dtype=torch.bfloat16,
            pipeline_dtype=torch.bfloat16,
            **{name: read(each) for name, read in FLAGS.items()},
            **recompute,
            **graphs,
        )
    except (AssertionError, ValueError):
        return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"recompute": ("full",)},
        {"recompute": ("layernorm", "moe_act")},
        {"ep": 1},
        {"cuda_graph": "partial"},
        {"cuda_graph": "partial", "recompute": ("layernorm",)},
        {"schedule": "interleaved", "cuda_graph": "partial", "recompute": ("full",)},
        {"schedule": "interleaved", "cuda_graph": "partial", "recompute": ("moe",)},
        {"schedule": "interleaved", "recompute": ("full",)},
    ],
)
def test_megatron_core_refuses_the_same(given: dict[str, Any]) -> None:
    each = job(**given)
    assert (refusal(each, named=True) is not None) == megatron_core_refuses(each)


def test_overlap_with_recomputed_experts_is_refused_as_megatron_main_does() -> None:
    assert "transformer_config.py:3030" in str(refusal(job(recompute=("layernorm", "moe")), named=True))
    assert refusal(job(recompute=("moe",), schedule="interleaved"), named=True) is None


def test_tensor_parallelism_with_overlap_on_hopper_is_for_who_names_the_schedule() -> None:
    hopper = job(tp=2, gpu="h100")
    assert "CUDA_DEVICE_MAX_CONNECTIONS" in str(refusal(hopper, named=False))
    assert refusal(hopper, named=True) is None
    assert refusal(job(tp=2), named=False) is None


def test_a_search_has_no_job_that_megatron_refuses() -> None:
    reasons: Counter[str] = Counter()
    space = SearchSpace(tp=(1, 2), pp=(4,), vpp=(2,), micro_batch_size=(1,), balanced=(True,))
    found = list(candidates(QWEN, load_cluster("h100:64"), space, global_batch_size=512, seq_len=4096, refused=reasons))
    overlapped = [each.job for each in found if each.job.schedule == "interleaved-overlap"]
    assert overlapped
    assert all(each.tp == 1 and each.ep > 1 and {"full", "moe"}.isdisjoint(each.recompute) for each in overlapped)
    assert sum(reason.startswith("Megatron-LM:") for reason in reasons) >= 4


def test_each_refusal_names_a_line() -> None:
    assert all(re.fullmatch(r"(transformer_config|arguments)\.py:\d+", each.source) for each in REFUSALS)


def test_flags_are_fields_of_megatron_core() -> None:
    core = pytest.importorskip("megatron.core.transformer.transformer_config")
    fields = set(core.TransformerConfig.__dataclass_fields__)
    typed = flags(estimate_layout(job(tp=2, recompute=("layernorm",))))
    given = {name[2:].replace("-", "_") for name in re.findall(r"--[a-z0-9-]+", typed)}
    training = {"num_virtual_stages_per_pipeline_rank", "micro_batch_size", "global_batch_size", "seq_length"}
    training |= {"use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"}
    assert given - training <= fields
    assert "expert_tensor_parallel_size" in given


def estimate_layout(each: Job) -> Job:
    return estimate_job(replace(each, layout=stage_rows(each))).job


def test_a_schedule_that_megatron_does_not_run_has_no_flags() -> None:
    assert flags(estimate_layout(job(schedule="zb-v", vpp=2))) == ""
