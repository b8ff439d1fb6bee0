"""Verifying schedules and programs: do they finish, with the right data, within their memory."""

from __future__ import annotations

from treadle.ir.program import Program
from treadle.ir.schedule import Schedule
from treadle.passes.cells import ReceiveOrder
from treadle.verifier.codes import CODES, Explanation, explain
from treadle.verifier.communicator_queues import Communicators
from treadle.verifier.finding import Finding, VerifyReport
from treadle.verifier.program_checks import verify_program
from treadle.verifier.schedule_checks import verify_schedule

__all__ = [
    "CODES",
    "Communicators",
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
