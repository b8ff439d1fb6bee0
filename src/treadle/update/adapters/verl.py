"""Treadle as a checkpoint engine of verl: import this module, and the backend "treadle" is registered.

    rollout.checkpoint_engine.backend=treadle
    rollout.checkpoint_engine.custom_backend_module=treadle.update.adapters.verl
    rollout.checkpoint_engine.engine_kwargs.treadle.directory=/run/treadle
    rollout.checkpoint_engine.engine_kwargs.treadle.ledger=/var/lib/treadle
    rollout.checkpoint_engine.engine_kwargs.treadle.checkpoint=/path/of/the/model

Actors draw all weights in step; each keeps its share in host memory and sends from there. Each rollout process holds an
endpoint of its own with the whole model in host memory. verl loads from that into its engine, and only after all
rollouts have all of a version, checked, and the version is committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch._C._distributed_c10d import PrefixStore
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

from treadle.dist.rank_world import RankWorld
from treadle.host.sockets import own_directory
from treadle.update.adapters.plain import Plain
from treadle.update.announced_versions import AnnouncedVersions
from treadle.update.coordinator.commit_log import peek
from treadle.update.rank.checkpoint import described
from treadle.update.rank.staged_share import staged_share
from treadle.update.update_options import UpdateOptions
from treadle.update.updater import Updater
from treadle.update.worker.endpoint import Endpoint, worker_path
from treadle.weights.buffer_sizes import Memory

Topology = tuple[dict[str, list[Any]], dict[str, list[Any]]]

_SINGLE_HOST = "127.0.0.1"
_CALLED_OFF = 0
"""In place of a version: there is no update."""


@CheckpointEngineRegistry.register("treadle")
class TreadleCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """One actor's or rollout's part of updates.

    An update that fails commits nothing, and no rollout has begun to load. verl's manager then leaves its replicas
    aborted: resume them, and update again. Nothing is kept of the failed one: `prepare` begins anew.

    Args:
        bucket_size: Bytes of a bucket, from `update_weights_bucket_megabytes`.
        is_master: Whether this is actor 0, which has the store and the coordinator.
        directory: A directory for sockets, made with mode 0700, on every host.
        ledger: A directory that lasts, for the commit log; on actor 0's host.
        checkpoint: A directory of safetensors files with the names, shapes and dtypes of the rollouts. Weights are cast
            to these dtypes before they are sent.
        key: Where processes are on several hosts: a file that only its owner can read, the same on all.
        address: Where other hosts reach actor 0; needed with a key.
        deadline_s: Seconds of each wait.

    """

    wire_format = "named_tensors"

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        directory: str,
        ledger: str,
        checkpoint: str,
        key: str | None = None,
        address: str = _SINGLE_HOST,
        deadline_s: float = 300.0,
    ) -> None:
        if key is not None and address == _SINGLE_HOST and is_master:
            raise ValueError("with a key for several hosts, actor 0 needs the address at which they reach it: address=")
        self.is_master, self.address = is_master, address
        self.directory, self.ledger = Path(directory), Path(ledger)
        self.key = Path(key) if key is not None else None
        self.forms = {tensor.name: tensor for tensor in described(Path(checkpoint))}
        memory = Memory(4 * bucket_size, share=1.0, target_bytes=bucket_size, least_bytes=min(bucket_size, 1 << 20))
        self.options = UpdateOptions(memory, rollback="none", drain_s=0.0, deadline_s=deadline_s)
        self.held: Plain | None = None
        self.endpoint: Endpoint | None = None
        self.updater: Updater | None = None
        self._versions: AnnouncedVersions | None = None
        self._store: RankWorld | None = None
        self._num_actors = 0
        self._round: str | None = None
        self._finalized = False

    def prepare(self) -> dict[str, Any]:
        """Return where actor 0's store is, and the round that this process could go on with."""
        if not self._finalized:
            self._leave()
        if self.is_master and self._store is None:
            self._store = RankWorld.host(0, self.address)
        port = self._store.port if self._store is not None else 0
        return {"address": self.address, "port": port, "round": self._round}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> Topology:
        """Give all processes ranks, actors first. They keep their connections if all of them have the same ones."""
        size, master = actor_wg_world_size + rollout_world_size, metadata[0]
        rounds = {each["round"] for each in metadata}
        kept = rounds.pop() if len(rounds) == 1 else None
        kept = kept if kept is not None and kept.startswith(f"{size} ") else None
        same = {
            "num_actors": actor_wg_world_size,
            "size": size,
            "address": master["address"],
            "port": master["port"],
            "number": kept if kept is not None else f"{size} {uuid4().hex}",
        }

        def of(ranks: range) -> dict[str, list[Any]]:
            return {"rank": list(ranks)} | {name: [value] * len(ranks) for name, value in same.items()}

        return of(range(actor_wg_world_size)), of(range(actor_wg_world_size, size))

    def init_process_group(self, rank: int, num_actors: int, size: int, address: str, port: int, number: str) -> None:
        """Meet the others, unless this process has met them in the round before."""
        self._finalized = False
        if self._round == number:
            return
        self._leave()
        raw = self._store if self._store is not None else RankWorld.join(address, port, rank, size)
        world = RankWorld(PrefixStore(number, raw.store), rank, size)
        own_directory(self.directory, "others could connect to the rollouts in it")
        worker = rank - num_actors if rank >= num_actors else None
        if worker is not None:
            self._open(worker)
        self.updater = Updater(
            self.directory,
            ledger=self.ledger,
            worker=worker,
            key=self.key,
            address=self.address if self.is_master and self.key is not None else None,
            options=self.options,
            takeover=True,  # verl makes new engines at each start and retry, and its manager says which there are
            world=world,
        )
        self._versions = AnnouncedVersions(world)
        self._num_actors, self._round = num_actors, number

    async def send_weights(
        self, weights: Generator[tuple[str, torch.Tensor], None, None], global_steps: int | None = None
    ) -> dict[str, float]:
        """Draw all weights, and send this actor's share. The version is the step, or the next one after the last."""
        updater, versions = self._met()
        try:
            source = staged_share(weights, updater.rank, self._num_actors, self.forms)
        except BaseException:
            if self.is_master:
                versions.announce(_CALLED_OFF)
            self._leave()  # the others learn it at once
            raise
        if self.is_master:
            version = max(global_steps or 0, (peek(self.ledger).version or 0) + 1)
            versions.announce(version)
        else:
            version = _next(await asyncio.to_thread(versions.next))
        done = await asyncio.to_thread(updater.update, source, version)
        return {"treadle/version": float(version), "treadle/seconds": done.seconds["total"]}

    def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Return the tensors of the new version, once it is committed.

        No coroutine: it waits for the commit, and raises if there is none, before verl begins to load.
        """
        updater, versions = self._met()
        updater.update(None, _next(versions.next()))
        assert self.held is not None, "a rollout holds weights"
        return _each(self.held)

    def finalize(self) -> None:
        """Note that the update has succeeded: the next one goes on with these connections."""
        self._finalized = True

    def close(self) -> None:
        """Disconnect, and end the endpoint."""
        self._leave()
        self._store = None
        if self.endpoint is not None:
            self.endpoint.close()

    def _met(self) -> tuple[Updater, AnnouncedVersions]:
        if self.updater is None or self._versions is None:
            raise RuntimeError("init_process_group comes before weights are sent or received")
        return self.updater, self._versions

    def _leave(self) -> None:
        updater, self.updater, self._versions, self._round = self.updater, None, None, None
        if updater is not None:
            updater.close()

    def _open(self, worker: int) -> None:
        """Open the endpoint of this rollout, unless it is open."""
        if self.endpoint is not None and self.endpoint.path == worker_path(self.directory, worker):
            return
        if self.endpoint is not None:
            self.endpoint.close()
        held = {name: torch.zeros(form.shape, dtype=getattr(torch, form.dtype)) for name, form in self.forms.items()}
        self.held = Plain(held, tensors=self.forms)
        self.endpoint = Endpoint(self.held, self.directory, worker)


def _next(version: int) -> int:
    if version == _CALLED_OFF:
        raise RuntimeError("actor 0 could not draw the weights; its own error has the reason")
    return version


async def _each(held: Plain) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
    for name, tensor in held.held.items():
        yield name, tensor
