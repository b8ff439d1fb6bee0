"""Logits of whole models: ours from what transformers saved, transformers' from what we saved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.tiny import QWEN3_MOE, apart, hf_model, loaded, saved, tokens
from treadle.models import Documents, ModelConfig, build_stages, load_pretrained, run_stage, save_pretrained

pytestmark = pytest.mark.slow  # transformers takes seconds to import

CONFIGS = {
    "qwen3_moe": QWEN3_MOE,
    "qwen3_moe, dense first, gates not normalised": replace(QWEN3_MOE, first_k_dense_replace=1, norm_topk_prob=False),
    "qwen3": replace(QWEN3_MOE, num_experts=0),
    "qwen3, tied": replace(QWEN3_MOE, num_experts=0, tie_word_embeddings=True),
    "dots1": replace(
        QWEN3_MOE, scoring="sigmoid", n_shared_experts=2, first_k_dense_replace=1, routed_scaling_factor=2.5
    ),
    "dots1, groups": replace(
        QWEN3_MOE, scoring="sigmoid", n_shared_experts=1, num_experts=8, n_group=4, topk_group=2, num_experts_per_tok=3
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_that_transformers_saved_gives_its_logits(name: str, tmp_path: Path) -> None:
    model = saved(CONFIGS[name], tmp_path)
    config, ours = loaded(tmp_path)
    assert config.to_hf() == CONFIGS[name].to_hf()
    batch = tokens(3)
    with torch.no_grad():
        assert apart(run_stage(ours, batch), model(batch).logits) <= 1e-6


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_loads_what_is_saved_and_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    import transformers

    config = CONFIGS[name]
    stages = build_stages(config, (config.blocks,), {0: 0}, seed=3)
    save_pretrained(stages, config, tmp_path, max_shard_bytes=20_000)
    made: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    model, info = made
    assert not any(info.values()), info
    batch = tokens(3)
    with torch.no_grad():
        assert apart(run_stage(stages[0], batch), model(batch).logits) <= 1e-6


def test_packed_documents_give_the_logits_of_transformers(tmp_path: Path) -> None:
    """transformers finds the documents by positions that begin again."""
    model = saved(QWEN3_MOE, tmp_path)
    _, ours = loaded(tmp_path)
    batch = tokens(2)[:, :-1]
    documents = Documents.of(torch.tensor([[0] * 5 + [1] * 7, [4] * 1 + [5] * 3 + [2] * 8]))
    with torch.no_grad():
        theirs = model(batch, position_ids=documents.positions(batch.device), use_cache=False).logits
        assert apart(run_stage(ours, batch, documents=documents), theirs) <= 1e-6
        assert apart(run_stage(ours, batch), theirs) > 1e-2


def test_bfloat16_is_saved_as_such_and_a_routers_bias_in_float32(tmp_path: Path) -> None:
    import transformers
    from safetensors import safe_open

    config = CONFIGS["dots1"]
    stages = build_stages(config, (config.blocks,), {0: 0}, dtype=torch.bfloat16)
    save_pretrained(stages, config, tmp_path)
    (file,) = tmp_path.glob("model-*.safetensors")
    with safe_open(file, framework="pt") as tensors:
        dtypes = {name: tensors.get_tensor(name).dtype for name in tensors.keys()}  # noqa: SIM118
    biases = {name for name, dtype in dtypes.items() if dtype is torch.float32}
    assert biases == {f"model.layers.{n}.mlp.gate.e_score_correction_bias" for n in (1, 2, 3)}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    batch = tokens(3)
    with torch.no_grad():
        ours, theirs = run_stage(stages[0], batch).float(), model(batch).logits.float()
    assert apart(ours, theirs) <= 0.03


def test_a_wrong_expert_changes_the_logits(tmp_path: Path) -> None:
    """The tolerance above can tell one scaled expert."""
    model = saved(QWEN3_MOE, tmp_path)
    with torch.no_grad():
        model.model.layers[2].mlp.experts.down_proj[1] *= 1.01
        batch = tokens(3)
        _, ours = loaded(tmp_path)
        assert apart(run_stage(ours, batch), model(batch).logits) > 1e-4


def test_a_config_that_transformers_made_is_read(tmp_path: Path) -> None:
    hf_model(QWEN3_MOE).config.save_pretrained(tmp_path)
    assert ModelConfig.from_hf(tmp_path) == QWEN3_MOE
    assert ModelConfig.from_hf(tmp_path / "config.json") == QWEN3_MOE


def test_loading_converts_to_the_type_of_the_parameters(tmp_path: Path) -> None:
    model = saved(QWEN3_MOE, tmp_path)
    stages = build_stages(QWEN3_MOE, (QWEN3_MOE.blocks,), {0: 0}, dtype=torch.bfloat16)
    load_pretrained(stages, tmp_path)
    embedding = dict(stages[0].named_parameters())["0.embed_tokens.weight"]
    assert torch.equal(embedding, model.model.embed_tokens.weight.bfloat16())
