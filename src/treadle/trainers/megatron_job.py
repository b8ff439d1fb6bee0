"""A job from Megatron-LM's arguments."""

from __future__ import annotations

import re

from treadle.estimate.job import OFFLOADED
from treadle.ir.blocks import parse_layout
from treadle.schedules import default_schedule, known
from treadle.trainers.job_description import Described, Unread
from treadle.trainers.megatron_arguments import Arguments, option_of
from treadle.trainers.megatron_effects import effect_of, touches

MODULES = ("core_attn", "mla_up_proj", "layernorm", "moe_act", "moe", "shared_experts")
"""Recomputed modules that Megatron-LM has under the same names; `mlp` is that of dense layers."""

GPT2_VOCABULARY = 50_257
UNKNOWN_VOCABULARY = 131_072
"""Taken where a file names a tokenizer alone."""

_SHAPE = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "kv_channels": "head_dim",
    "mtp_num_layers": "num_nextn_predict_layers",
}
_EXPERTS = {
    "num_experts": "num_experts",
    "moe_router_num_groups": "n_group",
    "moe_router_group_topk": "topk_group",
    "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size",
}
_MLA = {
    "kv_lora_rank": ("kv_lora_rank", 512),
    "q_lora_rank": ("q_lora_rank", 0),
    "qk_head_dim": ("qk_nope_head_dim", 128),
    "qk_pos_emb_head_dim": ("qk_rope_head_dim", 64),
    "v_head_dim": ("v_head_dim", 128),
}
"""With Megatron-LM's defaults."""
_FLAGS = {
    "untie_embeddings_and_output_weights": ("tie_word_embeddings", False),
    "qk_layernorm": ("qk_norm", True),
    "add_qkv_bias": ("qkv_bias", True),
}
SIZES = {
    "tensor_model_parallel_size": "tp",
    "context_parallel_size": "cp",
    "pipeline_model_parallel_size": "pp",
    "expert_model_parallel_size": "ep",
    "micro_batch_size": "micro_batch_size",
    "global_batch_size": "global_batch_size",
    "seq_length": "seq_len",
}
_OVERLAP = "overlap_moe_expert_parallel_comm"
_OTHER_MODELS = ("encoder_num_layers", "hybrid_layer_pattern", "hybrid_override_pattern", "mamba_state_dim")
_OVERLAPPED = next(each.name for each in known().values() if any(_OVERLAP in trainer for trainer in each.trainers))
_FSDP = {"no_shard": "none", "optim": "optimizer", "optim_grads": "gradients", "optim_grads_params": "parameters"}


class _Values:
    """Arguments by name; it keeps which were asked for."""

    def __init__(self, arguments: Arguments) -> None:
        self.arguments = arguments
        self.asked: set[str] = set()

    def text(self, name: str) -> str | None:
        """Return the value of an argument, or None if it is not set."""
        self.asked.add(name)
        words = self.arguments.get(name, [])
        return None if not words or words[0] in ("None", "null") else words[0]

    def words(self, name: str) -> tuple[str, ...]:
        """Return the values of an argument."""
        return () if self.text(name) is None else tuple(self.arguments[name])

    def number(self, name: str) -> int | None:
        """Return a whole number, or None if the argument is not set."""
        text = self.text(name)
        if text is None:
            return None
        if re.fullmatch(r"-?[0-9]+", text) is None:
            unset = re.search(r"\$\{?(\w+)", text)
            wayout = f"; write {unset[1]}=... into the script" if unset is not None else ""
            raise ValueError(f"Megatron-LM: {option_of(name)} takes a whole number, got {text!r}{wayout}")
        return int(text)

    def on(self, name: str, default: bool = False) -> bool:
        """Return a flag."""
        text = self.text(name)
        return default if text is None else text not in ("False", "false")


