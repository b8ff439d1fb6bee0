"""The arrival of ranks that make a pipeline, recorded in torch's store.

Before ranks are connected, a rank cannot know that another will not come or has raised: a communicator's own error
comes from the store, after the deadline, and names no rank. So each rank records its arrival, or its error. With its
arrival it records how its watch is reached: from then on the watch notices the loss of a rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from treadle.dist.backends import is_dry
from treadle.dist.mesh_position import MeshPosition
from treadle.runtime.faults.watch import RankLostError
from treadle.runtime.faults.watch.contacts import beside
from treadle.runtime.faults.watch.loss_messages import MOST_TEXT

_HERE, _LOST = "here ", "lost "


class Arrivals:
    """The arrivals for the pipeline called `name`. A rank waits for the ranks it will be connected to."""

    def __init__(self, name: str, position: MeshPosition) -> None:
        self._position, self.deadline_s = position, 0.0
        self._store = PrefixStore(f"treadle/{name}/arrivals", _get_default_store())

    @contextmanager
    def making(self) -> Iterator[None]:
        """Wraps the arrival of this rank: records an error, and replaces that of a connection by the loss behind it."""
        if is_dry():
            yield
            return
        try:
            yield
        except BaseException as error:
            lost = error if isinstance(error, RankLostError) else None
            with suppress(RuntimeError):  # the store may be gone; the error itself must be raised
                if isinstance(error, OSError):
                    lost = self._given_up({rank: self._read(rank) for rank in self._arrived()})
                text = f"{type(error).__name__}: {error}" if lost is None else f"{_LOST}{lost.rank} {lost.kind} {lost}"
                self._store.set(str(self._position.rank), text[:MOST_TEXT])
            if lost is not None and lost is not error:
                raise lost from error
            raise

    @property
    def rings(self) -> list[list[int]]:
        """The ranks of this pipeline, and those at this rank's position in others; none alone."""
        return [ranks for ranks in (self._position.pp_ranks, self._position.dp_ranks) if len(ranks) > 1]

    def arrive(self, contact: str, ranks: Sequence[int]) -> list[str]:
        """Records the arrival of this rank, and returns the contacts of these ranks when all have arrived."""
        self._store.set(str(self._position.rank), _HERE + contact)
        try:
            self._store.wait([str(rank) for rank in ranks], timedelta(seconds=self.deadline_s))
        except RuntimeError as error:
            missing = sorted({rank for row in self._position.ranks for rank in row}.difference(self._arrived()))
            if not missing:
                raise
            raise absent(missing, self._position.rank, self.deadline_s) from error
        said = self._refuse_given_up(ranks)
        return [said[rank].removeprefix(_HERE) for rank in ranks]

    def refuse_lone_meeting(self) -> None:
        """Raises the loss if a neighbour in the rings, all of whose ranks have arrived, has given up since."""
        rank = self._position.rank
        self._refuse_given_up([other for ring in self.rings for other in beside(ring, rank)])

    def _refuse_given_up(self, ranks: Sequence[int]) -> dict[int, str]:
        """Returns what ranks that have arrived recorded, read once: a rank may give up at any moment."""
        said = {rank: self._read(rank) for rank in ranks}
        lost = self._given_up(said)
        if lost is not None:
            raise lost
        return said

    def _arrived(self) -> list[int]:
        """Returns the ranks that have recorded anything."""
        return [rank for row in self._position.ranks for rank in row if self._store.check([str(rank)])]

    def _read(self, rank: int) -> str:
        text: str = self._store.get(str(rank)).decode(errors="replace")
        return text

    def _given_up(self, said: Mapping[int, str]) -> RankLostError | None:
        """Returns the loss of a rank that has raised an error of its own, or else the loss that one has raised."""
        errors = {rank: text for rank, text in said.items() if not text.startswith(_HERE)}
        if not errors:
            return None
        rank, text = min(errors.items(), key=lambda each: (each[1].startswith(_LOST), each[0]))
        kind, message = "raised", f"rank {rank} gave up making the pipeline: {text}"
        if text.startswith(_LOST):
            _, number, kind, message = text.split(" ", 3)
            rank = int(number)
        return RankLostError(message, rank=rank, kind=kind, op=None, waiting_for="making the pipeline")


def absent(missing: Sequence[int], rank: int, deadline_s: float) -> RankLostError:
    """Return the loss of ranks that did not come within this rank's deadline."""
    many = len(missing) > 1
    return RankLostError(
        f"rank{'s' if many else ''} {', '.join(map(str, missing))} did not come to make the pipeline within "
        f"{deadline_s:g} s of rank {rank}: late, ended, or raised before "
        "Pipeline(...); see what they wrote last, or give a longer deadline_s",
        rank=missing[0],
        kind="absent",
        op=None,
        waiting_for="making the pipeline",
    )
