"""The table of digests after a bucket: read and written at once, as each access to a device's bytes is a copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from treadle.dist.streams import Download
from treadle.update.memory.copying import DIGEST_BYTES, copy


def read_digests(raw: torch.Tensor, offset_bytes: int, checks: Sequence[int]) -> dict[int, bytes]:
    """Return the entries `checks` of the table at an offset of a buffer's bytes."""
    if not checks:
        return {}
    end = offset_bytes + DIGEST_BYTES * (max(checks) + 1)
    if end > len(raw):
        raise ValueError(f"a table of digests up to byte {end} is outside of a buffer of {len(raw)}")
    table = Download(raw[offset_bytes:end]).tensor().numpy().tobytes()
    return {check: table[DIGEST_BYTES * check : DIGEST_BYTES * (check + 1)] for check in set(checks)}


def write_digests(raw: torch.Tensor, offset_bytes: int, digests: Mapping[int, bytes]) -> None:
    """Write entries 0, 1, ... of the table: all of them."""
    table = b"".join(digests[check] for check in range(len(digests)))
    if table:
        made = torch.frombuffer(bytearray(table), dtype=torch.uint8)
        copy(raw[offset_bytes : offset_bytes + len(table)], made)
