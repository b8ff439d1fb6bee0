"""torch's CSV with messages, the form that its runtime runs entry by entry (`_load_csv(path, format="compute_comms")`).

    0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD

torch adds nothing to such a file and checks nothing of it: the order of receives is the file's; gradients are divided
by the number of micro-batches (`scale_grads`), and reduced, at its REDUCE_GRAD entries only; and stages under FSDP
compute only between its UNSHARD and RESHARD entries. `treadle.files.torch_csv` reads it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Literal, TypeAlias, get_args

from treadle.files.torch_csv import Issued, issued, parse
from treadle.ir import Kind, Schedule
from treadle.passes.cells import lower_cells
from treadle.passes.issue_order import IssueOrder
from treadle.passes.late_receives import late_receives
from treadle.passes.torch_turns import torch_turns

Receives: TypeAlias = Literal["early", "late"]

MOST_UNSHARDED = 3
"""Stages that a rank holds whole at once under FSDP, the next to compute: as many as torch does."""


def dump(schedule: Schedule, *, receives: Receives | None = None, fsdp: bool = False) -> str:
    """Write a line a rank: cells, messages, where gradients are reduced, and with `fsdp` when stages are whole.

    Args:
        schedule: one that finishes, with one rank for each stage.
        receives: early, where the message is sent, as torch does of a file of cells; or late, as late as one
            communicator for each pair of ranks allows. None is the schedule's own order, or early.
        fsdp: the stages are under `fully_shard`.

    Raises:
        ValueError: the form cannot carry the schedule, or it does not finish.

    """
    if receives not in (None, *get_args(Receives)):
        raise ValueError(f"receives are {' or '.join(get_args(Receives))}, got {receives!r}; None keeps the order")
    if receives is not None or not schedule.issue:
        schedule = replace(schedule, issue=())
        if schedule.placement.num_pipes == 1:  # others `issued` refuses
            schedule = _ordered(schedule, receives)
    lines = []
    for rank, entries in enumerate(issued(schedule)):
        words = _words(entries, schedule.placement.stages[rank], schedule.num_microbatches, fsdp=fsdp)
        lines.append(",".join(words) + "\n")
    return "".join(lines)


def _ordered(schedule: Schedule, receives: Receives | None) -> Schedule:
    """Give a schedule an order of issue."""
    program = lower_cells(schedule)
    turns = torch_turns(program)
    if turns is None:
        raise ValueError(
            f"{schedule.name} does not finish, so its messages have no order; `treadle verify` shows why, and "
            "`format='torch-csv'` writes its cells"
        )
    late = receives == "late"
    order = late_receives(program, turns) if late else IssueOrder.sorted_by(program, turns)
    return replace(schedule, issue=order.turns(program))


def _words(entries: Sequence[Issued], stages: tuple[int, ...], num_mb: int, *, fsdp: bool) -> Iterator[str]:
    """Yield the entries of a rank, with those of its stages.

    A stage's gradients are reduced after its last backward; under FSDP it is whole while it is among the next to
    compute. These entries stand between the sends of a cell and the receives of the next.
    """
    cells = [at for at, entry in enumerate(entries) if entry.cell is not None]
    actions = [cell.actions if (cell := entries[at].cell) is not None else () for at in cells]
    computes = [[stages[action.chunk] for action in each] for each in actions]
    whole: set[int] = set()
    left = Counter(dict.fromkeys(stages, num_mb))
    for place, (at, end) in enumerate(pairwise([-1, *cells, len(entries)])):
        words = [entry.word for entry in entries[at + 1 : end]]
        sends = max((1 + k for k, word in enumerate(words) if "SEND" in word), default=0)
        yield from words[:sends]
        for action in actions[place - 1] if place else ():
            left[stages[action.chunk]] -= action.kind in (Kind.B, Kind.W)
            if action.kind in (Kind.B, Kind.W) and not left[stages[action.chunk]]:
                yield f"{stages[action.chunk]}REDUCE_GRAD"
        following = _next_stages(computes[place:]) if fsdp else []
        yield from (f"{stage}RESHARD" for stage in sorted(whole - set(following)))
        yield from (f"{stage}UNSHARD" for stage in following if stage not in whole)
        whole = set(following)
        yield from words[sends:]
        yield from (entry.word for entry in entries[end : end + 1])


def _next_stages(computes: Sequence[Sequence[int]]) -> list[int]:
    """Return the stages that compute next, the halves of a pair together."""
    found: dict[int, None] = {}
    for stages in computes:
        found.update(dict.fromkeys(stages))
        if len(found) >= MOST_UNSHARDED:
            break
    return list(found)


__all__ = ["Receives", "dump", "parse"]
