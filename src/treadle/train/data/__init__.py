"""Training data: documents, tokenised once and memory-mapped, packed into samples, in an order that a seed gives."""

from treadle.train.data.batches import Batch, evaluation_batches, training_loader
from treadle.train.data.packing import IGNORED, PackedSample, PackedTokens
from treadle.train.data.token_store import TokenStore, open_tokens

__all__ = [
    "IGNORED",
    "Batch",
    "PackedSample",
    "PackedTokens",
    "TokenStore",
    "evaluation_batches",
    "open_tokens",
    "training_loader",
]
