"""A source from a directory of safetensors files. Each rank reads its part; all together read each byte once."""

from __future__ import annotations

import json
import struct
from pathlib import Path

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


def _header(file: Path) -> list[Tensor]:
    """Return the tensors of a file, from its header: a length of 8 bytes, then JSON."""
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        if length > _LONGEST_HEADER:
            raise ValueError(f"{file} has a header of {length} bytes; it is no safetensors file")
        header = json.loads(opened.read(length))
    tensors = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"{name} in {file} has dtype {entry['dtype']}; known are {', '.join(_DTYPES)}")
        tensors.append(Tensor(name, tuple(entry["shape"]), _DTYPES[entry["dtype"]]))
    return tensors


def _read(file: Path, pieces: list[Piece]) -> dict[Piece, torch.Tensor]:
    with brought_by("update", needed_by="reading checkpoints"):
        from safetensors import safe_open
    with safe_open(file, "pt") as opened:
        return {piece: opened.get_tensor(piece.tensor) for piece in pieces}
