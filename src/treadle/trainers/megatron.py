"""Megatron-LM: a job as its options and launch script, and the combinations that it refuses.

Sources are Megatron-LM main of 2026-08-22 (d98e8a64): `arguments.py` is megatron/training/arguments.py,
`transformer_config.py` megatron/core/transformer/transformer_config.py.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import NamedTuple

from treadle.estimate import Job, ModelShape
from treadle.ir.blocks import write_layout
from treadle.passes.cut import cut_evenly
from treadle.schedules import family
from treadle.trainers import megatron_arguments as arguments
from treadle.trainers.job_description import Described
from treadle.trainers.megatron_job import MODULES, SIZES, described
from treadle.trainers.yaml_text import parse_yaml

TITLE = "Megatron-LM"
NAMES = {field: arguments.option_of(name) for name, field in SIZES.items()} | {
    "etp": "--expert-tensor-parallel-size",
    "vpp": "--num-virtual-stages-per-pipeline-rank",
    "layout": "--pipeline-model-parallel-layout",
    "num_hidden_layers": "--num-layers",
    "num_attention_heads": "--num-attention-heads",
    "num_experts": "--num-experts",
}
OFFLOADED = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act")

_LOW_PRECISION = {
    "bf16": {},
    "fp8": {"--fp8-format": "hybrid", "--fp8-recipe": "tensorwise"},
    "mxfp8": {"--fp8-format": "e4m3", "--fp8-recipe": "mxfp8"},
    "nvfp4": {"--fp4-format": "e2m1", "--fp4-recipe": "nvfp4"},
}
_FSDP = {"gradients": "optim_grads", "parameters": "optim_grads_params"}
_PARTIAL = {True: "attn moe_router moe_preprocess", False: "attn mlp"}
"""--cuda-graph-modules of partial graphs, of models with and without experts."""


class MegatronCheck(NamedTuple):
    """An assertion of Megatron-LM."""

    holds: Callable[[Job], bool]
    """True of a job that fails it."""

    text: str
    source: str
    warned: bool = False
    """Megatron-LM warns and runs. A search leaves such a job out unless its schedule was named."""


def _overlapped(job: Job) -> bool:
    return family(job.schedule).overlapped


REFUSALS = (
    MegatronCheck(
        lambda job: _overlapped(job) and "full" in job.recompute,
        "overlap_moe_expert_parallel_comm takes no full recomputation",
        "transformer_config.py:3021",
    ),
    MegatronCheck(
        lambda job: _overlapped(job) and "moe" in job.recompute,
        "overlap_moe_expert_parallel_comm takes no moe in recompute_modules",
        "transformer_config.py:3030",
    ),
    MegatronCheck(
        lambda job: _overlapped(job) and job.ep == 1,
        "overlap_moe_expert_parallel_comm needs EP above 1",
        "transformer_config.py:3013",
    ),
    MegatronCheck(
        lambda job: _overlapped(job) and job.model.num_nextn_predict_layers > 1,
        "overlap_moe_expert_parallel_comm takes one MTP layer at most",
        "transformer_config.py:3042",
    ),
    MegatronCheck(
        lambda job: job.cuda_graph == "partial" and "full" in job.recompute,
        "full recomputation goes with CUDA graphs of the whole iteration only",
        "transformer_config.py:2857",
    ),
    MegatronCheck(
        lambda job: job.cuda_graph == "partial" and "moe" in job.recompute,
        "recomputation of moe takes no partial CUDA graphs, which include moe_router",
        "transformer_config.py:2865",
    ),
    MegatronCheck(
        lambda job: "attn_proj" in job.offload and "core_attn" not in job.offload,
        "offload_modules takes attn_proj with core_attn only",
        "transformer_config.py:2148",
    ),
    MegatronCheck(
        lambda job: "moe" in job.recompute and not {"moe_act", "expert_fc1"}.isdisjoint(job.offload),
        "offload_modules takes neither moe_act nor expert_fc1 where moe is recomputed",
        "transformer_config.py:2166",
    ),
    MegatronCheck(
        lambda job: _overlapped(job) and job.tp * job.cp > 1 and "mxfp8" not in job.cluster.peak_flops,
        "before Blackwell, TP or CP wants CUDA_DEVICE_MAX_CONNECTIONS=1 and overlap_moe_expert_parallel_comm more; "
        "Megatron-LM advises against both (--schedule interleaved-overlap has it all the same)",
        "arguments.py:1466",
        warned=True,
    ),
)
"""`moe_token_dispatcher_type` (transformer_config.py:3016) and shared-expert overlap (3039) are flags alone: those that
`megatron_flags` gives pass."""


def refusal(job: Job, *, named: bool) -> str | None:
    """Return why Megatron-LM refuses a job that no other public trainer runs; None if it does not.

    `named`: the schedule was asked for by name, so that what Megatron-LM only warns about is no reason.
    """
    if not _runs(job) or (len(family(job.schedule).trainers) > 1 and job.cuda_graph == Job.cuda_graph):
        return None
    found = next((each for each in REFUSALS if each.holds(job) and not (named and each.warned)), None)
    return f"Megatron-LM: {found.text} ({found.source})" if found is not None else None


def settings(job: Job) -> dict[str, str]:
    """Return the options that launch a job, by name; "" for those without a value.

    Raises:
        ValueError: Megatron-LM has no counterpart of the job, or refuses it.

    """
    reason = _lacking(job) or next((each.text for each in REFUSALS if each.holds(job) and not each.warned), None)
    if reason is not None:
        raise ValueError(f"{TITLE}: {reason}")
    return {**_model(job), **_parallel(job), **_numbers(job), **_saving(job)}


def flags(job: Job) -> str:
    """Return the options of a job as they are typed; "" where Megatron-LM cannot run it."""
    try:
        settings(job)
    except ValueError:
        return ""
    return typed({**_parallel(job), **_numbers(job), **_saving(job)})


def typed(options: dict[str, str]) -> str:
    """Return options as they are typed."""
    return " ".join(_typed(option, value) for option, value in options.items())


def launch(job: Job) -> str:
    """Return a script that launches a job; what is about data and the optimizer follows it on the command line."""
    nodes, each = max(1, job.cluster.num_gpus // 8), min(8, job.cluster.num_gpus)
    lines = [_typed(option, value) for option, value in settings(job).items()]
    one = job.tp * job.cp > 1 and job.sharding in ("none", "optimizer")
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            f"# {job.model.name} on {job.cluster.name}. Data, tokenizer and optimizer: arguments of this script.",
            *(["export CUDA_DEVICE_MAX_CONNECTIONS=1"] if one and not _overlapped(job) else []),
            "ARGS=(",
            *(f"    {line}" for line in lines),
            ")",
            f'torchrun --nnodes {nodes} --nproc-per-node {each} ${{RENDEZVOUS:-}} pretrain_gpt.py "${{ARGS[@]}}" "$@"',
            "",
        ]
    )


def read(text: str) -> Described | None:
    """Return the job that a log, a YAML with MODEL_ARGS, or a launch script describes; None if it is none of them."""
    if arguments.is_log(text):
        return described(arguments.from_log(text), resolved=True)
    table = parse_yaml(text) if "MODEL_ARGS" in text else None
    if table is not None and "MODEL_ARGS" in table:
        return described(arguments.from_model_args(table))
    if "--" not in text:
        return None
    given, skipped = arguments.from_script(text)
    if not {"num_layers", "tensor_model_parallel_size", "micro_batch_size", "hidden_size"} & given.keys():
        return None
    found = described(given)
    found.notes += [f"not read, as it depends on a condition: {line[:100]}" for line in skipped]
    return found


def graph_flags(job: Job) -> tuple[str, ...]:
    """Return the options of Megatron-LM for a job's CUDA graphs."""
    return tuple(_typed(option, value) for option, value in _graphs(job).items())


