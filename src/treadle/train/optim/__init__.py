"""The optimizer: AdamW and Muon with sharded state, and the learning rate's schedule."""

from treadle.train.optim.lr_schedule import WarmupStableDecay
from treadle.train.optim.optimizer_config import OptimizerConfig
from treadle.train.optim.sharded import ShardedOptimizer

__all__ = ["OptimizerConfig", "ShardedOptimizer", "WarmupStableDecay"]
