"""Small states to save, without a model, and whole tensors put together from ranks' parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import treadle
from tests.support.devices import DEVICE_TYPE
from tests.support.patience import PATIENT_S
from treadle.train.checkpoint import State, TensorPart


class Box:
    """Two tensors filled with a number: one whole on every rank, one in runs, one run a rank."""

    def __init__(self, value: float, rank: int, world: int) -> None:
        self.whole = torch.full((3, 4), value)
        self.run = torch.full((5,), value + rank)
        self._place = rank * 5, world * 5

    def state_dict(self) -> State:
        return {"whole": TensorPart.whole(self.whole), "run": TensorPart.run(self.run, *self._place)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        for name, part in self.state_dict().items():
            assert part.tensor.data_ptr() == state_dict[name].tensor.data_ptr()

    def holds(self, value: float, rank: int) -> bool:
        return bool((self.whole == value).all()) and bool((self.run == value + rank).all())


def make_pipe(world: int) -> treadle.Pipeline:
    """A pipeline whose ranks save together."""
    mesh = init_device_mesh(DEVICE_TYPE, (world,), mesh_dim_names=("pp",))
    schedule = treadle.generate("1f1b", pp=world, microbatches=world)
    loss_fn = nn.functional.mse_loss
    return treadle.Pipeline({0: nn.Linear(2, 2)}, schedule, mesh=mesh, loss_fn=loss_fn, deadline_s=PATIENT_S)


def whole_state(states: Iterable[State]) -> dict[str, Tensor]:
    """The whole tensors of all ranks' parts; parts that several have are the same."""
    found: dict[str, Tensor] = {}
    filled: dict[str, Tensor] = {}
    for state in states:
        for name, part in state.items():
            whole = found.setdefault(name, torch.zeros(part.shape, dtype=part.tensor.dtype))
            known = filled.setdefault(name, torch.zeros(part.shape, dtype=torch.bool))
            index = tuple(slice(at, at + size) for at, size in zip(part.offset, part.tensor.shape, strict=True))
            assert not known[index].any() or torch.equal(whole[index], part.tensor), name
            whole[index], known[index] = part.tensor, torch.ones_like(part.tensor, dtype=torch.bool)
    assert all(known.all() for known in filled.values())
    return found