def _typed(option: str, value: str) -> str:
    words = value.split(" ") if option.endswith("-modules") else [value]
    return " ".join([option, *(shlex.quote(word) for word in words if word)])


def _runs(job: Job) -> bool:
    return any(trainer.startswith(TITLE) for trainer in family(job.schedule).trainers)


def _lacking(job: Job) -> str | None:
    """Return what Megatron-LM has no option for, or None."""
    modules = {*MODULES, "full"} | (set() if job.model.is_moe else {"mlp"})
    model = job.model
    if not _runs(job):
        return f"it runs 1f1b, interleaved and interleaved-overlap, got {job.schedule}; add --schedule interleaved"
    if wrong := [name for name in job.recompute if name not in modules]:
        return f"--recompute-modules has no {' and no '.join(wrong)}; recompute {', '.join(sorted(modules))}"
    if wrong := [name for name in job.offload if name not in OFFLOADED]:
        return f"--offload-modules has no {' and no '.join(wrong)}; offload {', '.join(OFFLOADED)}"
    if job.dispatch != Job.dispatch:
        return f"its dispatchers send tokens in bf16, got {job.dispatch}; leave --dispatch out"
    if model.attention_bias != model.mlp_bias:
        return "--disable-bias-linear is for attention and MLP alike"
    if model.num_windowed_layers and _window_frequency(model) is None:
        return (
            f"--window-attn-skip-freq gives no {model.num_windowed_layers} of {model.num_hidden_layers} layers a window"
        )
    return None


