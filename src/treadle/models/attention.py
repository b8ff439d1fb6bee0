"""Grouped-query attention with norms on queries and keys, as Qwen3 has it."""

from __future__ import annotations

from torch import Tensor, nn

from treadle.models.attend import attend
from treadle.models.document_lengths import Documents
from treadle.models.model_config import ModelConfig
from treadle.models.rotary import rotary_tables, rotate


class Attention(nn.Module):
    """Causal attention; `num_key_value_heads` keys and values serve all heads. Submodules have Hugging Face's names."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim, self.theta = config.head_dim, config.rope_theta
        queries, keys = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, positions: Tensor, documents: Documents | None = None) -> Tensor:
        """Mix the tokens of each sequence.

        Args:
            x: [batch, tokens, hidden].
            positions: [batch, tokens], each token's position in its document.
            documents: the documents of each sequence; None: a sequence is one.

        Returns:
            [batch, tokens, hidden].

        """
        tables = rotary_tables(positions, self.head_dim, self.theta, x.dtype)
        query = rotate(self.q_norm(self._heads(self.q_proj(x))), *tables)
        key = rotate(self.k_norm(self._heads(self.k_proj(x))), *tables)
        out: Tensor = self.o_proj(attend(query, key, self._heads(self.v_proj(x)), documents).flatten(2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        """Return [batch, tokens, heads, head_dim]."""
        return x.reshape(*x.shape[:-1], -1, self.head_dim)
