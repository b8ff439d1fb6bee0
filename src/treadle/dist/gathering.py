"""Bytes of any length from each rank of a group, to all of them."""

from __future__ import annotations

import torch

from treadle.dist.groups import Group
from treadle.dist.streams import HOST_MEMORY


def gather_bytes(group: Group, payload: bytes) -> list[bytes]:
    """Returns every rank's bytes, in the order of its ranks. The group is one for control."""
    size = torch.tensor([len(payload)], dtype=torch.int64, device=HOST_MEMORY)
    sizes = [int(each) for each in group.all_gather(size)]
    room = torch.zeros(max(sizes), dtype=torch.uint8, device=HOST_MEMORY)
    if payload:
        room[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    rows = group.all_gather(room) if max(sizes) else [room for _ in sizes]
    return [bytes(row[:size].tolist()) for row, size in zip(rows, sizes, strict=True)]