def _window_frequency(model: ModelShape) -> int | None:
    """Return n where each n-th layer has no window; 0 if all have one, None if no number fits."""
    full = model.num_hidden_layers - model.num_windowed_layers
    if not full:
        return 0
    found = model.num_hidden_layers // full
    return found if found > 1 and model.num_hidden_layers // found == full else None


def _model(job: Job) -> dict[str, str]:
    """Return the options of the model's sizes."""
    model = job.model
    found = {
        "--num-layers": str(model.num_hidden_layers),
        "--hidden-size": str(model.hidden_size),
        "--ffn-hidden-size": str(model.intermediate_size),
        "--num-attention-heads": str(model.num_attention_heads),
        "--kv-channels": str(model.head_dim),
        "--padded-vocab-size": str(model.vocab_size),
    }
    if model.num_key_value_heads != model.num_attention_heads:
        found |= {"--group-query-attention": "", "--num-query-groups": str(model.num_key_value_heads)}
    if model.is_mla:
        found["--multi-latent-attention"] = ""
        found |= {"--kv-lora-rank": str(model.kv_lora_rank)} | (
            {"--q-lora-rank": str(model.q_lora_rank)} if model.q_lora_rank else {}
        )
        found["--qk-head-dim"] = str(model.qk_nope_head_dim)
        found["--qk-pos-emb-head-dim"] = str(model.qk_rope_head_dim)
        found["--v-head-dim"] = str(model.v_head_dim)
    switches = {
        "--swiglu": model.gated_mlp,
        "--untie-embeddings-and-output-weights": not model.tie_word_embeddings,
        "--disable-bias-linear": not model.attention_bias,
        "--add-qkv-bias": model.qkv_bias,
        "--qk-layernorm": model.qk_norm,
    }
    found |= {name: "" for name, is_set in switches.items() if is_set}
    if model.max_position_embeddings:
        found["--position-embedding-type"] = "learned_absolute"
    else:
        found |= {"--position-embedding-type": "rope", "--normalization": "RMSNorm"}
    found["--max-position-embeddings"] = str(model.max_position_embeddings or job.seq_len)
    found |= {"--attention-dropout": "0.0", "--hidden-dropout": "0.0"}
    if model.num_windowed_layers:
        found["--window-size"] = f"{model.sliding_window - 1},0"
        found |= {"--window-attn-skip-freq": str(every)} if (every := _window_frequency(model)) else {}
    if model.num_nextn_predict_layers:
        found["--mtp-num-layers"] = str(model.num_nextn_predict_layers)
    return {**found, **_experts(model)}


