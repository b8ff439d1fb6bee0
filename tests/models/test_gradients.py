"""One step's gradients against transformers: every schedule, and layouts of 4 ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.models.runs import Batch, Layout, run_layouts
from tests.models.tiny import QWEN3_MOE, hf_gradients, saved, tokens
from tests.support.ranks import check, run_ranks
from treadle.models import IGNORED, ModelConfig
from treadle.schedules import SCHEDULES

pytestmark = pytest.mark.slow

DEEP = replace(QWEN3_MOE, num_hidden_layers=8)
OFFLOADED = {"saved": "offload", "recompute": ("attn", "mlp")}

EVERY_SCHEDULE = [
    Layout("1f1b", pp=4),
    Layout("zb-h1", pp=4),
    Layout("interleaved", pp=2, dp=2),
    Layout("v-half", pp=2, dp=2),
    Layout("dualpipev", pp=2, dp=2),
    Layout("interleaved-overlap", pp=2, ep=2, options=OFFLOADED),
    Layout("zb-v", pp=2, ep=2),
    Layout("v-min", pp=2, ep=2),
    Layout("dualpipe", pp=2, ep=2),
    Layout("1f1b", pp=1, ep=2, dp=2),
    Layout("gpipe", pp=1, ep=4),
]
"""Each schedule, and each way to lay four ranks out."""

DEEPER = [
    *(Layout(name, pp=4, microbatches=8) for name in SCHEDULES),
    Layout("interleaved-overlap", pp=2, ep=2, microbatches=8),
    Layout("interleaved-overlap", pp=2, ep=2, microbatches=8, options=OFFLOADED),
    Layout("dualpipev", pp=2, ep=2, microbatches=8),
    Layout("dualpipe", pp=2, dp=2, microbatches=8),
    Layout("zb-h1", pp=1, dp=4),
]


def _whole_batch() -> Batch:
    sequences = tokens(16)
    targets = sequences[:, 1:].clone()
    targets[3, 5:] = IGNORED
    inputs = sequences[:, :-1].contiguous()
    positions = torch.arange(inputs.shape[1]).expand_as(inputs).contiguous()
    return Batch(inputs, targets, torch.zeros_like(inputs), positions)


def _held_to_transformers(config: ModelConfig, layouts: list[Layout], directory: Path) -> None:
    model, batch = saved(config, directory), _whole_batch()
    logits = model(batch.inputs).logits
    loss = functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum") / batch.num_tokens
    loss.backward()  # type: ignore[no-untyped-call]
    expected = hf_gradients(model)
    norm = float(torch.nn.utils.get_total_norm(p.grad for p in model.parameters()))
    torch.save(expected, directory / "gradients.pt")
    found = check(run_ranks(4, run_layouts, layouts, config, directory, batch, directory / "gradients.pt"))
    for layout in map(str, layouts):
        for rank, of_rank in enumerate(found):
            got_loss, got_norm, difference, name = of_rank[layout]
            assert difference <= 1e-5, f"{layout}, rank {rank}: {name} is {difference} apart"
            assert got_loss == pytest.approx(float(loss.detach()), rel=1e-6), f"{layout}, rank {rank}"
            assert got_norm == pytest.approx(norm, rel=1e-5), f"{layout}, rank {rank}"


def test_every_schedule_has_the_gradients_of_transformers(tmp_path: Path) -> None:
    assert {layout.schedule for layout in EVERY_SCHEDULE} == set(SCHEDULES)
    _held_to_transformers(QWEN3_MOE, EVERY_SCHEDULE, tmp_path)


@pytest.mark.nightly
def test_deeper_pipelines_have_the_gradients_of_transformers(tmp_path: Path) -> None:
    _held_to_transformers(DEEP, DEEPER, tmp_path)


def test_a_dense_tied_model_has_the_gradients_of_transformers(tmp_path: Path) -> None:
    config = replace(QWEN3_MOE, num_experts=0, tie_word_embeddings=True)
    _held_to_transformers(
        config,
        [Layout("1f1b", pp=4), Layout("dualpipe", pp=4, microbatches=8), Layout("zb-v", pp=2, dp=2)],
        tmp_path,
    )


def test_a_sigmoid_router_and_a_shared_expert_have_the_gradients_of_transformers(tmp_path: Path) -> None:
    shared = {"n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5}
    config = replace(QWEN3_MOE, scoring="sigmoid", **shared)  # type: ignore[arg-type]
    layouts = [Layout("interleaved-overlap", pp=2, ep=2), Layout("interleaved-overlap", pp=2, ep=2, options=OFFLOADED)]
    _held_to_transformers(config, [*layouts, Layout("dualpipe", pp=2, dp=2)], tmp_path)


def test_gradients_tell_a_scaled_expert(tmp_path: Path) -> None:
    """What the tolerance above would not let pass, in one process."""
    model, batch = saved(QWEN3_MOE, tmp_path), _whole_batch()

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        model(batch.inputs).logits.logsumexp(-1).mean().backward()
        return {name: grad.clone() for name, grad in hf_gradients(model).items()}

    before = gradients()
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[1] *= 1.01
    after = gradients()
    assert max(float((after[n] - g).abs().max() / g.abs().max()) for n, g in before.items()) > 1e-3
