"""What a pipeline sees of the layers: their segments, side values, and which weight gradients can run apart."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.models.tiny import QWEN3_MOE
from treadle.models import ModelConfig, build_stages
from treadle.models.decoder_layers import ExpertLayer
from treadle.models.on_meta import BalancedExchange
from treadle.runtime.model.segments import ORDER, Plan
from treadle.runtime.model.stage_blocks import blocks_of
from treadle.runtime.model.weight_grad import examine

SHARED = replace(QWEN3_MOE, scoring="sigmoid", n_shared_experts=1, router_aux_loss_coef=0.1)
DENSE = replace(QWEN3_MOE, num_experts=0)


@pytest.mark.parametrize(
    ("config", "names"),
    [(QWEN3_MOE, ORDER), (SHARED, ORDER), (DENSE, ("attn", "mlp"))],
    ids=["qwen3_moe", "dots1", "qwen3"],
)
def test_layers_name_their_segments_and_read_positions_and_documents(
    config: ModelConfig, names: tuple[str, ...]
) -> None:
    plan = Plan.of(build_stages(config, (config.blocks,), {0: 0})[0][1], "layer 0")  # type: ignore[arg-type]
    assert tuple(plan.segments) == names
    assert set(plan.side) == {"positions", "documents"}


def test_a_state_dict_has_the_names_that_it_is_loaded_by() -> None:
    """Those of earlier versions: a file of `torch.save(stage.state_dict())` has to load."""
    names = set(build_stages(replace(SHARED, num_experts=2), (SHARED.blocks,), {0: 0})[0][1].state_dict())
    norms = {"input_layernorm.weight", "post_attention_layernorm.weight"}
    attention = {f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")}
    router = {"mlp.gate.score.weight", "mlp.gate.e_score_correction_bias"}
    experts = {f"mlp.experts.{name}.{number}.weight" for name in ("up", "down") for number in range(2)}
    shared = {f"mlp.shared_experts.{name}_proj.weight" for name in ("gate", "up", "down")}
    assert names == norms | attention | router | experts | shared


def test_an_exchange_is_chosen_by_its_name_or_by_what_makes_it() -> None:
    stage = build_stages(QWEN3_MOE, (QWEN3_MOE.blocks,), {0: 0}, exchange=lambda num: BalancedExchange(num, 1))[0]
    assert all(isinstance(layer.exchange, BalancedExchange) for layer in stage if isinstance(layer, ExpertLayer))
    with pytest.raises(ValueError, match="one of all_to_all, deepep, got 'nvshmem'"):
        build_stages(QWEN3_MOE, (QWEN3_MOE.blocks,), {0: 0}, exchange="nvshmem")  # type: ignore[arg-type]


@pytest.mark.parametrize(("config", "num"), [(QWEN3_MOE, 7), (DENSE, 7)], ids=["qwen3_moe", "qwen3"])
def test_all_matrices_of_a_layer_get_their_gradients_in_the_weight_half(config: ModelConfig, num: int) -> None:
    """Of 11 parameters, 4 are norms."""
    split = examine(build_stages(config, (config.blocks,), {0: 0})[0][1])
    assert (split.num_deferred, split.num_params) == (num, 11)


def test_stages_have_the_letters_that_they_were_built_from() -> None:
    config = replace(QWEN3_MOE, first_k_dense_replace=1, num_nextn_predict_layers=1)
    rows = ("Edt", "tt", "mL")
    stages = build_stages(config, rows, {0: 0, 1: 1, 2: 2})
    assert tuple(blocks_of(stages[at], at, 3) for at in range(3)) == rows
