"""The documents of a micro-batch's sequences, as the host knows them: attention makes no mask of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, chain

import torch
from torch import Tensor

from treadle.dist.streams import upload


@dataclass(frozen=True)
class Documents:
    """`lengths[b]` are the lengths of the documents of sequence b, in order.

    A side value of a `Pipeline`: a list with one for each micro-batch.

    Example:
        >>> documents = Documents.of(torch.tensor([[0, 0, 0, 7], [2, 2, 2, 2]]))
        >>> documents.lengths, documents.positions(torch.device("cpu")).tolist()
        (((3, 1), (4,)), [[0, 1, 2, 0], [0, 1, 2, 3]])

    """

    lengths: tuple[tuple[int, ...], ...]
    _ends: dict[torch.device, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, numbers: Tensor) -> Documents:
        """Return those of a number for each token's document, [batch, tokens]. The numbers are on the CPU."""
        if not numbers.is_cpu:
            raise ValueError(
                f"numbers of documents are on {numbers.device.type}, and the host orders attention by them; give them "
                "on the CPU, where a loader makes them: Documents.of(numbers.cpu())"
            )
        runs = (torch.unique_consecutive(row, return_counts=True)[1].tolist() for row in numbers)
        return cls(tuple(map(tuple, runs)))

    def split(self, num: int) -> list[Documents]:
        """Return those of each of `num` micro-batches of as many sequences."""
        each = len(self.lengths) // num
        return [Documents(self.lengths[at * each : (at + 1) * each]) for at in range(num)]

    @property
    def flat(self) -> list[int]:
        """The lengths of all documents, one sequence after the other."""
        return list(chain.from_iterable(self.lengths))

    @property
    def is_one_each(self) -> bool:
        """True if each sequence is one document."""
        return all(len(lengths) == 1 for lengths in self.lengths)

    def ends(self, device: torch.device) -> Tensor:
        """Return 0 and where each document ends among all tokens, on the device. All layers share the tensor."""
        if device not in self._ends:
            self._ends[device] = upload([0, *accumulate(self.flat)], torch.int32, device)
        return self._ends[device]

    def positions(self, device: torch.device) -> Tensor:
        """Return each token's position in its document, [batch, tokens]."""
        places = [list(chain.from_iterable(map(range, lengths))) for lengths in self.lengths]
        return upload(places, torch.long, device)


def positions_of(documents: Documents | None, tokens: Tensor) -> Tensor:
    """Return the positions of tokens [batch, tokens, ...] in their documents; None: each sequence is one."""
    if documents is not None:
        return documents.positions(tokens.device)
    return torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[:2])
