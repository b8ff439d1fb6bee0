"""Tables on the terminal that commands share."""

from __future__ import annotations

from rich.table import Table


def rows_table(first: str, *columns: str) -> Table:
    """Make a table without lines: a column that may be folded, and columns of numbers to the right of it."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(first, overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table
