"""Configs: what is refused, and Hugging Face's own both ways."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.models.tiny import QWEN3_MOE
from treadle.models import ModelConfig, build_stages

SIGMOID = replace(QWEN3_MOE, scoring="sigmoid", num_experts=8, n_group=4, topk_group=2, n_shared_experts=1)
DENSE = ModelConfig(num_experts=0, tie_word_embeddings=True, eos_token_id=0)


@pytest.mark.parametrize("config", [QWEN3_MOE, SIGMOID, DENSE, replace(SIGMOID, num_nextn_predict_layers=2)], ids=str)
def test_a_config_survives_hugging_faces_form(config: ModelConfig, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    assert ModelConfig.from_hf(tmp_path) == ModelConfig.from_hf(config.to_hf()) == config


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_key_value_heads": 3}, "4 attention heads do not share 3 key-value heads evenly"),
        ({"head_dim": 7}, "head_dim is even"),
        ({"hidden_size": 0}, "hidden_size is at least 1, got 0"),
        ({"num_experts_per_tok": 5}, "a token goes to 1 to 4 of 4 experts"),
        ({"n_shared_experts": 1}, "n_shared_experts belongs to the sigmoid router, got 1 with scoring 'softmax'"),
        ({"bias_update_rate": 0.1}, "set scoring='sigmoid' or leave bias_update_rate at 0.0"),
        ({"scoring": "tanh"}, "scoring is softmax or sigmoid, got 'tanh'"),
        ({"scoring": "sigmoid", "n_group": 3}, "4 experts do not make 3 groups"),
        ({"scoring": "sigmoid", "n_group": 2, "topk_group": 3}, "topk_group is 1 to n_group"),
        ({"scoring": "sigmoid", "n_group": 2, "num_experts_per_tok": 3}, "1 of 2 groups have 2 experts, fewer than"),
        ({"num_experts": 0, "intermediate_size": 0}, "intermediate_size is at least 1 for dense layers"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        replace(QWEN3_MOE, **changes)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model_type": "llama"}, r"the model types are qwen3, qwen3_moe, dots1, got 'llama'; .*cut_causal_lm"),
        ({"attention_bias": True}, "attention_bias is False in these layers, got True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'silu' in these layers, got 'gelu'"),
        ({"use_sliding_window": True}, "sliding-window attention"),
        ({"decoder_sparse_step": 2}, "got decoder_sparse_step 2"),
        ({"mlp_only_layers": [3]}, r"dense layers are the first ones, got mlp_only_layers \[3\]"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rotary positions are the default ones"),
    ],
)
def test_configs_of_other_layers_are_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        ModelConfig.from_hf({**QWEN3_MOE.to_hf(), **changes})


def test_a_missing_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no config at"):
        ModelConfig.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json has a JSON object, got a list of 0"):
        ModelConfig.from_hf(tmp_path)


def test_defaults_are_those_of_transformers_where_a_config_leaves_them_out() -> None:
    """Qwen3-MoE's gates add up to 1 only if the config says so."""
    hf = {name: value for name, value in QWEN3_MOE.to_hf().items() if name not in ("norm_topk_prob", "head_dim")}
    config = ModelConfig.from_hf(hf)
    assert not config.norm_topk_prob
    assert config.head_dim == 8


@pytest.mark.parametrize(
    ("rows", "stages", "ep", "match"),
    [
        (("Ett", "tL"), {0: 0}, 1, r"the stages Ett\|tL are not this model; its blocks in order are EttttL"),
        (("Ett", "ttL"), {0: 2}, 1, "chunk 0 is to be stage 2; stages are 0 to 1"),
        (("Ett", "ttL"), {0: 1}, 3, "4 experts do not divide over 3 ranks"),
        (("tt", "EttL"), {0: 1}, 1, "the first block is E"),
    ],
)
def test_stages_that_are_not_the_model_are_refused(
    rows: tuple[str, ...], stages: dict[int, int], ep: int, match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        build_stages(QWEN3_MOE, rows, stages, ep=ep)


def test_mtp_blocks_on_two_stages_are_refused() -> None:
    config = replace(QWEN3_MOE, num_nextn_predict_layers=2)
    with pytest.raises(ValueError, match="all MTP blocks stand on one stage"):
        build_stages(config, ("Ettttm", "mL"), {0: 0})
