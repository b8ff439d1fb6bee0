"""Values of any length from each rank of a group, to all of them."""

from __future__ import annotations

import json
from typing import Any

import torch

from treadle.dist.groups import Group
from treadle.dist.streams import HOST_MEMORY


def gather_json(group: Group, value: object) -> list[Any]:
    """Return every rank's value, as JSON has it, in the order of its ranks. The group is one for control."""
    payload = json.dumps(value).encode()
    size = torch.tensor([len(payload)], dtype=torch.int64, device=HOST_MEMORY)
    sizes = [int(each) for each in group.all_gather(size)]
    room = torch.zeros(max(sizes), dtype=torch.uint8, device=HOST_MEMORY)
    room[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    return [json.loads(row[:size].numpy().tobytes()) for row, size in zip(group.all_gather(room), sizes, strict=True)]
