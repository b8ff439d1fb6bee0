"""Runs a whole model, or a stage of it, in one process and without a pipeline."""

from __future__ import annotations

from torch import Tensor, nn

from treadle.models.decoder_layers import DecoderLayer
from treadle.models.document_lengths import Documents, positions_of
from treadle.models.mtp import TokenPredictor
from treadle.runtime.model.stage_blocks import children_of


def run_stage(
    stage: nn.Module, x: Tensor, *, positions: Tensor | None = None, documents: Documents | None = None
) -> Tensor:
    """Run a stage of `build_stages` with all experts (`ep=1`); MTP blocks are left out.

    Args:
        stage: the module.
        x: tokens [batch, tokens] where the stage has the embedding, else what the stage before returned.
        positions: [batch, tokens]; None: from 0 in each document.
        documents: the documents of each sequence; None: each sequence is one.

    Returns:
        The logits where the stage has the head, else what the next stage takes.

    Example:
        >>> from treadle.models import ModelConfig, build_stages
        >>> config = ModelConfig(num_hidden_layers=1)
        >>> model = build_stages(config, (config.blocks,), {0: 0})[0]
        >>> run_stage(model, torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 256])

    """
    if positions is None:
        positions = positions_of(documents, x)
    for block in children_of(stage):
        if isinstance(block, DecoderLayer):
            x = block(x, positions, documents)
        elif not isinstance(block, TokenPredictor):
            x = block(x)
    return x
