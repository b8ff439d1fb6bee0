"""What a rank trains and evaluates on: its replica's part of each global batch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from treadle.models.document_lengths import Documents
from treadle.train.data.packing import PackedTokens
from treadle.train.data.sampling import GlobalBatches


@dataclass(frozen=True)
class Batch:
    """A replica's part of a global batch, [samples, seq_len], micro-batch by micro-batch.

    Replica r has the r-th contiguous part. So the micro-batches of all replicas, one after the other, are the same
    whatever the number of replicas.
    """

    inputs: Tensor
    targets: Tensor
    positions: Tensor
    documents: Documents

    num_tokens: int
    """The targets that count in the whole global batch, of all replicas."""

    def side(self, num_microbatches: int) -> dict[str, Any]:
        """Return the side values of a step by the names under which layers read them."""
        return {"positions": self.positions, "documents": self.documents.split(num_microbatches)}


class ReplicaBatches(Dataset[Batch]):
    """Turns the sample numbers of a global batch into the batch of replica `replica` of `num_replicas`."""

    def __init__(self, packed: PackedTokens, replica: int, num_replicas: int) -> None:
        self._packed, self._replica, self._num_replicas = packed, replica, num_replicas

    def __getitem__(self, samples: NDArray[np.int64]) -> Batch:
        """Return this replica's part of a global batch."""
        own = np.split(samples, self._num_replicas)[self._replica]
        found = self._packed.samples(own)
        documents = Documents.of(found.documents)
        return Batch(found.inputs, found.targets, found.positions, documents, self._packed.num_targets(samples))


def training_loader(
    packed: PackedTokens, *, batch_size: int, seed: int, replica: int = 0, num_replicas: int = 1
) -> StatefulDataLoader[Batch]:
    """Return the batches of a replica, without end.

    The loader's `state_dict()` is the same on all replicas. It says how many samples all of them took together, and
    loads on another number of replicas and with another batch size.

    Args:
        packed: the samples.
        batch_size: samples of a global batch; `num_replicas` divides it.
        seed: of the permutations.
        replica: this rank's.
        num_replicas: how many share a global batch.

    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*set_vital")  # torchdata 0.11 calls what torch 2.13 deprecates
        return StatefulDataLoader(
            ReplicaBatches(packed, replica, num_replicas),
            batch_size=None,
            sampler=GlobalBatches(len(packed), batch_size, seed),
            collate_fn=_same,
            generator=torch.Generator(),  # its own: torch's is the training's
        )


def evaluation_batches(
    packed: PackedTokens, *, batch_size: int, most: int = 0, replica: int = 0, num_replicas: int = 1
) -> Iterator[Batch]:
    """Yield batches of all samples in order, the last one filled up with empty ones; at most `most`, if not 0."""
    batches = ReplicaBatches(packed, replica, num_replicas)
    starts = range(0, len(packed), batch_size)
    for start in starts[:most] if most else starts:
        samples = np.arange(start, start + batch_size)
        yield batches[np.where(samples < len(packed), samples, -1)]


def _same(batch: Batch) -> Batch:
    return batch
