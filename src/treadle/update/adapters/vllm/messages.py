"""What a vLLM worker and the process of its engine say to each other: one question at a time, one answer each.

worker -> replica  Join, Shut, Forget, Serve
replica -> worker  Done
"""

from __future__ import annotations

from typing import TypeAlias

from treadle.update.protocol.messages import Close, Message


class Attach(Message, frozen=True):
    """The first message: which worker this is, and the process that its own was started by."""

    worker: int
    parent_pid: int


class Shut(Message, frozen=True):
    """Let nobody in, and answer when all are out."""

    how: Close
    deadline_s: float


class Forget(Message, frozen=True):
    """Drop what was computed with other weights."""


class Serve(Message, frozen=True):
    """Ready to serve that version."""

    version: int


class Reply(Message, frozen=True):
    """Nothing, or what went wrong."""

    error: str | None = None


FromVllm: TypeAlias = Attach | Shut | Forget | Serve
