"""A model cut over ranks: the widths that one rank has, and the tokens of a micro-batch on it.

Tensor parallelism (tp) cuts attention, MLPs, embedding and head; expert parallelism (ep) deals out experts, and expert
tensor parallelism (etp) cuts each. As in Megatron, the down-projections of MLA, the router and all norms are whole on
every rank, and the vocabulary is padded to a multiple of 128 x tp.
"""

from __future__ import annotations

from dataclasses import dataclass

from treadle.estimate.job import Job
from treadle.estimate.model_shape import ModelShape

VOCABULARY_UNIT = 128
"""Rows that Megatron pads a rank's part of the vocabulary to (make_vocab_size_divisible_by)."""


@dataclass(frozen=True)
class ModelCut:
    """A model's shape, how its matrices are cut over ranks, and the tokens of a micro-batch on one rank."""

    shape: ModelShape
    tp: int = 1
    ep: int = 1
    etp: int = 1
    padded: bool = True
    """The vocabulary is padded."""

    tokens: int = 1
    """Of a micro-batch on one rank, before tp cuts the sequence."""

    sequence_tp: int = 1
    """Ranks that cut along the sequence what tp leaves whole: tp with sequence parallelism, 1 without."""

    @classmethod
    def of(cls, job: Job, *, padded: bool = True) -> ModelCut:
        """Return the cut of a job."""
        sequence_tp = job.tp if job.sequence_parallel else 1
        return cls(job.model, job.tp, job.ep, job.etp, padded, job.tokens, sequence_tp)

    @property
    def own_tokens(self) -> int:
        """Tokens on one rank between blocks, where sequence parallelism cuts them."""
        return self.tokens // self.sequence_tp

    @property
    def routed_rows(self) -> int:
        """Rows that a rank's experts take, if routing is balanced: a token that is sent to two counts twice."""
        return self.own_tokens * self.shape.num_experts_per_tok * self.etp

    @property
    def vocabulary(self) -> int:
        """Rows of a rank's part of the embedding or of the head."""
        if not self.padded:
            return self.shape.vocab_size // self.tp
        unit = self.tp * VOCABULARY_UNIT
        return -(-self.shape.vocab_size // unit) * unit // self.tp

    @property
    def heads(self) -> int:
        """Heads of queries on one rank."""
        return max(1, self.shape.num_attention_heads // self.tp)

    @property
    def query_width(self) -> int:
        """Values of a token's queries on one rank."""
        shape = self.shape
        width = shape.qk_nope_head_dim + shape.qk_rope_head_dim if shape.is_mla else shape.head_dim
        return shape.num_attention_heads * width // self.tp

    @property
    def key_width(self) -> int:
        """Values of a token's keys on one rank. Heads of keys are copied where tp is larger than their number."""
        if self.shape.is_mla:
            return self.query_width
        return max(1, self.shape.num_key_value_heads // self.tp) * self.shape.head_dim

    @property
    def value_width(self) -> int:
        """Values of a token's values on one rank."""
        if self.shape.is_mla:
            return self.output_width
        return self.key_width

    @property
    def output_width(self) -> int:
        """Values of a token that leave attention on one rank, before the projection."""
        shape = self.shape
        width = shape.v_head_dim if shape.is_mla else shape.head_dim
        return shape.num_attention_heads * width // self.tp
