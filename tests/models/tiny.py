"""Tiny models of transformers with values that tell tensors apart, and the same models of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.devices import drawn
from treadle.models import ModelConfig, build_stages, load_pretrained

VOCAB = 61

QWEN3_MOE = ModelConfig(
    vocab_size=VOCAB, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    intermediate_size=48, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, router_aux_loss_coef=0.0,
    rope_theta=1000.0, initializer_range=0.1,
)  # fmt: skip


def hf_model(config: ModelConfig, seed: int = 0) -> Any:
    """A model of transformers in this shape; norms and biases have values too."""
    import transformers

    hf = config.to_hf()
    kind = getattr(transformers, hf["architectures"][0])
    model = kind(kind.config_class(**hf))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            mean = 1.0 if parameter.dim() == 1 else 0.0
            parameter.copy_(mean + 0.15 * drawn(torch.randn, parameter.shape, generator=generator))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * drawn(torch.randn, buffer.shape, generator=generator))
    return model.float().eval()


def saved(config: ModelConfig, directory: Path, **options: Any) -> Any:
    """Such a model, saved by transformers."""
    model = hf_model(config)
    model.save_pretrained(directory, **options)
    return model


def loaded(directory: Path) -> tuple[ModelConfig, nn.Sequential]:
    """What is there, as one stage of ours."""
    config = ModelConfig.from_hf(directory)
    stages = build_stages(config, (config.blocks,), {0: 0})
    load_pretrained(stages, directory)
    return config, stages[0]


def apart(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, as a part of the largest number."""
    return float((ours - theirs).detach().abs().max() / theirs.detach().abs().max())


def tokens(num: int, length: int = 12, seed: int = 0) -> Tensor:
    """Sequences of tokens, one more than `length` long."""
    generator = torch.Generator().manual_seed(1 + seed)
    return drawn(torch.randint, 0, VOCAB, (num, length + 1), generator=generator)


def hf_gradients(model: Any) -> dict[str, Tensor]:
    """The gradients of a model of transformers under the names of its files, where experts are apart."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if name.endswith("experts.gate_up_proj"):
            for expert, (gate, up) in enumerate(g.chunk(2) for g in grad):
                prefix = name.replace("gate_up_proj", str(expert))
                found |= {f"{prefix}.gate_proj.weight": gate, f"{prefix}.up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(grad):
                found[name.replace("down_proj", f"{expert}.down_proj.weight")] = down
        else:
            found[name] = grad
    return found
