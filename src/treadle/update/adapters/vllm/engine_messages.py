"""The messages between a vLLM worker and its engine's process: one question at a time, one Reply each.

worker -> replica  Attach, Shut, Forget, LeaseEnd, Serve
replica -> worker  Reply
"""

from __future__ import annotations

from typing import TypeAlias

from treadle.update.protocol.update_messages import Close, Message


class Attach(Message, frozen=True):
    """Opens a connection: the worker's number, and the process that started the worker's."""

    worker: int
    parent_pid: int


class Shut(Message, frozen=True):
    """Close the gate; answered when all requests are through."""

    how: Close
    deadline_s: float


class Forget(Message, frozen=True):
    """Reset caches of what was computed with other weights."""


class LeaseEnd(Message, frozen=True):
    """The worker's lease: what it serves may be served until then (`boot_ns`), None for without end."""

    until_ns: int | None


class Serve(Message, frozen=True):
    """The worker is ready to serve this version."""

    version: int


class Reply(Message, frozen=True):
    """None, or what went wrong."""

    error: str | None = None


FromVllm: TypeAlias = Attach | Shut | Forget | LeaseEnd | Serve
