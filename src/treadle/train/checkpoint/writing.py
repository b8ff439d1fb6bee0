"""Writes a checkpoint's files beside its name, and gives it the name when all ranks have written theirs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from treadle.train.checkpoint import on_disk
from treadle.train.checkpoint.on_disk import FileFacts


@dataclass(frozen=True)
class DigestedResult(WriteResult):
    """Where a tensor was written to, and the facts of that file, which the rank that wrote it has taken."""

    facts: FileFacts


class PublishingWriter(FileSystemWriter):
    """Writes to `path` + .partial. The first rank publishes it after the last file of the last rank is on the disk."""

    def __init__(
        self, path: Path, extra: Mapping[str, Any], *, step: int, keep: int, say: Callable[[str], Any]
    ) -> None:
        self._directory, self._partial = path.parent, on_disk.partial_of(path)
        self._extra, self._step, self._keep, self._say = extra, step, keep, say
        super().__init__(self._partial)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Clear what earlier saves left, on the first rank, before any rank writes."""
        on_disk.remove_partial(self._directory)
        self._partial.mkdir(parents=True)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file and read it once more for its digest."""
        written = super().write_data(plan, planner).wait()
        facts = {name: on_disk.synced(self._partial / name) for name in {_file_of(each) for each in written}}
        done: Future[list[WriteResult]] = Future()
        done.set_result([DigestedResult(**vars(each), facts=facts[_file_of(each)]) for each in written])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish the checkpoint, on the first rank, after all have written."""
        super().finish(metadata, results)
        digested = [each for of_rank in results for each in of_rank if isinstance(each, DigestedResult)]
        on_disk.publish(self._partial, {_file_of(each): each.facts for each in digested}, self._extra)
        for step in on_disk.keep_newest(self._directory, self._step, self._keep):
            self._say(
                f"the checkpoint of step {step} is not one of this run, which saved step {self._step}: it was renamed "
                f"to {on_disk.directory_of(self._directory, step).name}{on_disk.ASIDE}"
            )


def _file_of(written: WriteResult) -> str:
    """Return the name of the file that has a tensor, as the checkpoint's metadata has it."""
    name: str = written.storage_data.relative_path
    return name
