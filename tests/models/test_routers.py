"""Routers and shared experts against DeepSeek-V3 of transformers; the bias that follows the load."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import treadle
from tests.models.runs import rows_of
from tests.models.tiny import QWEN3_MOE, apart, tokens
from tests.support.devices import DEVICE_TYPE, device_of, drawn
from tests.support.ranks import check, run_ranks
from treadle.models import Documents, ModelConfig, build_stages, loss_fn, run_stage, update_bias
from treadle.models.decoder_layers import ExpertLayer

SIGMOID = replace(
    QWEN3_MOE,
    scoring="sigmoid",
    n_shared_experts=2,
    num_experts=8,
    num_experts_per_tok=3,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
    bias_update_rate=0.05,
)


def _layer(config: ModelConfig) -> ExpertLayer:
    layer = build_stages(config, (config.blocks,), {0: 0}, seed=8)[0][1]
    assert isinstance(layer, ExpertLayer)
    return layer


@pytest.mark.slow  # transformers takes seconds to import
@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_the_expert_part_of_a_layer_is_that_of_deepseek_v3(norm_topk_prob: bool) -> None:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    config = replace(SIGMOID, norm_topk_prob=norm_topk_prob)
    names = ("hidden_size", "moe_intermediate_size", "num_experts_per_tok", "n_group", "topk_group")
    sizes: dict[str, Any] = {name: getattr(config, name) for name in (*names, "n_shared_experts", "norm_topk_prob")}
    theirs = DeepseekV3MoE(DeepseekV3Config(n_routed_experts=8, routed_scaling_factor=2.5, **sizes)).float()
    layer = _layer(config)
    gate, experts, shared = layer.mlp.gate, layer.mlp.experts, layer.mlp.shared_experts
    assert shared is not None
    with torch.no_grad():
        gate.e_score_correction_bias.copy_(torch.linspace(-0.3, 0.4, 8))
        theirs.gate.weight.copy_(gate.score.weight)
        theirs.gate.e_score_correction_bias.copy_(gate.e_score_correction_bias)
        theirs.experts.gate_up_proj.copy_(experts.up.weight)
        theirs.experts.down_proj.copy_(experts.down.weight)
    theirs.shared_experts.load_state_dict(shared.state_dict())
    x = drawn(torch.randn, 2, 15, config.hidden_size, generator=torch.Generator().manual_seed(1))
    layer.input_layernorm, layer.post_attention_layernorm = nn.Identity(), nn.Identity()  # type: ignore[assignment]
    layer.mix = lambda x, positions, documents: x
    ours = layer(x, torch.arange(15).expand(2, -1)) - x
    expected = theirs(x)
    assert apart(ours, expected) <= 1e-6
    weights = torch.linspace(-1, 1, ours.numel()).reshape(ours.shape)
    pairs: list[tuple[Tensor, Tensor]] = [
        (gate.score.weight, theirs.gate.weight),
        (experts.up.weight, theirs.experts.gate_up_proj),
        (experts.down.weight, theirs.experts.down_proj),
        (shared.gate_proj.weight, theirs.shared_experts.gate_proj.weight),
    ]
    got = torch.autograd.grad((ours * weights).sum(), [own for own, _ in pairs])
    wanted = torch.autograd.grad((expected * weights).sum(), [other for _, other in pairs])
    assert all(apart(a, b) <= 1e-5 for a, b in zip(got, wanted, strict=True))


def test_choices_see_the_bias_and_gates_do_not() -> None:
    config = replace(SIGMOID, n_group=1, topk_group=1, norm_topk_prob=False, routed_scaling_factor=1.0)
    gate = _layer(config).mlp.gate
    x = drawn(torch.randn, 20, config.hidden_size, generator=torch.Generator().manual_seed(1))
    before, routing, _ = gate(x)
    scores = (x @ gate.score.weight.T).sigmoid()
    torch.testing.assert_close(before, scores.gather(1, routing.chosen))
    gate.e_score_correction_bias[5] = 10.0
    gates, routing, _ = gate(x)
    assert bool((routing.chosen == 5).any(1).all())
    torch.testing.assert_close(gates, scores.gather(1, routing.chosen))


def test_the_bias_moves_against_the_load_and_counts_begin_again() -> None:
    stages = build_stages(SIGMOID, (SIGMOID.blocks,), {0: 0})
    gates = [block.mlp.gate for block in stages[0] if isinstance(block, ExpertLayer)]
    run_stage(stages[0], tokens(4))
    with torch.no_grad():
        run_stage(stages[0], tokens(9))  # an evaluation does not count
    loads = [gate.tokens_per_expert.clone() for gate in gates]
    assert len(loads) == 4
    assert all(int(load.sum()) == 4 * 13 * 3 for load in loads)
    update_bias(stages, 0.05)
    for gate, load in zip(gates, loads, strict=True):
        mean = float(load.mean())
        expected = torch.tensor([0.05 if n < mean else -0.05 if n > mean else 0.0 for n in load.tolist()])
        torch.testing.assert_close(gate.e_score_correction_bias, expected)
        assert not gate.tokens_per_expert.any()


def test_updates_make_a_skewed_load_even() -> None:
    config = replace(SIGMOID, n_group=1, topk_group=1)
    gate = _layer(config).mlp.gate
    with torch.no_grad():
        gate.score.weight[0] += 0.5  # scores of expert 0 vary more than the others'
    stages = {0: nn.Sequential(layer := _layer(config))}
    layer.mlp.gate = gate
    x = drawn(torch.randn, 500, config.hidden_size, generator=torch.Generator().manual_seed(1)) + 0.3
    spreads = []
    for _ in range(60):
        _, routing, _ = gate(x)
        spreads.append(float(routing.counts.max() / routing.counts.float().mean()))
        update_bias(stages, 0.01)
    assert spreads[0] > 1.8
    assert max(spreads[-5:]) < 1.3


CASES = [("interleaved-overlap", 2, 1, 2, ("attn", "mlp")), ("dualpipe", 2, 2, 1, ()), ("1f1b", 4, 1, 1, ())]


def _train(rank: int) -> list[dict[int, Tensor]]:
    """Three steps with updates for each case; the biases of this rank's layers."""
    found = []
    for name, pp, dp, ep, recompute in CASES:
        mesh = init_device_mesh(DEVICE_TYPE, (pp, dp, ep), mesh_dim_names=("pp", "dp", "ep"))
        schedule = treadle.generate(name, pp=pp, microbatches=8 // (dp * ep))
        rows = rows_of(SIGMOID, schedule.placement.num_stages)
        at = dict(enumerate(schedule.placement.stages[mesh.get_local_rank("pp")]))
        stages = build_stages(SIGMOID, rows, at, ep=ep, ep_rank=mesh.get_local_rank("ep"), device=device_of(rank))
        pipe = treadle.Pipeline(stages, schedule, mesh=mesh, loss_fn=loss_fn, recompute=recompute)
        for step in range(3):
            batch = tokens(8, seed=step).chunk(dp * ep)[mesh.get_local_rank("dp") * ep + mesh.get_local_rank("ep")]
            inputs = batch[:, :-1]
            num = schedule.num_microbatches
            documents = Documents.of(torch.zeros_like(inputs, device="cpu"))
            side = {"documents": documents.split(num), "positions": documents.positions(inputs.device)}
            pipe.step(inputs, batch[:, 1:], side=side, num_tokens=8 * 12)
            pipe.evaluate(inputs, batch[:, 1:], side=side, num_tokens=8 * 12)
            update_bias(stages, SIGMOID.bias_update_rate, pipe.groups.reduce_group)
        pipe.close()
        found.append({number: bias for stage in stages.values() for number, bias in _biases(stage).items()})
    return found


def _biases(stage: nn.Sequential) -> dict[int, Tensor]:
    layers = [block for block in stage if isinstance(block, ExpertLayer)]
    return {layer.number: layer.mlp.gate.e_score_correction_bias for layer in layers}


@pytest.mark.slow
def test_ranks_move_biases_as_one_process_does() -> None:
    stages = build_stages(SIGMOID, (SIGMOID.blocks,), {0: 0})
    for step in range(3):
        for sample in tokens(8, seed=step):
            run_stage(stages[0], sample[:-1].unsqueeze(0))
        update_bias(stages, SIGMOID.bias_update_rate)
    expected = _biases(stages[0])
    assert len({float(value) for bias in expected.values() for value in bias}) > 2
    for of_rank in check(run_ranks(4, _train)):
        for case, biases in zip(CASES, of_rank, strict=True):
            assert biases
            for number, bias in biases.items():
                assert torch.equal(bias, expected[number]), (case, number)
