"""Megatron-Bridge: a ConfigContainer as YAML (`run_config.yaml`), read and written by Megatron-LM's arguments.

Its entries are Megatron-core's: `model.tensor_model_parallel_size`. Those of another name or place are in a table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from treadle.estimate import Job
from treadle.trainers import megatron
from treadle.trainers.job_description import Described, Unread
from treadle.trainers.megatron_arguments import Arguments, from_options, option_of
from treadle.trainers.megatron_job import described
from treadle.trainers.yaml_text import dotted, nested, parse_yaml, write_yaml

TITLE = "Megatron-Bridge"
_ENTRIES = {
    "num_experts": "model.num_moe_experts",
    "swiglu": "model.gated_linear_unit",
    "padded_vocab_size": "model.vocab_size",
    "micro_batch_size": "train.micro_batch_size",
    "global_batch_size": "train.global_batch_size",
    "num_virtual_stages_per_pipeline_rank": "model.virtual_pipeline_model_parallel_size",
    "decoder_first_pipeline_num_layers": "model.num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "model.num_layers_in_last_pipeline_stage",
    "microbatch_group_size_per_virtual_pipeline_stage": "model.microbatch_group_size_per_vp_stage",
    "overlap_moe_expert_parallel_comm": "comm_overlap.overlap_moe_expert_parallel_comm",
    "delay_wgrad_compute": "comm_overlap.delay_wgrad_compute",
    "tp_comm_overlap": "comm_overlap.tp_comm_overlap",
    "cuda_graph_modules": "model.cuda_graph_modules",
    "untie_embeddings_and_output_weights": "model.share_embeddings_and_output_weights",
    "use_distributed_optimizer": "ddp.use_distributed_optimizer",
    "overlap_grad_reduce": "ddp.overlap_grad_reduce",
    "overlap_param_gather": "ddp.overlap_param_gather",
    "use_megatron_fsdp": "ddp.use_megatron_fsdp",
    "data_parallel_sharding_strategy": "ddp.data_parallel_sharding_strategy",
    "grad_reduce_in_bf16": "ddp.grad_reduce_in_fp32",
    "use_precision_aware_optimizer": "optimizer.use_precision_aware_optimizer",
    "exp_avg_dtype": "optimizer.exp_avg_dtype",
    "exp_avg_sq_dtype": "optimizer.exp_avg_sq_dtype",
    "ckpt_format": "checkpoint.ckpt_format",
    "no_check_for_nan_in_loss_and_grad": "rerun_state_machine.check_for_nan_in_loss",
}
"""Arguments whose entries are not in `model` under their own name."""

_REVERSED = ("untie_embeddings_and_output_weights", "grad_reduce_in_bf16", "no_check_for_nan_in_loss_and_grad")
_MIXED = {
    "bf16": "bf16_mixed",
    "fp8": "bf16_with_fp8_current_scaling_mixed",
    "mxfp8": "bf16_with_mxfp8_mixed",
    "nvfp4": "bf16_with_nvfp4_mixed",
}
_PRECISION_OPTIONS = ("--bf16", "--fp8-format", "--fp8-recipe", "--fp4-format", "--fp4-recipe")
_KEPT_OUT = ("--group-query-attention", "--attention-dropout", "--hidden-dropout")
_LISTS = ("recompute_modules", "offload_modules", "cuda_graph_modules")
_SECTIONS = ("model", "train", "ddp", "comm_overlap", "optimizer")
_BACK = {entry: name for name, entry in _ENTRIES.items()}
_SAME = {"model.cuda_graph_scope": "cuda_graph_modules", "optimizer.optimizer": "optimizer"}


def entry_of(option: str) -> str:
    """Return the entry of an option of Megatron-LM."""
    name = next((each for each in (*_ENTRIES, "add_bias_linear") if option_of(each) == option), None)
    name = name or option.lstrip("-").replace("-", "_")
    return _ENTRIES.get(name, f"model.{name}")


NAMES = {name: entry_of(option) for name, option in megatron.NAMES.items()}


def settings(job: Job) -> dict[str, str]:
    """Return the entries of a job by their dotted names, as text.

    Raises:
        ValueError: Megatron-core has no counterpart of the job, or refuses it.

    """
    return {name: _text(value) for name, value in _entries(job).items()}


def launch(job: Job) -> str:
    """Return the YAML of a job, for `--config-file` of a recipe's script or `ConfigContainer.from_yaml`."""
    head = f"# {job.model.name} on {job.cluster.name}, for Megatron-Bridge. Data and optimizer are the recipe's.\n"
    return head + write_yaml(nested(_entries(job)))


