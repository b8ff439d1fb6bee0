"""Parameters: how many each block, each rank of the pipeline and the whole model has."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from treadle.estimate.block_parts import Linear, block_parts
from treadle.estimate.job import Job
from treadle.estimate.job_stages import rank_rows
from treadle.estimate.model_cut import ModelCut
from treadle.estimate.model_shape import ModelShape


class BlockParameters(NamedTuple):
    """Parameters of one block on one rank: its linear layers, and those of norms."""

    linears: tuple[Linear, ...]
    norms: int

    @property
    def experts(self) -> int:
        """Those of experts, which ep and etp cut."""
        return sum(linear.size for linear in self.linears if linear.name.startswith("expert_"))

    @property
    def dense(self) -> int:
        """All others, which tp cuts."""
        return self.total - self.experts

    @property
    def total(self) -> int:
        """All."""
        return sum(linear.size for linear in self.linears) + self.norms

    @property
    def weights(self) -> tuple[int, int]:
        """Elements of weight matrices, without norms and biases: of all but experts, and of experts."""
        experts = sum(linear.weights for linear in self.linears if linear.name.startswith("expert_"))
        return sum(linear.weights for linear in self.linears) - experts, experts


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
    held = [piece for part in block_parts(cut, block).values() for piece in part if piece.held]
    return BlockParameters(tuple(linear for piece in held for linear in piece.linears), sum(p.norms for p in held))


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
    cut = ModelCut(shape, padded=False)
    whole = sum(block_parameters(cut, block).total for block in shape.blocks if mtp or block != "m")
    return whole - _vocabulary(cut) if shape.tie_word_embeddings else whole


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


class RankParameters(NamedTuple):
    """Parameters that a rank holds, and the shapes of its matrices."""

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
    if _shares_head(cut, blocks):
        dense -= _vocabulary(cut)
    if "m" in blocks:
        dense += _vocabulary(cut) * (("E" not in blocks) + ("L" not in blocks))
    fused = [linear for each in held for linear in each.linears if linear.fused]
    return RankParameters(dense, experts, frozenset((linear.outputs, linear.inputs) for linear in fused))


def chunk_weights(job: Job) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return for each rank and chunk the weights that are reduced, gathered and stepped: of all but experts, theirs.

    They are the matrices, without norms, biases and padding. A head that is tied to an embedding of the same rank is
    the embedding's.
    """
    cut = ModelCut.of(job, padded=False)
    return tuple(_of_chunks(cut, rows) for rows in rank_rows(job))


@lru_cache(maxsize=4096)
def _of_chunks(cut: ModelCut, rows: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    found = []
    for row in rows:
        weights = [block_parameters(cut, block).weights for block in row]
        shared = _vocabulary(cut) if "L" in row and _shares_head(cut, "".join(rows)) else 0
        found.append((sum(dense for dense, _ in weights) - shared, sum(experts for _, experts in weights)))
    return tuple(found)


def _shares_head(cut: ModelCut, blocks: str) -> bool:
    """Return True if a rank with these blocks has embedding and head in one parameter."""
    return cut.shape.tie_word_embeddings and "E" in blocks and "L" in blocks


def _vocabulary(cut: ModelCut) -> int:
    return cut.vocabulary * cut.shape.hidden_size
