"""The order in which Megatron-core's hosts issue cells and messages: `python benchmarks/megatron_issue.py PP VPP M`.

Prints a line a rank: `3F1` is a cell (stage 3, forward, micro-batch 1), `>2` a send to rank 2, `<2` a receive from it,
`+<2` one in the same batch. Megatron's own schedule functions run, a rank after the other, on torch's fake backend,
which moves nothing; so no numbers mean anything, and their order depends on none. `overlap_p2p_comm` is on where ranks
have several chunks, and messages are batched where they have one, as Megatron's defaults are. Tried with 0.16.1.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))  # Megatron on a CPU is the tests' one

from tests.support.megatron_cpu import megatron
from treadle.integrations.marks import mark_megatron
from treadle.ir import Action, Kind, Placement, Schedule
from treadle.ir.turn import CELL, Turn, parse_turn


def schedule_of(lines: Sequence[str], vpp: int) -> Schedule:
    """Return what is printed as a schedule with an order of issue."""
    rows: list[tuple[Action, ...]] = []
    issue: list[tuple[Turn, ...]] = []
    pp = len(lines)
    for line in lines:
        turns = [parse_turn(word) for word in line.split()]
        cells = [word for word, turn in zip(line.split(), turns, strict=True) if turn is None]
        parts = [(word, kind, word.split(kind)) for kind in "FB" for word in cells if kind in word]
        place = {word: Action(Kind[kind], int(mb), int(stage) // pp) for word, kind, (stage, mb) in parts}
        rows.append(tuple(place[word] for word in cells))
        issue.append(tuple(turn if turn is not None else CELL for turn in turns))
    num_mb = 1 + max(action.mb for row in rows for action in row)
    return Schedule("megatron", Placement.loop(pp, vpp), num_mb, tuple(rows), issue=tuple(issue))


def record(rank: int, pp: int, vpp: int, num_mb: int) -> list[str]:
    """Run a step as one rank; return what it issued."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the fake backend

    issued: list[str] = []
    isend, irecv = dist.isend, dist.irecv

    def send(tensor: Any, dst: int, *args: Any, **given: Any) -> Any:
        issued.append(f">{dst}")
        return isend(tensor, dst, *args, **given)

    def receive(tensor: Any, src: int, *args: Any, **given: Any) -> Any:
        issued.append(f"<{src}")
        return irecv(tensor, src, *args, **given)

    def batch_isend_irecv(ops: Any) -> list[Any]:
        words = [(">" if op.op is isend else "<") + str(op.peer) for op in ops]
        issued.extend([*words[:1], *(f"+{word}" for word in words[1:])])
        return []

    @contextmanager
    def cell(name: str) -> Iterator[None]:
        yield
        issued.append(name.removeprefix("PP:"))

    dist.init_process_group("fake", rank=rank, world_size=pp, store=HashStore())
    batched = patch.object(dist, "batch_isend_irecv", batch_isend_irecv)
    single = patch.multiple(dist, isend=send, irecv=receive) if vpp > 1 else nullcontext()
    with megatron(pp, vpp, rank) as step, mark_megatron(cell), batched, single:
        step(num_mb)
    dist.destroy_process_group()
    return issued


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    size = [int(word) for word in sys.argv[1:4]]
    for each in range(size[0]):
        print(" ".join(record(each, *size)), flush=True)
