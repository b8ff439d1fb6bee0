"""Verifying schedules and programs: do they finish, with the right data, within their memory."""

from __future__ import annotations

from treadle.ir.program import Program
from treadle.ir.schedule import Schedule
from treadle.passes.cells import ReceiveOrder
from treadle.verify.codes import CODES, Explanation, explain
from treadle.verify.finding import Finding, VerifyReport
from treadle.verify.program import verify_program
from treadle.verify.schedule import verify_schedule

__all__ = [
    "CODES",
    "Explanation",
    "Finding",
    "Program",
    "ReceiveOrder",
    "Schedule",
    "VerifyReport",
    "explain",
    "verify_program",
    "verify_schedule",
]
