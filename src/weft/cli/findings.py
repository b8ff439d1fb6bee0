"""A report for a person: each finding with its chain, and the row with a caret under the place."""

from __future__ import annotations

from rich.markup import escape

from weft.cli.terminal import out
from weft.ir import Schedule
from weft.verify import Finding, Report

SHOWN = 5
"""Findings shown in full unless asked for all: the first ones are usually the cause of the rest."""


def print_report(report: Report, schedule: Schedule, *, everything: bool) -> None:
    """The findings, or the one line that says it is clean."""
    if report.clean:
        out.print(f"[green]{report}[/]", soft_wrap=True)
        return
    shown = report.findings if everything else report.findings[:SHOWN]
    for finding in shown:
        _print_finding(finding, schedule)
    left = len(report.findings) - len(shown)
    if left:
        out.print(f"... and {left} more, often consequences of these (--all shows them)", soft_wrap=True)


def _print_finding(finding: Finding, schedule: Schedule) -> None:
    out.print(f"[bold red]{finding.code}[/] rank {finding.rank}: {escape(finding.message)}", soft_wrap=True)
    for step in finding.steps:
        out.print(f"    {escape(step)}", soft_wrap=True)
    if len(finding.steps) > 1:
        out.print("    ... and so back to the first", soft_wrap=True)
    if finding.cell is not None:
        for line in row_with_caret(schedule, finding.rank, finding.cell, max(40, out.width - 4)):
            out.print(f"    [dim]{escape(line)}[/]", soft_wrap=True)


def row_with_caret(schedule: Schedule, rank: int, cell: int, width: int) -> tuple[str, str]:
    """The part of a row around a cell, and a line with carets under it."""
    tokens = [str(c) for c in schedule.rows[rank]]
    first = last = cell

    def length() -> int:
        return len(f"{rank}: ") + len(" ".join(tokens[first : last + 1])) + 8

    while (first > 0 or last < len(tokens) - 1) and length() < width:
        first, last = max(0, first - 1), min(len(tokens) - 1, last + 1)
    head = f"{rank}: " + ("... " if first > 0 else "")
    tail = " ..." if last < len(tokens) - 1 else ""
    before = head + "".join(token + " " for token in tokens[first:cell])
    return head + " ".join(tokens[first : last + 1]) + tail, " " * len(before) + "^" * len(tokens[cell])
