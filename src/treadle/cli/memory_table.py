"""The memory of a pipeline's ranks by part, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from treadle.cli.tables import rows_table
from treadle.estimate.cluster import GIB
from treadle.estimate.job_memory import MemoryEstimate

if TYPE_CHECKING:
    from rich.table import Table

_SHORT = {"parameters": "params", "gradients": "grads", "activations": "saved", "temporary": "temp"}
"""Names of the parts of memory that fit into 80 columns."""


def memory_table(memory: Sequence[MemoryEstimate]) -> Table:
    """Return a row for each rank; ranks in a row that hold the same share a line."""
    table = rows_table("rank", *(_SHORT.get(name, name) for name in memory[0]._fields), "total, GiB")
    start = 0
    for rank in range(1, len(memory) + 1):
        if rank == len(memory) or memory[rank] != memory[start]:
            name = str(start) if rank - start == 1 else f"{start}-{rank - 1}"
            table.add_row(name, *(f"{part / GIB:.1f}" for part in (*memory[start], memory[start].total)))
            start = rank
    return table
