"""Cuts a causal model of transformers into stages, whatever its architecture, without changing it.

A stage is the model with the layers of other stages left out: it runs the model's own `forward`, so masks, rotary
tables, scales and soft caps are the model's. Layers before the stage's own are replaced by what came from the stage
before, and a stage that is not the last ends at the first layer that is not its own. Modules are shared with the model,
nothing is copied: gradients appear in the model's own parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from treadle.ir.blocks import LAYERS
from treadle.models.cut_plan import TOLERANCE, CutPlan, apart, evaluating, probe_tokens, shared_names


def cut_causal_lm(
    model: nn.Module, layers: Sequence[int] | Sequence[str], stages: Mapping[int, int]
) -> dict[int, nn.Module]:
    """Cut a causal model of transformers whose layers are a list into stages for a Pipeline, at cell granularity.

    The cut is tried once: the stages, one after the other, must give the model's own logits for a few tokens. Models on
    the meta device are not tried.

    Args:
        model: a `...ForCausalLM`; its parameters become those of the stages.
        layers: for each stage its number of layers, or its block letters, of which t and d are layers.
        stages: for each of this rank's chunks the number of its stage.

    Returns:
        For each chunk its module. Keep no other reference to the model: what no stage holds is then freed.

    Raises:
        ValueError: the model cannot be cut so; the message names the reason.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM  # doctest: +SKIP
        >>> model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=4))  # doctest: +SKIP
        >>> stages = cut_causal_lm(model, [2, 2], {0: 1})  # doctest: +SKIP

    """
    counts = [row if isinstance(row, int) else sum(map(row.count, LAYERS)) for row in layers]
    plan = CutPlan.of(model)
    if min(counts, default=-1) < 0 or sum(counts) != plan.num_layers:
        raise ValueError(f"{type(model).__name__} has {plan.num_layers} layers, got stages with {counts}")
    ends = [sum(counts[: stage + 1]) for stage in range(len(counts))]
    every = [
        plan.stage(end - count, end, len(counts), at) for at, (end, count) in enumerate(zip(ends, counts, strict=True))
    ]
    for chunk, stage in stages.items():
        if not 0 <= stage < len(counts):
            raise ValueError(f"chunk {chunk} is to be stage {stage}; stages are 0 to {len(counts) - 1}")
    _try(model, every)
    return {chunk: every[stage] for chunk, stage in stages.items()}


def cut_ties(model: nn.Module, num_stages: int) -> dict[str, dict[int, str]] | None:
    """Return the tie of embedding and head between the stages of `cut_causal_lm`, as `Pipeline(tied=...)` takes it.

    Args:
        model: the model before or after it was cut.
        num_stages: with one there is nothing to tie.

    Returns:
        None where the model has a head of its own.

    """
    shared = shared_names(model)
    if not shared or num_stages == 1:
        return None
    ((head, embedding),) = shared.items()
    return {"embedding": {0: f"model.{embedding}", num_stages - 1: f"model.{head}"}}


@torch.no_grad()
def _try(model: nn.Module, stages: Sequence[nn.Module]) -> None:
    """Refuse a cut whose stages do not give the model's logits, or do not run."""
    x = probe_tokens(model)
    if x.device.type == "meta":
        return
    with evaluating(model, *stages):
        expected = model(input_ids=x, use_cache=False).logits
        for number, stage in enumerate(stages):
            try:
                x = stage(x)
            except Exception as error:  # whatever a model's own code raises without the layers before
                raise ValueError(
                    f"{type(model).__name__} cannot be cut: stage {number} fails without the layers of the others; "
                    "write stages of your own"
                ) from error
    if not apart(x, expected) <= TOLERANCE:
        raise ValueError(
            f"{type(model).__name__} cannot be cut: its stages do not give its logits, so its layers pass on more than "
            "their output; write stages of your own"
        )