def _experts(model: ModelShape) -> dict[str, str]:
    if not model.is_moe:
        return {}
    found = {
        "--num-experts": str(model.num_experts),
        "--moe-router-topk": str(model.num_experts_per_tok),
        "--moe-ffn-hidden-size": str(model.moe_intermediate_size),
        "--moe-grouped-gemm": "",
        "--moe-permute-fusion": "",
        "--moe-token-dispatcher-type": "alltoall",
    }
    if model.shared_width:
        found["--moe-shared-expert-intermediate-size"] = str(model.shared_width)
    if dense := model.first_k_dense_replace:
        found["--moe-layer-freq"] = f"([0]*{dense}+[1]*{model.num_hidden_layers - dense})"
    if model.n_group:
        found |= {"--moe-router-num-groups": str(model.n_group), "--moe-router-group-topk": str(model.topk_group)}
    return found


def _parallel(job: Job) -> dict[str, str]:
    found = {"--tensor-model-parallel-size": str(job.tp)}
    if job.tp > 1 and job.sequence_parallel:
        found["--sequence-parallel"] = ""
    if job.cp > 1:
        found["--context-parallel-size"] = str(job.cp)
    found["--pipeline-model-parallel-size"] = str(job.pp)
    if job.pp > 1:
        found |= _stages(job)
    if job.model.is_moe:  # Megatron-LM's default of the experts' TP is TP
        found |= {"--expert-model-parallel-size": str(job.ep), "--expert-tensor-parallel-size": str(job.etp)}
    if _overlapped(job):
        found["--overlap-moe-expert-parallel-comm"] = ""
    return found


def _stages(job: Job) -> dict[str, str]:
    """Return the option of virtual stages, or of the layout where stages are not even in layers."""
    stages, layers = job.num_stages, job.model.num_hidden_layers
    if job.layout is None or (layers % stages == 0 and job.layout == cut_evenly(job.model.blocks, stages)):
        return {"--num-virtual-stages-per-pipeline-rank": str(job.vpp)} if job.vpp > 1 else {}
    return {"--pipeline-model-parallel-layout": write_layout(job.layout)}


def _numbers(job: Job) -> dict[str, str]:
    """Return the options of batch, precision and the optimizer's states."""
    found = {
        "--micro-batch-size": str(job.micro_batch_size),
        "--global-batch-size": str(job.global_batch_size),
        "--seq-length": str(job.seq_len),
        "--bf16": "",
        **_LOW_PRECISION[job.precision],
    }
    if job.sharding != "none":
        found |= dict.fromkeys(("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"), "")
    if job.sharding in _FSDP:
        found |= {"--use-megatron-fsdp": "", "--data-parallel-sharding-strategy": _FSDP[job.sharding]}
        found["--ckpt-format"] = "fsdp_dtensor"
    if job.gradient_bytes == 2:
        found["--grad-reduce-in-bf16"] = ""
    if job.moment_bytes == 2:
        found |= {"--use-precision-aware-optimizer": "", "--exp-avg-dtype": "bf16", "--exp-avg-sq-dtype": "bf16"}
    return found


def _saving(job: Job) -> dict[str, str]:
    """Return the options of what is recomputed, offloaded, saved in FP8, and launched as graphs."""
    found = {"--activation-func-fp8-input-store": ""} if job.saved == "fp8" else {}
    if "full" in job.recompute:
        layers = job.recompute_layers
        found["--recompute-granularity"] = "full"
        found |= {"--recompute-method": "block" if layers else "uniform", "--recompute-num-layers": str(layers or 1)}
    elif job.recompute:
        found |= {"--recompute-granularity": "selective", "--recompute-modules": " ".join(job.recompute)}
    if job.offload:
        found |= {"--fine-grained-activation-offloading": "", "--offload-modules": " ".join(job.offload)}
    return {**found, **_graphs(job)}


def _graphs(job: Job) -> dict[str, str]:
    if job.cuda_graph == "partial":
        return {"--cuda-graph-impl": "transformer_engine", "--cuda-graph-modules": _PARTIAL[job.model.is_moe]}
    if job.cuda_graph == "whole":
        return {"--cuda-graph-impl": "full_iteration", "--no-check-for-nan-in-loss-and-grad": ""}
    return {}
