"""The arrival of ranks that make a pipeline, recorded in torch's store.

Before ranks are connected, a rank cannot tell that another will not come or has raised: a communicator's own error
comes from the store, after the deadline, and names no rank. So each rank records its arrival, or its error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from treadle.dist.backends import is_dry
from treadle.dist.errors import OWN_ERRORS
from treadle.dist.mesh_position import MeshPosition
from treadle.runtime.faults.watch import RankLostError

_HERE = "here"
_MOST_TEXT = 600


class Arrivals:
    """The arrivals for the pipeline called `name`. A rank waits for the ranks it will be connected to."""

    def __init__(self, name: str, position: MeshPosition, deadline: timedelta) -> None:
        self._position, self._deadline = position, deadline
        self._store = PrefixStore(f"treadle/{name}/arrivals", _get_default_store())

    @contextmanager
    def making(self) -> Iterator[None]:
        """Wraps the making of the pipeline: records an error, and replaces that of a wait by the loss behind it."""
        if is_dry():
            yield
            return
        try:
            self._store.set(str(self._position.rank), _HERE)
            self._wait()
            yield
        except BaseException as error:
            lost = self._behind(error)
            if lost is not None:
                raise lost from error
            if not isinstance(error, RankLostError):  # the lost rank has recorded its own error
                with suppress(Exception):  # the store may be gone; the error itself must be raised
                    self._store.set(str(self._position.rank), f"{type(error).__name__}: {error}"[:_MOST_TEXT])
            raise

    def _wait(self) -> None:
        """Waits for the ranks of this pipeline and those at this rank's position in others."""
        wanted = sorted({*self._position.pp_ranks, *self._position.dp_ranks} - {self._position.rank})
        if wanted:
            self._store.wait([str(rank) for rank in wanted], self._deadline)
            lost = self._given_up(wanted)
            if lost is not None:
                raise lost

    def _behind(self, error: BaseException) -> RankLostError | None:
        """Returns the loss behind the error of a wait: a rank did not come, or has given up. None for other errors."""
        own = isinstance(error, (RankLostError, *OWN_ERRORS))
        if own or not isinstance(error, (RuntimeError, OSError)):
            return None
        everyone = [rank for row in self._position.ranks for rank in row if rank != self._position.rank]
        with suppress(RuntimeError):  # of the store
            missing = [rank for rank in everyone if not self._store.check([str(rank)])]
            return self._absent(missing) if missing else self._given_up(everyone)
        return None

    def _absent(self, missing: Sequence[int]) -> RankLostError:
        many = len(missing) > 1
        return RankLostError(
            f"rank{'s' if many else ''} {', '.join(map(str, missing))} did not come to make the pipeline within "
            f"{self._deadline.total_seconds():g} s of rank {self._position.rank}: late, ended, or raised before "
            "Pipeline(...); see what they wrote last, or give a longer deadline_s",
            rank=missing[0],
            kind="absent",
            op=None,
            waiting_for="making the pipeline",
        )

    def _given_up(self, ranks: Sequence[int]) -> RankLostError | None:
        for rank in ranks:
            said = self._store.get(str(rank)).decode(errors="replace")
            if said != _HERE:
                return RankLostError(
                    f"rank {rank} gave up making the pipeline: {said}",
                    rank=rank,
                    kind="raised",
                    op=None,
                    waiting_for="making the pipeline",
                )
        return None
