"""Makes updaters on ranks of a pool, some of which have made more of them before than others.

Updaters find each other by a number that each process counts up (`rendezvous.py`), not by their process group.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from treadle.update import Updater
from treadle.update.rank import rendezvous


def make_updater(*args: Any, **named: Any) -> Updater:
    """Return `Updater(...)` on every rank of the default group, all of them with the same number."""
    mine = next(rendezvous._NUMBERS)
    numbers = [0] * dist.get_world_size()
    dist.all_gather_object(numbers, mine)
    for _ in range(max(numbers) - mine):
        next(rendezvous._NUMBERS)
    return Updater(*args, **named)
