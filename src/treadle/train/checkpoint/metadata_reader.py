"""Reads a checkpoint's `.metadata`, a pickle, by a list of classes that torch writes there: no other is imported."""

from __future__ import annotations

import pathlib
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as written
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.serialization import _get_layout

from treadle.fields.plain_pickle import UnreadablePickleError, load_plain
from treadle.train.checkpoint.on_disk import METADATA

_CLASSES = (
    *(Metadata, StorageMeta, written.MetadataIndex, written.TensorStorageMetadata, written.BytesStorageMetadata),
    *(written.ChunkStorageMetadata, written.TensorProperties, written._MEM_FORMAT_ENCODING, _StorageInfo),
)
KNOWN: dict[str, Any] = {
    **{f"{each.__module__}.{each.__qualname__}": each for each in _CLASSES},
    **{f"torch.{name}": each for name, each in vars(torch).items() if isinstance(each, torch.dtype)},
    "torch.Size": torch.Size,
    "torch.serialization._get_layout": _get_layout,
    **{f"{module}.PosixPath": PurePath for module in (pathlib.__name__, "pathlib._local")},  # the latter from 3.13 on
}
"""What a `.metadata` may name: `FileSystemWriter.finish` pickles a `Metadata`, whose fields have these types."""


class CheckpointReader(FileSystemReader):
    """Reads the files of a checkpoint. torch's own reader unpickles `.metadata`, which runs what the file says.

    Tensors are read by `torch.load(weights_only=True)`.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what the checkpoint contains, read once.

        Raises:
            UnreadablePickleError: It is damaged, or names something that torch does not write there.

        """
        if self._metadata is None:
            read = load_plain((Path(self.path) / METADATA).read_bytes(), KNOWN)
            if not isinstance(read, Metadata) or not isinstance(read.state_dict_metadata, dict):
                raise UnreadablePickleError(f"it is {type(read).__name__}, and not a checkpoint's metadata")
            if read.storage_meta is None:
                read.storage_meta = StorageMeta()
            self._metadata = read
        self._metadata.storage_meta.load_id = self.load_id  # type: ignore[union-attr]
        return self._metadata
