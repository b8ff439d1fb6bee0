"""The two ends of a model: the embedding of its first stage, and the head and the loss of its last."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from treadle.models.model_config import ModelConfig

IGNORED = -100
"""The target of a token whose successor is not to be predicted."""


def make_embedding(config: ModelConfig) -> nn.Embedding:
    """Return a table without values. `nn.Embedding` draws some, for which torch's meta device imports its compiler."""
    table = torch.empty(config.vocab_size, config.hidden_size)
    embedding: nn.Embedding = nn.Embedding.from_pretrained(table, freeze=False)  # type: ignore[no-untyped-call]
    return embedding


class TokenEmbedding(nn.Module):
    """Tokens to vectors."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = make_embedding(config)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return [batch, tokens, hidden] for tokens [batch, tokens]."""
        x: Tensor = self.embed_tokens(tokens)
        return x


class LMHead(nn.Module):
    """The norm after the last layer, and the logits of the next token."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.tied = config.tie_word_embeddings
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits [batch, tokens, vocab]."""
        logits: Tensor = self.lm_head(self.norm(x))
        return logits


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    """Return the sum of the cross entropy over all targets but `IGNORED` ones, in float32.

    A `Pipeline` divides the sum by `num_tokens`: the targets of the whole batch that are not ignored.

    Args:
        logits: [batch, tokens, vocab].
        target: [batch, tokens], the token that follows each.

    Example:
        >>> float(loss_fn(torch.zeros(1, 2, 4), torch.tensor([[3, IGNORED]])))  # log 4, of one token
        1.3862943649291992

    """
    return functional.cross_entropy(
        logits.flatten(0, -2).float(), target.flatten(), ignore_index=IGNORED, reduction="sum"
    )
