"""Writes a checkpoint's files beside its name, and gives it the name when all ranks have written theirs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from treadle.train.checkpoint import files


class PublishingWriter(FileSystemWriter):
    """Writes to `path` + .partial. The first rank publishes it after the last file of the last rank is on the disk."""

    def __init__(self, path: Path, extra: Mapping[str, Any], keep: int) -> None:
        self._directory, self._partial = path.parent, path.with_name(path.name + files.PARTIAL)
        self._extra, self._keep = extra, keep
        super().__init__(self._partial)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Clear what earlier saves left, on the first rank, before any rank writes."""
        files.remove_partial(self._directory)
        self._partial.mkdir(parents=True)
        return super().prepare_global_plan(plans)

    def finish(self, metadata: Metadata, results: Any) -> None:
        """Publish the checkpoint, on the first rank, after all have written."""
        super().finish(metadata, results)
        files.publish(self._partial, self._extra)
        files.keep_newest(self._directory, self._keep)
