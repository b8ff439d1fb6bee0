"""Checkpoints by torch.distributed.checkpoint: asynchronous, complete or not there, loadable on another layout."""

from treadle.train.checkpoint.checkpointer import Checkpointer, SaveError
from treadle.train.checkpoint.on_disk import complete_steps
from treadle.train.checkpoint.tensor_parts import State, TensorPart

__all__ = ["Checkpointer", "SaveError", "State", "TensorPart", "complete_steps"]
