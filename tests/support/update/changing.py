"""Weights of which each version changes some elements, the same in any process, and an engine that cannot export."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from tests.support.devices import here
from tests.support.update.models import numbers
from tests.support.update.workers import Troubled
from treadle.update import Plain, Source
from treadle.update.adapters.plain import digest_of
from treadle.update.memory.copying import opaque
from treadle.update.worker.arrived_boxes import Arrival, Leaving
from treadle.weights.tensor_boxes import Box, Holding, Tensor

SIGN = np.uint16(1 << 15)


def elements(tensor: Tensor, box: Box, version: int, rate: float = 0.01, last: int = 1 << 20) -> npt.NDArray[np.uint16]:
    """Any bits, NaNs among them; in each version some are others, and of some only the sign changes.

    `last`: what changed earlier than so many versions ago is as it was at first, so that late ones are soon made.
    """
    made = numbers(tensor, box, 1).copy()
    for number in range(max(2, version + 1 - last), version + 1):
        chance = numbers(replace(tensor, name=f"{tensor.name} changed"), box, number)
        chosen, turned = chance < rate * 65536, chance < rate * 6554
        made[chosen] = numbers(tensor, box, number)[chosen]
        made[turned] ^= SIGN
    return made


def changing_source(have: Holding, rank: int, version: int, rate: float = 0.01, last: int = 1 << 20) -> Source:
    held = {}
    for piece in have.pieces[rank]:
        array = elements(have.tensors[piece.tensor], piece.box, version, rate, last)
        held[piece] = here(torch.from_numpy(array).view(torch.bfloat16))
    return Source(have.tensors, held)


def right_elements(want: Holding, worker: int, version: int, last: int = 1 << 20) -> str:
    """The digest that a plain worker must have."""
    held = {
        piece.tensor: torch.from_numpy(elements(want.tensors[piece.tensor], piece.box, version, last=last))
        for piece in want.pieces[worker]
    }
    return digest_of(held)


@dataclass(frozen=True)
class CompareElements:
    """Compares every element that a worker holds with its expected value, in its process; names tensors that differ."""

    version: int
    rate: float = 0.01
    last: int = 1 << 20

    def __call__(self, adapter: Plain) -> list[str]:
        tensors = {tensor.name: tensor for tensor in adapter.layout().tensors}
        return [
            piece.tensor
            for piece in adapter.layout().pieces
            if not np.array_equal(
                opaque(adapter.held[piece.tensor].cpu()),
                elements(tensors[piece.tensor], piece.box, self.version, self.rate, self.last),
            )
        ]


class Mute(Troubled):
    """An engine that cannot export and reloads whole: as it begins its weights are gone, and all must come again."""

    can_export = False
    whole = True
    came: set[str] | None = None

    def begin(self) -> str | None:
        error = super().begin()
        for held in self.held.values():
            held.view(torch.int16).fill_(0x7777)
        self.came = set()
        return error

    def load(self, arrivals: Sequence[Arrival]) -> str | None:
        assert self.came is not None
        error = super().load(arrivals)
        self.came.update(arrival.name for arrival in arrivals)
        return error

    def finish(self) -> str | None:
        assert self.came is not None
        missing = self.held.keys() - self.came
        return super().finish() or (f"{missing} did not come" if missing else None)

    def export(self, leaving: Leaving) -> str | None:
        return "weights were packed for kernels"