def described(arguments: Arguments, *, resolved: bool = False) -> Described:
    """Return the job that arguments describe.

    Args:
        arguments: by name.
        resolved: all arguments that there are, as in a log: those at values that are nobody's choice are not reported.

    Raises:
        ValueError: the model is no GPT, or a size has no value.

    """
    values = _Values(arguments)
    found = Described()
    for name in _OTHER_MODELS:
        if values.text(name) is not None and not (resolved and name == "encoder_num_layers"):
            raise ValueError(
                f"Megatron-LM: {option_of(name)} makes a model that is no GPT, got {values.text(name)}; estimated are "
                "decoders of attention and MLP or experts (pretrain_gpt.py)"
            )
    _shape(values, found)
    _sizes(values, found)
    _stages(values, found)
    _precision(values, found)
    _recompute(values, found)
    _offload(values, found)
    _sharding(values, found)
    _graphs(values, found)
    found.num_read = sum(name in arguments for name in values.asked) - sum(
        each.setting.startswith("--") for each in found.unread
    )
    for name, words in arguments.items():
        if name in values.asked:
            continue
        effect = effect_of(name, words)
        if effect and not (resolved and effect == "unknown"):
            found.unread.append(Unread(option_of(name), " ".join(words), effect))
        elif touches(name) and not (resolved and effect == "unknown"):
            found.num_read += 1
    return found


def _shape(values: _Values, found: Described) -> None:
    shape = found.shape
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        if values.number(name) is None:
            raise ValueError(
                f"Megatron-LM: {option_of(name)} is missing; give the model with --model (a preset, or config.json), "
                "or the log of a run, which has all arguments"
            )
    shape |= {field: number for name, field in _SHAPE.items() if (number := values.number(name)) is not None}
    shape |= {field: is_set for name, (field, is_set) in _FLAGS.items() if values.on(name)}
    shape.setdefault("tie_word_embeddings", True)
    shape["gated_mlp"] = values.on("swiglu") or values.on("quick_geglu")
    hidden = shape["hidden_size"]
    width = values.number("ffn_hidden_size") or (
        int(4 * hidden * 2 / 3 / 64) * 64 if values.on("swiglu") else 4 * hidden
    )
    shape["intermediate_size"] = width
    if values.on("group_query_attention"):
        shape["num_key_value_heads"] = values.number("num_query_groups") or 1
    elif "num_query_groups" in values.arguments:
        values.asked.add("num_query_groups")  # read with --group-query-attention only
    if values.on("add_bias_linear", default=True):
        shape |= {"attention_bias": True, "mlp_bias": True}
    if values.on("multi_latent_attention"):
        shape |= {field: values.number(name) or default for name, (field, default) in _MLA.items()}
    _experts(values, found)
    _window(values, found)
    _vocabulary(values, found)


def _experts(values: _Values, found: Described) -> None:
    if not values.number("num_experts"):
        return
    shape = found.shape
    shape |= {field: number for name, field in _EXPERTS.items() if (number := values.number(name))}
    shape["num_experts_per_tok"] = values.number("moe_router_topk") or 2
    width = shape["moe_intermediate_size"] = values.number("moe_ffn_hidden_size") or shape["intermediate_size"]
    if shape.get("shared_expert_intermediate_size", 1) % width == 0:
        shape["n_shared_experts"] = shape.pop("shared_expert_intermediate_size") // width
    frequency = values.text("moe_layer_freq") or "1"
    pattern = _pattern(frequency, shape["num_hidden_layers"])
    dense = pattern.count(0)
    shape["first_k_dense_replace"] = dense
    if dense and any(pattern[:dense]):
        found.notes.append(
            f"--moe-layer-freq {frequency}: {dense} of the layers are dense; the estimate puts them first, Megatron-LM "
            "between the others"
        )


def _pattern(text: str, num_layers: int) -> list[int]:
    """Return 1 for each layer with experts, 0 for each without: `2`, `([0]*3+[1]*12)`, `[0,1]*8`."""
    if text.isdecimal():
        return [int(layer % int(text) == 0) for layer in range(num_layers)]
    pattern: list[int] = []
    for group, times in re.findall(r"\[([01,\s]*)\](?:\*([0-9]+))?", text.replace(" ", "")):
        pattern += [int(digit) for digit in group.split(",") if digit] * int(times or 1)
    if len(pattern) != num_layers:
        raise ValueError(f"Megatron-LM: --moe-layer-freq {text} is for {len(pattern)} layers, of {num_layers}")
    return pattern


