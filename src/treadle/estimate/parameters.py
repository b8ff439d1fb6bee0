"""Parameters: the weight matrices of each block as one rank holds them, and their counts.

Tensor parallelism (tp) cuts attention, MLPs, embedding and head; expert parallelism (ep) deals out experts, and expert
tensor parallelism (etp) cuts each. As in Megatron, the down-projections of MLA, the router and all norms are whole on
every rank, and the vocabulary is padded to a multiple of 128 x tp.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from treadle.estimate.job import Job
from treadle.estimate.model_shape import ModelShape
from treadle.estimate.stages import rank_rows

VOCABULARY_UNIT = 128
"""Rows that Megatron pads a rank's part of the vocabulary to (make_vocab_size_divisible_by)."""


class WeightMatrix(NamedTuple):
    """A linear layer's weight on one rank: `copies` matrices [outputs, inputs], of experts more than one."""

    outputs: int
    inputs: int
    bias: bool = False
    copies: int = 1
    fused: bool = True
    """Its gradient is added to the main gradient inside the product (gradient_accumulation_fusion)."""

    @property
    def size(self) -> int:
        """Parameters, with biases."""
        return self.copies * self.outputs * (self.inputs + self.bias)


@dataclass(frozen=True)
class ModelCut:
    """A model's shape and how its matrices are cut over ranks."""

    shape: ModelShape
    tp: int = 1
    ep: int = 1
    etp: int = 1
    padded: bool = True
    """The vocabulary is padded."""

    @classmethod
    def of(cls, job: Job) -> ModelCut:
        """Return the cut of a job."""
        return cls(job.model, job.tp, job.ep, job.etp)

    @property
    def vocabulary(self) -> int:
        """Rows of a rank's part of the embedding or of the head."""
        unit = self.tp * (VOCABULARY_UNIT if self.padded else 1)
        return -(-self.shape.vocab_size // unit) * unit // self.tp

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


class BlockParameters(NamedTuple):
    """Parameters of one block on one rank: `matrices` by name, and those of norms and of learned positions."""

    matrices: dict[str, WeightMatrix]
    norms: int

    @property
    def experts(self) -> int:
        """Those of experts, which ep and etp cut."""
        return sum(matrix.size for name, matrix in self.matrices.items() if name.startswith("expert_"))

    @property
    def dense(self) -> int:
        """All others, which tp cuts."""
        return self.total - self.experts

    @property
    def total(self) -> int:
        """All."""
        return sum(matrix.size for matrix in self.matrices.values()) + self.norms


@lru_cache(maxsize=4096)
def block_parameters(cut: ModelCut, block: str) -> BlockParameters:
    """Return the parameters of a block on one rank.

    Args:
        cut: the model, and how it is cut.
        block: a letter of `treadle.ir.blocks`. A head that is tied to the embedding is counted like any other.

    Raises:
        ValueError: the letter names no block.

    Example:
        >>> from treadle.estimate import load_model
        >>> block_parameters(ModelCut(load_model("llama3-70b"), tp=8), "t").dense
        106971136

    """
    shape = cut.shape
    norm = shape.hidden_size * (2 if shape.max_position_embeddings else 1)  # LayerNorm has biases, RMSNorm has none
    vocabulary = WeightMatrix(cut.vocabulary, shape.hidden_size)
    if block == "E":
        positions = shape.max_position_embeddings * shape.hidden_size
        return BlockParameters({"embedding": vocabulary._replace(fused=False)}, positions)
    if block == "L":
        return BlockParameters({"head": vocabulary}, norm)
    if block in ("t", "d"):
        mlp = _experts(cut) if shape.is_moe and block == "t" else _mlp(cut, "mlp", shape.intermediate_size)
        return BlockParameters({**_attention(cut), **mlp}, 2 * norm + _attention_norms(shape))
    if block == "m":
        layer = block_parameters(cut, "t")
        projection = WeightMatrix(shape.hidden_size // cut.tp, 2 * shape.hidden_size)
        return BlockParameters({"mtp_projection": projection, **layer.matrices}, layer.norms + 3 * norm)
    raise ValueError(f"blocks are E, t, d, m and L, got {block!r}")


def _attention(cut: ModelCut) -> dict[str, WeightMatrix]:
    shape, bias = cut.shape, cut.shape.attention_bias
    out = WeightMatrix(shape.hidden_size, cut.output_width, bias)
    if not shape.is_mla:
        widths = cut.query_width + cut.key_width + cut.value_width
        return {"qkv": WeightMatrix(widths, shape.hidden_size, bias), "proj": out}
    up_width = shape.num_attention_heads * (shape.qk_nope_head_dim + shape.v_head_dim) // cut.tp
    kv = {
        "kv_down": WeightMatrix(shape.kv_lora_rank + shape.qk_rope_head_dim, shape.hidden_size, bias),
        "kv_up": WeightMatrix(up_width, shape.kv_lora_rank),
        "proj": out,
    }
    if not shape.q_lora_rank:
        return {"q": WeightMatrix(cut.query_width, shape.hidden_size), **kv}
    return {
        "q_down": WeightMatrix(shape.q_lora_rank, shape.hidden_size, bias),
        "q_up": WeightMatrix(cut.query_width, shape.q_lora_rank),
        **kv,
    }


def _attention_norms(shape: ModelShape) -> int:
    if shape.is_mla:
        return shape.q_lora_rank + shape.kv_lora_rank
    return 2 * shape.head_dim if shape.qk_norm else 0


def _mlp(cut: ModelCut, name: str, width: int) -> dict[str, WeightMatrix]:
    shape = cut.shape
    share, first = width // cut.tp, 2 if shape.gated_mlp else 1
    return {
        f"{name}_fc1": WeightMatrix(first * share, shape.hidden_size, shape.mlp_bias),
        f"{name}_fc2": WeightMatrix(shape.hidden_size, share, shape.mlp_bias),
    }


def _experts(cut: ModelCut) -> dict[str, WeightMatrix]:
    shape = cut.shape
    experts = _mlp(ModelCut(shape, cut.etp), "expert", shape.moe_intermediate_size)
    found = {name: matrix._replace(copies=shape.num_experts // cut.ep) for name, matrix in experts.items()}
    found["router"] = WeightMatrix(shape.num_experts, shape.hidden_size, shape.mlp_bias, fused=False)
    if shape.shared_width:
        found |= _mlp(cut, "shared", shape.shared_width)
    return found


def count_parameters(shape: ModelShape, *, mtp: bool = False) -> int:
    """Return the parameters of a whole model.

    Args:
        shape: the model.
        mtp: count MTP blocks as well; published totals leave them out.

    Example:
        >>> from treadle.estimate import load_model
        >>> count_parameters(load_model("deepseek-v3")) // 10**9
        671

    """
    return sum(_all_blocks(shape, mtp=mtp))


def active_parameters(shape: ModelShape, *, embedding: bool = True) -> int:
    """Return the parameters that a token meets: of routed experts only those it is sent to.

    Args:
        shape: the model.
        embedding: count the input embedding, of which a token reads one row. Publishers differ on it.

    Example:
        >>> from treadle.estimate import load_model
        >>> active_parameters(load_model("qwen3-235b-a22b")) // 10**9
        22

    """
    whole = count_parameters(shape)
    if shape.is_moe:
        experts = block_parameters(ModelCut(shape), "t").experts
        idle = shape.num_experts - shape.num_experts_per_tok
        whole -= shape.num_moe_layers * experts // shape.num_experts * idle
    if not embedding and not shape.tie_word_embeddings:
        whole -= block_parameters(ModelCut(shape, padded=False), "E").total
    return whole


def _all_blocks(shape: ModelShape, *, mtp: bool) -> list[int]:
    cut = ModelCut(shape, padded=False)
    counts = [block_parameters(cut, block).total for block in shape.blocks if mtp or block != "m"]
    if shape.tie_word_embeddings:
        counts.append(-block_parameters(cut, "L").matrices["head"].size)
    return counts


class RankParameters(NamedTuple):
    """Parameters that a rank holds, and the bytes of the stand-ins for gradients of its matrices."""

    dense: int
    experts: int
    shapes: frozenset[tuple[int, int]]
    """Distinct shapes of matrices whose gradients are fused."""


def rank_parameters(job: Job) -> tuple[RankParameters, ...]:
    """Return what each rank of the pipeline holds, by the blocks of its stages.

    A tied head on another rank than the embedding is a copy of it. So are the embedding and the head that an MTP block
    needs on a rank without them.

    Raises:
        ValueError: the layout does not fit the schedule.

    """
    cut = ModelCut.of(job)
    return tuple(_of_rank(cut, "".join(rows)) for rows in rank_rows(job))


@lru_cache(maxsize=4096)
def _of_rank(cut: ModelCut, blocks: str) -> RankParameters:
    held = [block_parameters(cut, block) for block in blocks]
    dense, experts = sum(each.dense for each in held), sum(each.experts for each in held)
    vocabulary = cut.vocabulary * cut.shape.hidden_size
    if cut.shape.tie_word_embeddings and "E" in blocks and "L" in blocks:
        dense -= vocabulary
    if "m" in blocks:
        dense += vocabulary * (("E" not in blocks) + ("L" not in blocks))
    fused = [matrix for each in held for matrix in each.matrices.values() if matrix.fused]
    return RankParameters(dense, experts, frozenset((matrix.outputs, matrix.inputs) for matrix in fused))
