"""torch's own generators as an independent oracle: the same cells on the same ranks, bubbles aside."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from treadle.ir import Cell, Pair, Schedule
from treadle.schedules import generate

torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")

# (P, V, M). torch runs interleaved in max(1, M//P) equal rounds: M need not be a multiple of P, nor reach it.
CASES = {
    ("interleaved", "ScheduleInterleaved1F1B"): [(2, 2, 4), (4, 2, 10), (4, 3, 3), (5, 2, 7), (8, 4, 24)],
    ("zb-h1", "ScheduleInterleavedZeroBubble"): [(1, 1, 3), (2, 1, 6), (4, 1, 10), (5, 1, 3), (7, 1, 21)],
    ("zb-v", "ScheduleZBVZeroBubble"): [(1, 2, 4), (2, 2, 3), (3, 2, 11), (4, 2, 8), (7, 2, 20)],
    ("dualpipev", "ScheduleDualPipeV"): [(1, 2, 5), (2, 2, 4), (3, 2, 7), (4, 2, 10), (7, 2, 21)],
}


def torch_order(class_name: str, pp: int, vpp: int, num_mb: int) -> list[list[Any]]:
    """The rows of torch's schedule, built over stand-ins that answer what its constructor asks of a stage."""
    stages = [SimpleNamespace(num_stages=pp * vpp, group_size=pp, group_rank=0, submod=None) for _ in range(vpp)]
    order = getattr(torch_schedules, class_name)(stages, num_mb).pipeline_order
    return [[action for action in order[rank] if action is not None] for rank in range(pp)]


def in_torch_words(schedule: Schedule, rank: int, cell: Cell) -> Any:
    """The cell as torch's own _Action."""
    parts = tuple(
        torch_schedules._Action(
            schedule.placement.stage(rank, action.chunk),
            torch_schedules._ComputationType(action.kind.name),
            action.mb,
        )
        for action in cell.actions
    )
    overlap = torch_schedules._ComputationType.OVERLAP_F_B
    return torch_schedules._Action(-1, overlap, None, parts) if isinstance(cell, Pair) else parts[0]


@pytest.mark.parametrize(
    ("name", "class_name", "size"),
    [(name, class_name, size) for (name, class_name), sizes in CASES.items() for size in sizes],
)
def test_rows_equal_torchs(name: str, class_name: str, size: tuple[int, int, int]) -> None:
    pp, vpp, num_mb = size
    schedule = generate(name, pp=pp, vpp=vpp, microbatches=num_mb)
    for rank, row in enumerate(torch_order(class_name, pp, vpp, num_mb)):
        ours = [in_torch_words(schedule, rank, cell) for cell in schedule.rows[rank]]
        assert ours == row, f"rank {rank}"


@pytest.mark.parametrize(("pp", "num_mb"), [(2, 5), (3, 7), (4, 13), (5, 11), (6, 20)])
def test_zb_h1_equals_torchs_rows_where_torch_refuses_the_size(pp: int, num_mb: int) -> None:
    """With a stage a rank, rounds change nothing; torch asks for whole ones, but makes its rows without."""
    with pytest.raises(ValueError, match="multiple of the number of rounds"):
        torch_order("ScheduleInterleavedZeroBubble", pp, 1, num_mb)
    size = SimpleNamespace(n_local_stages=1, microbatches_per_round=pp, pp_group_size=pp, _n_microbatches=num_mb)
    schedule = generate("zb-h1", pp=pp, microbatches=num_mb)
    for rank in range(pp):
        row = torch_schedules.ScheduleInterleavedZeroBubble._calculate_single_rank_operations(size, rank)
        ours = [in_torch_words(schedule, rank, cell) for cell in schedule.rows[rank]]
        assert ours == [action for action in row if action is not None], f"rank {rank}"