def _window(values: _Values, found: Described) -> None:
    size = values.text("window_size")
    if size is None or (width := re.search(r"[0-9]+", size)) is None:
        return
    layers, skipped = found.shape["num_hidden_layers"], values.text("window_attn_skip_freq")
    every = int(skipped) if skipped is not None and skipped.isdecimal() else 0
    found.shape |= {
        "sliding_window": int(width[0]) + 1,
        "num_windowed_layers": layers - (layers // every if every else 0),
    }


def _vocabulary(values: _Values, found: Described) -> None:
    shape, learned = found.shape, values.text("position_embedding_type") in (None, "learned_absolute")
    if (
        learned
        and values.on("add_position_embedding", default=True)
        and not values.on("use_rotary_position_embeddings")
    ):
        shape["max_position_embeddings"] = values.number("max_position_embeddings") or 0
    size, padded = values.number("vocab_size"), values.number("padded_vocab_size")
    unit = (values.number("make_vocab_size_divisible_by") or 128) * (values.number("tensor_model_parallel_size") or 1)
    if padded is None and size is None:
        kind = values.text("tokenizer_type") or "GPT2BPETokenizer"
        size = GPT2_VOCABULARY if kind == "GPT2BPETokenizer" else UNKNOWN_VOCABULARY
        if kind != "GPT2BPETokenizer":
            found.notes.append(
                f"the size of the vocabulary ({kind}) is not in the file; taken as {size:,}: add --vocab-size, or read "
                "the log, which has padded_vocab_size"
            )
    shape["vocab_size"] = padded or -(-(size or 0) // unit) * unit


def _sizes(values: _Values, found: Described) -> None:
    job = found.job
    job |= {field: number for name, field in SIZES.items() if (number := values.number(name)) is not None}
    if "num_experts" in found.shape:
        job["etp"] = values.number("expert_tensor_parallel_size") or job.get("tp", 1)
    else:
        values.asked.add("expert_tensor_parallel_size")
        job.pop("ep", None)
    parallel = values.on("sequence_parallel")
    job["sequence_parallel"] = parallel or job.get("tp", 1) == 1
    if values.text("rampup_batch_size") is not None:
        found.notes.append("--rampup-batch-size: the step is that of the full batch")


def _stages(values: _Values, found: Described) -> None:
    """Read the schedule and the layers of each stage."""
    job, pp, layers = found.job, found.job.get("pp", 1), found.shape["num_hidden_layers"]
    vpp = values.number("num_virtual_stages_per_pipeline_rank") or values.number("virtual_pipeline_model_parallel_size")
    each = values.number("num_layers_per_virtual_pipeline_stage")
    if each and not vpp:
        if layers % (pp * each):
            raise ValueError(
                f"Megatron-LM: the layers of a pipeline rank ({layers} / {pp}) are not divisible by "
                f"--num-layers-per-virtual-pipeline-stage ({each})"
            )
        vpp = layers // pp // each
    written = values.text("pipeline_model_parallel_layout")
    if written is not None:
        job["layout"] = parse_layout("".join(values.words("pipeline_model_parallel_layout")))
        if len(job["layout"]) % pp:
            raise ValueError(
                f"Megatron-LM: --pipeline-model-parallel-layout has {len(job['layout'])} stages, not divisible by "
                f"--pipeline-model-parallel-size ({pp})"
            )
        vpp = len(job["layout"]) // pp
    elif (counts := _uneven(values, layers, pp, vpp or 1)) is not None:
        job["layout"] = _written_out(counts, found.shape.get("num_nextn_predict_layers", 0))
    job["vpp"] = (vpp or 1) if pp > 1 else 1
    if pp == 1:
        job.pop("layout", None)
    overlapped = values.on(_OVERLAP)
    job["schedule"] = _OVERLAPPED if overlapped else default_schedule(job["vpp"])
    group = values.number("microbatch_group_size_per_virtual_pipeline_stage")
    if group not in (None, pp):
        found.unread.append(Unread("--microbatch-group-size-per-virtual-pipeline-stage", str(group), "step and memory"))


def _uneven(values: _Values, layers: int, pp: int, vpp: int) -> list[int] | None:
    """Return the layers of each stage where the first or the last rank has others than the rest."""
    first, last = values.number("decoder_first_pipeline_num_layers"), values.number("decoder_last_pipeline_num_layers")
    embedding = values.on("account_for_embedding_in_pipeline_split")
    loss = values.on("account_for_loss_in_pipeline_split")
    if first is None and last is None and not embedding and not loss:
        return None
    if first is not None or last is not None:
        rest = layers - (first or 0) - (last or 0)
        ranks = pp - (first is not None) - (last is not None)
        if ranks < 1 or rest % (ranks * vpp) or (first or 0) % vpp or (last or 0) % vpp:
            raise ValueError(
                f"Megatron-LM: the {rest} layers without those of --decoder-first-pipeline-num-layers and "
                f"--decoder-last-pipeline-num-layers are not divisible by {ranks} ranks of {vpp} virtual stages"
            )
        row = [*([first // vpp] if first is not None else []), *[rest // (ranks * vpp)] * ranks]
        row += [last // vpp] if last is not None else []
        return row * vpp
    if (layers + embedding + loss) % (pp * vpp):
        raise ValueError(
            f"Megatron-LM: {layers} layers, with embedding and loss as layers {layers + embedding + loss}, are not "
            f"divisible by --pipeline-model-parallel-size x virtual stages ({pp} x {vpp})"
        )
    counts = [(layers + embedding + loss) // (pp * vpp)] * (pp * vpp)
    counts[0] -= embedding
    counts[-1] -= loss
    return counts


def _written_out(counts: list[int], num_mtp: int) -> tuple[str, ...]:
    rows = ["t" * count for count in counts]
    rows[0] = "E" + rows[0]
    rows[-1] += "m" * num_mtp + "L"
    return tuple(rows)


def _precision(values: _Values, found: Described) -> None:
    recipe = values.text("fp8_recipe")
    if values.text("fp4") is not None:
        values.asked.add("fp4_recipe")
        found.job["precision"] = "nvfp4"
    elif values.text("fp8") is not None:
        found.job["precision"] = "mxfp8" if recipe == "mxfp8" else "fp8"
    elif not values.on("bf16") and not values.on("fp16"):
        found.notes.append("neither --bf16 nor --fp16: Megatron-LM computes in FP32; the estimate is for BF16")
    values.asked |= {"bf16", "fp16"}
    if values.on("grad_reduce_in_bf16"):
        found.job["gradient_bytes"] = 2
    values.asked.add("accumulate_allreduce_grads_in_fp32")
    moments = values.text("exp_avg_dtype"), values.text("exp_avg_sq_dtype")
    if values.on("use_precision_aware_optimizer") and all(each in ("bf16", "torch.bfloat16") for each in moments):
        found.job["moment_bytes"] = 2
    if values.on("activation_func_fp8_input_store"):
        found.job["saved"] = "fp8"


def _recompute(values: _Values, found: Described) -> None:
    granularity, method = values.text("recompute_granularity"), values.text("recompute_method")
    layers, modules = values.number("recompute_num_layers"), values.words("recompute_modules")
    if granularity is None and (values.on("recompute_activations")):
        granularity = "selective"
    if granularity == "full":
        found.job["recompute"] = ("full",)
        if method == "block":
            found.job["recompute_layers"] = layers or 0
        elif (layers or 1) > 1:
            found.unread.append(Unread("--recompute-num-layers", str(layers), "memory"))
    elif granularity == "selective":
        known = {*MODULES, *(() if "num_experts" in found.shape else ("mlp",))}
        found.job["recompute"] = tuple(name for name in modules or ("core_attn",) if name in known)
        unknown = [name for name in modules if name not in known]
        if unknown:
            found.unread.append(Unread("--recompute-modules", " ".join(unknown), "step and memory"))


def _offload(values: _Values, found: Described) -> None:
    modules = values.words("offload_modules")
    if not values.on("fine_grained_activation_offloading"):
        return
    found.job["offload"] = tuple(name for name in modules if name in OFFLOADED)
    if unknown := [name for name in modules if name not in OFFLOADED]:
        found.unread.append(Unread("--offload-modules", " ".join(unknown), "step and memory"))


def _sharding(values: _Values, found: Described) -> None:
    strategy = values.text("data_parallel_sharding_strategy")
    values.asked.add("use_distributed_optimizer")
    if values.on("use_torch_fsdp2"):
        found.job["sharding"] = "parameters"
    elif values.on("use_megatron_fsdp"):
        found.job["sharding"] = _FSDP.get(strategy or "optim_grads_params", "parameters")
    else:
        found.job["sharding"] = "optimizer" if values.on("use_distributed_optimizer") else "none"


def _graphs(values: _Values, found: Described) -> None:
    """Read CUDA graphs. Of parts of layers the estimate knows one set, attention and routing or the MLP."""
    old = (
        "local" if values.on("enable_cuda_graph") else "transformer_engine" if values.on("external_cuda_graph") else ""
    )
    implementation = values.text("cuda_graph_impl") or old or "none"
    modules = values.words("cuda_graph_modules")
    if implementation == "full_iteration" or "full_iteration" in modules:
        found.job["cuda_graph"] = "whole"
    elif implementation != "none":
        found.job["cuda_graph"] = "partial"
