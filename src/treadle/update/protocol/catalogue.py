"""The catalogue: the layouts of all ranks in one message, with every tensor, box and layout once.

Ranks enter with digests of their source's and their worker's layout, and one rank of each digest tells the layout. So
the message grows with the number of different layouts, not of devices: replicas are free. It is compressed (to a fifth:
names and numbers repeat), since one process sends it to all ranks.

    tensors   q, k             layouts   (q, [0:8]) (k, [0:8])        has     0 0 0 0
    boxes     [0:8], [8:16]              (q, [8:16]) (k, [8:16])      wants   0 1 0 1
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from treadle.update.protocol.control import Catalogue, Listed
from treadle.update.protocol.update_messages import WeightLayout
from treadle.weights.collecting import uncollected
from treadle.weights.tensor_boxes import Box, Piece, Tensor
from treadle.wire.errors import WireError
from treadle.wire.frames import MOST_BYTES

MOST_COPIES = 64
"""Most buckets that an engine may copy: with more, nothing is left for buffers."""


@dataclass(frozen=True)
class Known:
    """Each rank's layouts and free device memory, in bytes. Ranks that are alike share one object."""

    has: tuple[WeightLayout, ...]
    wants: tuple[WeightLayout, ...]
    free_bytes: tuple[int, ...]


def layout_digest(layout: WeightLayout) -> str:
    """A layout's digest."""
    return hashlib.blake2b(msgspec.msgpack.encode(layout), digest_size=16).hexdigest()


def check_layout(layout: WeightLayout) -> None:
    """Raise WireError where a tensor is listed twice, or a piece's tensor is not."""
    named = {tensor.name for tensor in layout.tensors}
    if len(named) < len(layout.tensors):
        raise WireError("a layout lists a tensor twice")
    for piece in layout.pieces:
        if piece.tensor not in named:
            raise WireError(f"{piece.tensor} {piece.box} is listed, and {piece.tensor} itself is not")
    for name, taken in layout.tied:
        if name in named or taken not in named:
            raise WireError(f"{name} is said to be tied to {taken}; only the latter may be a tensor of the layout")
    if not 0 <= layout.copies <= MOST_COPIES:
        raise WireError(f"an engine copies 0 to {MOST_COPIES} buckets while it loads, a layout says {layout.copies}")


def list_layouts(
    told: Mapping[str, WeightLayout], has: Sequence[str], wants: Sequence[str], free_bytes: Sequence[int]
) -> bytes:
    """The packed catalogue of layouts by digest, and each rank's digests. Raises WireError for an invalid layout."""
    tensors: dict[Tensor, int] = {}
    boxes: dict[Box, int] = {}
    with uncollected():
        layouts = tuple(_listed(layout, tensors, boxes) for layout in told.values())
    number = {digest: at for at, digest in enumerate(told)}
    had, wanted = (tuple(number[digest] for digest in side) for side in (has, wants))
    return pack(Catalogue(tuple(tensors), tuple(boxes), layouts, had, wanted, tuple(free_bytes)))


def _listed(layout: WeightLayout, tensors: dict[Tensor, int], boxes: dict[Box, int]) -> Listed:
    check_layout(layout)
    number = {tensor.name: tensors.setdefault(tensor, len(tensors)) for tensor in layout.tensors}
    pieces: list[int] = []
    for piece in layout.pieces:
        pieces += (number[piece.tensor], boxes.setdefault(piece.box, len(boxes)))
    idle = set(number.values()).difference(pieces[::2])
    return Listed(tuple(pieces), tuple(sorted(idle)), layout.copies, layout.tied)


def read_layouts(packed: bytes) -> Known:
    """Read a packed catalogue. Raises WireError where it is malformed, or an index is out of range."""
    catalogue = unpack(packed)
    if not len(catalogue.has) == len(catalogue.wants) == len(catalogue.free_bytes):
        raise WireError("a catalogue has as many ranks that have, that want, and that have memory")
    try:
        with uncollected():
            layouts = [_spelled(listed, catalogue) for listed in catalogue.layouts]
        has, wants = (tuple(layouts[at] for at in side) for side in (catalogue.has, catalogue.wants))
        return Known(has, wants, catalogue.free_bytes)
    except IndexError:
        raise WireError("a catalogue names a tensor, a box or a layout that is not in it") from None


def _spelled(listed: Listed, catalogue: Catalogue) -> WeightLayout:
    tensors, boxes, numbers = catalogue.tensors, catalogue.boxes, listed.pieces
    named = dict.fromkeys((*numbers[::2], *listed.idle))
    if len(numbers) % 2:
        raise WireError("a catalogue has a tensor and a box for each piece")
    pieces = zip(numbers[::2], numbers[1::2], strict=True)
    own = tuple(Piece(tensors[t].name, boxes[b]) for t, b in pieces)
    return WeightLayout(tuple(tensors[at] for at in named), own, listed.copies, listed.tied)


def pack(catalogue: Catalogue) -> bytes:
    """Encode and compress a catalogue."""
    return zlib.compress(msgspec.msgpack.encode(catalogue), level=1)


def unpack(packed: bytes, most_bytes: int = MOST_BYTES) -> Catalogue:
    """Decompress and decode. Raises WireError, also where it would grow beyond `most_bytes`."""
    unpacker = zlib.decompressobj()
    try:
        body = unpacker.decompress(packed, most_bytes)
        whole = unpacker.eof and not unpacker.unused_data
        catalogue = msgspec.msgpack.decode(body, type=Catalogue) if whole else None
    except (zlib.error, msgspec.DecodeError, ValueError, RecursionError) as error:
        raise WireError(f"a catalogue of {len(packed)} bytes is malformed: {error}") from None
    if catalogue is None:
        raise WireError(
            f"a catalogue of {len(packed)} bytes does not end there, or is larger than {most_bytes} unpacked"
        )
    return catalogue
