"""The two ends of a model: the embedding of its first stage, and the head and the loss of its last."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
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
    made: Tensor = _SummedLoss.apply(logits.flatten(0, -2), target.flatten())  # type: ignore[no-untyped-call]
    return made


_AT_ONCE_BYTES = 2**28
"""At most as many bytes of float32 logits exist at once."""


class _SummedLoss(torch.autograd.Function):
    """The cross entropy of logits in any type, which saves nothing but them: each run of tokens is float32 in turn."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        ctx.save_for_backward(logits, target)
        sums = [
            functional.cross_entropy(part.float(), wanted, ignore_index=IGNORED, reduction="sum")
            for part, wanted in _runs(logits, target)
        ]
        return torch.stack(sums).sum() if len(sums) > 1 else sums[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits, target = ctx.saved_tensors
        made = torch.empty_like(logits)
        for into, (part, wanted) in zip(torch.split(made, _num_at_once(logits)), _runs(logits, target), strict=True):
            logs = part.float().log_softmax(-1)
            weights = (wanted != IGNORED).unsqueeze(1) * -grad
            of_logs = torch.zeros_like(logs).scatter_(1, wanted.unsqueeze(1).clamp(min=0), weights)
            into.copy_(torch.ops.aten._log_softmax_backward_data(of_logs, logs, 1, torch.float32))
        return made, None


def _num_at_once(logits: Tensor) -> int:
    return max(1, _AT_ONCE_BYTES // (4 * logits.shape[-1]))


def _runs(logits: Tensor, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (logits, targets) of runs of tokens; one of no tokens where there are none."""
    num = _num_at_once(logits)
    return zip(torch.split(logits, num), torch.split(target, num), strict=True)
