"""Multi-token prediction as DeepSeek-V3 has it: each block predicts one token further than the one before."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from treadle.models.decoder_layers import DenseLayer
from treadle.models.document_lengths import Documents, positions_of
from treadle.models.ends import IGNORED, loss_fn, make_embedding
from treadle.models.model_config import ModelConfig
from treadle.runtime.model.mtp_block import MTPBlock


class SharedHead(nn.Module):
    """An MTP block's norm, and the logits by the model's own head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.head(self.norm(x))
        return logits


class TokenPredictor(MTPBlock):
    """The `depth`-th MTP block, from 1: joins the hidden state of token i with token i + depth, predicts the one after.

    One dense layer after a projection of both. Its embedding and its head are the model's: tied parameters
    (`tied_parameters`). It predicts nothing across the end of a document. Its loss is a sum, as `loss_fn`'s is.
    """

    def __init__(self, config: ModelConfig, depth: int) -> None:
        super().__init__(loss_weight=config.mtp_loss_weight)
        self.depth, self.number = depth, config.num_hidden_layers + depth - 1
        self.tied = config.tie_word_embeddings
        self.embed_tokens = make_embedding(config)
        self.enorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hnorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layer = DenseLayer(config, self.number)
        self.shared_head = SharedHead(config)

    def forward(
        self, x: Tensor, target: Tensor, positions: Tensor | None = None, documents: Documents | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the hidden state for the next block, and the loss."""
        places = positions_of(documents, target)
        positions = places if positions is None else positions
        tokens, wanted = self._shifted(target, places)
        embedded = self.enorm(self.embed_tokens(tokens.clamp(min=0)))
        joined: Tensor = self.eh_proj(torch.cat([embedded, self.hnorm(x)], dim=-1))
        hidden: Tensor = self.layer(joined, positions, documents)
        return hidden, loss_fn(self.shared_head(hidden), wanted)

    def _shifted(self, target: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return for each token i the token i + depth and the one after it; `IGNORED` where a document has ended."""
        tokens, wanted = ahead(target, self.depth - 1, IGNORED), ahead(target, self.depth, IGNORED)
        ended = (tokens == IGNORED) | (ahead(places, self.depth, IGNORED) != places + self.depth)
        return tokens, wanted.masked_fill(ended, IGNORED)


def ahead(values: Tensor, steps: int, beyond: int) -> Tensor:
    """Return `values[..., i + steps]` at i, and `beyond` after the end.

    Example:
        >>> ahead(torch.tensor([1, 2, 3]), 1, -1).tolist()
        [2, 3, -1]

    """
    return functional.pad(values[..., steps:], (0, min(steps, values.shape[-1])), value=beyond)