def read(text: str) -> Described | None:
    """Return the job that a run_config.yaml describes, or None if the text is none."""
    table = parse_yaml(text) if re.search(r"^(model|train|ddp):", text, re.MULTILINE) else None
    if table is None or not isinstance(table.get("model"), dict) or "distributed" in table or "train" not in table:
        return None
    entries = dotted(table)
    options = _arguments(entries)
    found = described(options, resolved=True)
    found.unread = [_renamed(each) for each in found.unread]
    name = str(table["model"].get("hf_model_id") or table["model"].get("name") or "")
    found.model = name.rpartition("/")[2].lower()
    return found


def _arguments(entries: Mapping[str, Any]) -> Arguments:
    """Return Megatron-LM's arguments for entries."""
    options: Arguments = {}
    for entry, value in entries.items():
        name = _BACK.get(entry) or _SAME.get(entry)
        section, _, last = entry.partition(".")
        if name is None and (section not in _SECTIONS or "." in last or last in _BACK.values()):
            continue
        words = [str(each) for each in value] if isinstance(value, list) else [str(value)]
        if name in _REVERSED:
            words = [str(not value)]
        if value is not None:
            options[name or last] = words
    options |= {"group_query_attention": ["True"]} if options.get("num_query_groups") else {}
    options |= _layout(entries.get("model.pipeline_model_parallel_layout"))
    return {**options, **_precision(entries)}


def _layout(value: Any) -> Arguments:
    """Return the layout of a list of stages, each a list of its blocks, as Megatron-LM's string."""
    if not isinstance(value, list):
        return {}
    letters = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
    rows = ["".join(letters.get(str(block), "?") for block in stage) for stage in value]
    return {"pipeline_model_parallel_layout": ["|".join(rows)]}


def _precision(entries: Mapping[str, Any]) -> Arguments:
    """Return precision from the name of a mixed precision, or from its entries."""
    mixed = entries.get("mixed_precision")
    if isinstance(mixed, str):
        name = mixed.replace("-", "_")
        if "mxfp8" in name:
            return from_options({"--bf16": [], "--fp8-format": ["e4m3"], "--fp8-recipe": ["mxfp8"]})
        if "nvfp4" in name:
            return from_options({"--bf16": [], "--fp4-format": ["e2m1"]})
        kind = {"--fp8-format": ["hybrid"], "--fp8-recipe": ["tensorwise"]} if "fp8" in name else {}
        return from_options({"--bf16": [], **kind})
    given = {name: entries.get(f"mixed_precision.{name}", entries.get(f"model.{name}")) for name in _PRECISIONS}
    found = {name: [str(value)] for name, value in given.items() if value not in (None, False)}
    if entries.get("mixed_precision.grad_reduce_in_fp32", True) is False:
        found["grad_reduce_in_bf16"] = ["True"]
    return found


_PRECISIONS = ("bf16", "fp16", "fp8", "fp8_recipe", "fp4")


def _entries(job: Job) -> dict[str, Any]:
    """Return the entries of a job with their values as YAML has them."""
    found: dict[str, Any] = {}
    for option, value in megatron.settings(job).items():
        if option in (*_PRECISION_OPTIONS, *_KEPT_OUT):
            continue
        entry = entry_of(option)
        name = _BACK.get(entry, entry.rpartition(".")[2])
        if name in _LISTS:
            found[entry] = value.split()
        elif not value:
            found[entry] = name not in (*_REVERSED, "disable_bias_linear", "add_bias_linear")
        else:
            found[entry] = int(value) if value.isdecimal() else value
    found["model.add_bias_linear"] = job.model.attention_bias
    found.pop("model.disable_bias_linear", None)
    found.setdefault("model.share_embeddings_and_output_weights", True)
    found["mixed_precision"] = _MIXED[job.precision]
    return found


def _text(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _renamed(each: Unread) -> Unread:
    """Return a setting by the name of its entry."""
    return each._replace(setting=entry_of(each.setting)) if each.setting.startswith("--") else each
