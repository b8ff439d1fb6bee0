"""Checkpoints by torch.distributed.checkpoint: asynchronous, complete or not there, loadable on another layout."""

from treadle.train.checkpoint.checkpointer import Checkpointer, SaveError
from treadle.train.checkpoint.files import complete_steps
from treadle.train.checkpoint.parts import State, TensorPart

__all__ = ["Checkpointer", "SaveError", "State", "TensorPart", "complete_steps"]
