"""The ranks that do something together: those of torch's default group, or others that meet at a store."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.distributed_c10d import _get_default_store


@dataclass(frozen=True)
class RankWorld:
    """A rank among `size`, which all reach `store`. A process may be a rank of several worlds."""

    store: Store
    rank: int
    size: int

    @classmethod
    def of_torch(cls) -> RankWorld:
        """Return the world of torch's default process group."""
        return cls(_get_default_store(), dist.get_rank(), dist.get_world_size())

    @classmethod
    def host(cls, size: int, address: str = "127.0.0.1", port: int = 0, deadline_s: float = 300.0) -> RankWorld:
        """Open a store and be rank 0. It is there as long as this world is held.

        Args:
            size: The number of ranks.
            address: Where others reach this host.
            port: 0 for a free one, which `port` has then.
            deadline_s: Seconds of each wait at the store.

        """
        store = TCPStore(address, port, None, True, timedelta(seconds=deadline_s), wait_for_workers=False)
        return cls(store, 0, size)

    @classmethod
    def join(cls, host: str, port: int, rank: int, size: int, deadline_s: float = 300.0) -> RankWorld:
        """Be a rank of the world whose rank 0 has its store there; waits for it.

        Raises:
            ConnectionError: There is none within the deadline.

        """
        try:
            store = TCPStore(host, port, None, False, timedelta(seconds=deadline_s), wait_for_workers=False)
        except Exception as error:  # stores raise various types
            raise ConnectionError(
                f"rank {rank} of {size} has not reached rank 0's store at {host}:{port} within {deadline_s:g} s; has "
                "rank 0 started, and does a firewall let others in?"
            ) from error
        return cls(store, rank, size)

    @property
    def port(self) -> int:
        """The port of a store that was opened or joined here."""
        port: int = self.store.port  # type: ignore[attr-defined]
        return port
