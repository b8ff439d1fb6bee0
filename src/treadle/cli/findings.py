"""A report for a person: each finding with its chain, and the row or the lane with a caret under the place."""

from __future__ import annotations

from rich.markup import escape

from treadle.cli.terminal import out
from treadle.ir import Schedule
from treadle.ir.program import Program
from treadle.verifier import Finding, VerifyReport
from treadle.verifier.finding import more_of

SHOWN = 5
"""Findings shown in full unless asked for all: the first ones are usually the cause of the rest."""


def print_report(report: VerifyReport, schedule: Schedule | None, program: Program | None, *, everything: bool) -> None:
    """The findings, or the one line that says it is clean."""
    if report.clean:
        out.print(f"[green]{report}[/]", soft_wrap=True)
        return
    shown = report.findings if everything else report.findings[:SHOWN]
    for finding in shown:
        _print_finding(finding, schedule, program)
    left = len(report.findings) - len(shown)
    if left:
        out.print(f"... and {left} more, often consequences of these (--all shows them)", soft_wrap=True)
    for code in report.cut:
        out.print(more_of(code), soft_wrap=True)


def _print_finding(finding: Finding, schedule: Schedule | None, program: Program | None) -> None:
    out.print(f"[bold red]{finding.code}[/] rank {finding.rank}: {escape(finding.message)}", soft_wrap=True)
    for step in finding.steps:
        out.print(f"    {escape(step)}", soft_wrap=True)
    if len(finding.steps) > 1:
        out.print("    ... and so back to the first", soft_wrap=True)
    for line in _place(finding, schedule, program):
        out.print(f"    [dim]{escape(line)}[/]", soft_wrap=True)


def _place(finding: Finding, schedule: Schedule | None, program: Program | None) -> tuple[str, ...]:
    width = max(40, out.width - 4)
    if program is not None and finding.op is not None:
        lane = int(program.lane_of[finding.op])
        first, last = int(program.lane_ptr[lane]), int(program.lane_ptr[lane + 1])
        low = max(first, finding.op - 20)
        tokens = [program.op(op).label for op in range(low, min(last, finding.op + 21))]
        return with_caret(f"{program.lane(lane)}: ", tokens, finding.op - low, width, cut=low > first)
    if program is None and schedule is not None and finding.cell is not None:
        tokens = [str(cell) for cell in schedule.rows[finding.rank]]
        return with_caret(f"{finding.rank}: ", tokens, finding.cell, width)
    return ()


def with_caret(name: str, tokens: list[str], place: int, width: int, *, cut: bool = False) -> tuple[str, str]:
    """The part of a row around a token, and a line with carets under it."""
    first = last = place

    def length() -> int:
        return len(name) + len(" ".join(tokens[first : last + 1])) + 8

    while (first > 0 or last < len(tokens) - 1) and length() < width:
        first, last = max(0, first - 1), min(len(tokens) - 1, last + 1)
    head = name + ("... " if first > 0 or cut else "")
    tail = " ..." if last < len(tokens) - 1 else ""
    before = head + "".join(token + " " for token in tokens[first:place])
    return head + " ".join(tokens[first : last + 1]) + tail, " " * len(before) + "^" * len(tokens[place])
