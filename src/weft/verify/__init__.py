"""Verifying schedules and programs: do they finish, with the right data, within their memory."""

from __future__ import annotations

from weft.ir.program import Program
from weft.ir.schedule import Schedule
from weft.passes.cells import ReceiveOrder
from weft.verify.codes import CODES, Explanation, explain
from weft.verify.finding import Finding, Report
from weft.verify.program import verify_program
from weft.verify.schedule import verify_schedule

__all__ = [
    "CODES",
    "Explanation",
    "Finding",
    "Program",
    "ReceiveOrder",
    "Report",
    "Schedule",
    "explain",
    "verify_program",
    "verify_schedule",
]
