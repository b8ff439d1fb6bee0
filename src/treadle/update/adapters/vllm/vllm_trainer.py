"""Treadle in vLLM's registry of trainer engines: vLLM's own loop for RL sends through it.

    register()
    trainer = WeightTransferTrainerFactory.trainer_init(
        TreadleTrainerInit(directory, ledger, num_trainers=2, num_workers=4, port=29600, rank=rank),
        client=client, source=ModuleSource(model),
    )
    trainer.send_weights()  # on every trainer rank

vLLM's workers have Treadle as their weight transfer engine (`transfer.py`), and a `Replica` before them. `trainer_init`
starts an agent beside each worker, which joins the trainer's ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import msgspec
import torch
from vllm.distributed.weight_transfer import TrainerWeightTransferEngine, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import TrainerInitInfo

from treadle.dist.rank_world import RankWorld
from treadle.update.adapters.vllm.trainer_source import source_of
from treadle.update.agent import Meeting
from treadle.update.announced_versions import AnnouncedVersions
from treadle.update.coordinator.commit_log import peek
from treadle.update.update_options import UpdateOptions
from treadle.update.updated import Updated
from treadle.update.updater import Updater

BACKEND = "treadle"


@dataclass
class TreadleTrainerInit(TrainerInitInfo):  # type: ignore[misc]
    """Where the workers are, and how updates are done. The same on all trainer ranks but for `rank`."""

    backend: ClassVar[str] = BACKEND

    directory: str
    """The directory of the workers' sockets; on a host without workers any of mode 0700, with a `key`."""
    ledger: str
    """A directory that lasts, for the commit log. Used on rank 0."""
    num_trainers: int
    num_workers: int
    port: int
    """A free port on rank 0's host, where all ranks meet; 0 takes any where there is one trainer rank."""
    address: str = "127.0.0.1"
    """Where others reach rank 0's host."""
    key: str | None = None
    version: int = 1
    """The least version of the next update, which is otherwise the one after the committed one."""
    options: UpdateOptions = field(default_factory=UpdateOptions)
    takeover: bool = False
    device: str | None = None
    """Where buffers are: "cpu" sends through the host; by default on the devices of the weights and the engine."""


class TreadleTrainer(TrainerWeightTransferEngine[TreadleTrainerInit]):  # type: ignore[misc]
    """A trainer engine whose updates all workers serve, or none does."""

    init_info_cls = TreadleTrainerInit

    def __init__(
        self,
        *,
        client: Any,
        source: Any = None,
        is_sender: bool = True,
        rank: int = 0,
        updater: Updater,
        versions: AnnouncedVersions,
    ) -> None:
        self.client, self.source, self.is_sender, self.rank = client, source, is_sender, rank
        self.updater, self._versions = updater, versions
        self._ledger: Path | None = None
        self._num_trainers, self._least = 1, 1
        self.done: Updated | None = None

    @classmethod
    def trainer_init(cls, init_info: TreadleTrainerInit, *, client: Any, source: Any = None) -> Self:
        """Meet the other ranks. Rank 0 asks the workers to start theirs."""
        if source is None:
            raise ValueError(
                "Treadle sends a WeightSource in each round; give source=, for example ModuleSource(model)"
            )
        place, key = (init_info.address, init_info.port), init_info.key
        if init_info.rank == 0:
            world = RankWorld.host(init_info.num_trainers, *place)
            client.init_weight_transfer_engine({"meeting": msgspec.to_builtins(Meeting(place[0], world.port, key))})
        else:
            world = RankWorld.join(*place, init_info.rank, init_info.num_trainers)
        updater = Updater(
            Path(init_info.directory),
            ledger=Path(init_info.ledger),
            worker=None,
            key=Path(key) if key is not None else None,
            address=init_info.address if init_info.rank == 0 else None,
            options=init_info.options,
            device=torch.device(init_info.device) if init_info.device is not None else None,
            takeover=init_info.takeover,
            world=world,
            agents=init_info.num_workers,
        )
        rank, versions = init_info.rank, AnnouncedVersions(world)
        made = cls(client=client, source=source, is_sender=rank == 0, rank=rank, updater=updater, versions=versions)
        made._ledger = Path(init_info.ledger) if rank == 0 else None
        made._num_trainers, made._least = init_info.num_trainers, init_info.version
        return made

    def send_weights(self) -> None:
        """Update all workers to the next version. Every trainer rank calls it.

        Rank 0 then makes vLLM's own calls, which check that the version is served.

        Raises:
            UpdateError: Nothing was committed, and workers serve the version before; a later call may succeed.

        """
        if self._ledger is not None:
            version = max(self._least, (peek(self._ledger).version or 0) + 1)
            self._versions.announce(version)
        else:
            version = self._versions.next()
        self.done = self.updater.update(source_of(self.source, self.rank, self._num_trainers), version)
        if self.is_sender:
            self.client.start_weight_update()
            self.client.update_weights({"version": version})
            self.client.finish_weight_update(str(version))

    def shutdown(self) -> None:
        """Disconnect from the other ranks. Workers go on serving; their agents wait for other ranks."""
        self.updater.close()


def register() -> None:
    """Add Treadle to vLLM's registry of trainer engines; may be called again."""
    if BACKEND not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine(BACKEND, TreadleTrainer)
