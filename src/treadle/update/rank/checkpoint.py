"""A source from a directory of safetensors files. Each rank reads its part; all together read each byte once.

Files are written in place by those who save them, the index of several ones last. So a directory is whole once its
index names all files, and each file is as long as its header says.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch

from treadle.host.extras import brought_by
from treadle.update.rank.source import Source
from treadle.weights.layouts import spread
from treadle.weights.tensor_boxes import Piece, Tensor

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "BOOL": "bool",
}
_LONGEST_HEADER = 100 << 20


def described(directory: Path) -> dict[Tensor, Path]:
    """Return the tensors of all files, and the file of each. Reads headers only."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{directory} has no .safetensors files; give the directory of a checkpoint")
    where: dict[str, Path] = {}
    found: dict[Tensor, Path] = {}
    for file in files:
        for tensor in _header(file):
            if tensor.name in where:
                raise ValueError(f"{tensor.name} is in {where[tensor.name].name} and in {file.name}")
            where[tensor.name] = found[tensor] = file
    return found


def read_checkpoint(directory: Path, rank: int, world: int) -> Source:
    """One rank's part: whole tensors, about as many bytes on every rank."""
    found = described(directory)
    tensors = {tensor.name: tensor for tensor in found}
    where = {tensor.name: file for tensor, file in found.items()}
    own = spread(tensors.values(), world).pieces[rank]
    by_file: dict[Path, list[Piece]] = {}
    for piece in own:
        by_file.setdefault(where[piece.tensor], []).append(piece)
    held: dict[Piece, torch.Tensor] = {}
    for file, pieces in by_file.items():
        held |= _read(file, pieces)
    return Source(tensors, held)


def unfinished(directory: Path) -> str | None:
    """Return why a directory is no whole checkpoint, or not yet; None if it is one. Reads headers only."""
    files = {file.name: file for file in directory.glob("*.safetensors")}
    indices = sorted(directory.glob("*.safetensors.index.json"))
    if files and not indices and files.keys() != {"model.safetensors"}:
        return (
            "it has parts and no *.safetensors.index.json, which is written after them and names them all; only a "
            "single model.safetensors needs none"
        )
    try:
        for index in indices:
            missing = _named_in(index) - files.keys()
            if missing:
                return f"{index.name} names {min(missing)}, which is not there"
        described(directory)
        for file in files.values():
            start, header = _parsed(file)
            size = start + max((entry["data_offsets"][1] for entry in header.values()), default=0)
            if file.stat().st_size != size:
                return f"{file.name} has {file.stat().st_size:,} bytes of the {size:,} that its header describes"
    except ValueError as error:
        return str(error)
    except OSError as error:
        return f"{Path(str(error.filename)).name}: {error.strerror}"
    return None


def _named_in(index: Path) -> set[str]:
    """Return the files that an index names."""
    try:
        return set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{index.name} is torn, or no index: it has no weight_map from tensors to files") from None


def _header(file: Path) -> list[Tensor]:
    """Return the tensors of a file."""
    tensors = []
    for name, entry in _parsed(file)[1].items():
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"{name} in {file} has dtype {entry['dtype']}; known are {', '.join(_DTYPES)}")
        tensors.append(Tensor(name, tuple(entry["shape"]), _DTYPES[entry["dtype"]]))
    return tensors


def _parsed(file: Path) -> tuple[int, dict[str, Any]]:
    """Return where a file's elements begin, and what its header says of each tensor: a length of 8 bytes, then JSON."""
    with file.open("rb") as opened:
        first = opened.read(8)
        (length,) = struct.unpack("<Q", first) if len(first) == 8 else (0,)
        if length > _LONGEST_HEADER:
            raise ValueError(f"{file} has a header of {length} bytes; it is no safetensors file")
        text = opened.read(length)
    try:
        header = {name: entry for name, entry in json.loads(text).items() if name != "__metadata__"}
        for entry in header.values():
            entry["dtype"], entry["shape"], entry["data_offsets"]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{file} has a torn header, or is no safetensors file") from None
    return 8 + length, header


def _read(file: Path, pieces: list[Piece]) -> dict[Piece, torch.Tensor]:
    with brought_by("update", needed_by="reading checkpoints"):
        from safetensors import safe_open
    with safe_open(file, "pt") as opened:
        return {piece: opened.get_tensor(piece.tensor) for piece in pieces}
