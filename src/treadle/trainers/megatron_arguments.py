"""Megatron-LM's arguments, by the names that its log gives them, from the log, a launch script or MODEL_ARGS."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from treadle.trainers.launch_script import read_script

Arguments = dict[str, list[str]]
"""Values by name: `{"num_layers": ["32"], "bf16": ["True"]}`."""

_TURNED_OFF = {
    "disable_bias_linear": "add_bias_linear",
    "no_overlap_p2p_communication": "overlap_p2p_comm",
    "no_gradient_accumulation_fusion": "gradient_accumulation_fusion",
    "no_masked_softmax_fusion": "masked_softmax_fusion",
    "no_bias_gelu_fusion": "bias_gelu_fusion",
    "no_bias_swiglu_fusion": "bias_swiglu_fusion",
    "no_bias_dropout_fusion": "bias_dropout_fusion",
    "no_rope_fusion": "apply_rope_fusion",
    "no_position_embedding": "add_position_embedding",
    "no_persist_layer_norm": "persist_layer_norm",
    "no_fp8_wgrad": "fp8_wgrad",
}
"""Options that turn an argument off."""

_RENAMED = {
    "fp8_format": "fp8",
    "fp4_format": "fp4",
    "overlap_p2p_communication_warmup_flush": "overlap_p2p_comm_warmup_flush",
    "cuda_graph_scope": "cuda_graph_modules",
    "reset_attention_mask": "reset_attention_mask",
    "no_async_tensor_model_parallel_allreduce": "no_async_tensor_model_parallel_allreduce",
}
_LOG = re.compile(r"-+ arguments -+\n(.*?)-+ end of arguments", re.DOTALL)
_LINE = re.compile(r"^.*?(\w+) \.+ (.*)$", re.MULTILINE)


def is_log(text: str) -> bool:
    """Return True if a text has the block of arguments that Megatron-LM prints when it starts."""
    return _LOG.search(text) is not None


def from_log(text: str) -> Arguments:
    """Return the arguments of a log: all that there are, resolved."""
    block = _LOG.search(text)
    assert block is not None
    return {_renamed(name): _words(value.strip()) for name, value in _LINE.findall(block[1])}


def from_options(options: Mapping[str, list[str]]) -> Arguments:
    """Return the arguments of a command line."""
    found: Arguments = {}
    for option, values in options.items():
        name = option.lstrip("-").replace("-", "_")
        if name in _TURNED_OFF:
            found[_TURNED_OFF[name]] = ["False"]
        else:
            found[_renamed(name)] = [word for value in values for word in _words(value)] or ["True"]
    return found


def from_script(text: str) -> tuple[Arguments, tuple[str, ...]]:
    """Return the arguments of a launch script, and the lines of it that were not read."""
    script = read_script(text)
    return from_options(script.options), script.skipped


def from_model_args(table: Mapping[str, Any]) -> Arguments:
    """Return the arguments of a YAML with MODEL_ARGS: `--flag: value`; `--flag: true` has no value."""
    options = {str(name): _given(value) for name, value in (table["MODEL_ARGS"] or {}).items() if value is not False}
    return from_options(options)


def option_of(name: str) -> str:
    """Return the option that sets an argument."""
    off = next((option for option, argument in _TURNED_OFF.items() if argument == name), None)
    renamed = next((option for option, argument in _RENAMED.items() if argument == name), None)
    return "--" + (off or renamed or name).replace("_", "-")


def _given(value: Any) -> list[str]:
    return [] if value is True else [str(each) for each in value] if isinstance(value, list) else [str(value)]


def _renamed(name: str) -> str:
    return _RENAMED.get(name, name)


def _words(value: str) -> list[str]:
    """Return the values of a text: `['moe', 'mlp']` and `[moe mlp]` are lists, `([0]*3+[1]*12)` is not."""
    listed = re.fullmatch(r"\[([^\[\]]*)\]", value)
    if listed is None:
        return [value.replace("\\", "")]
    return [word for word in re.split(r"[\s,'\"]+", listed[1]) if word]
