"""Threads that run as soon as they wake: others wait for what they bring, and they are done in no time.

Where processors are busy, Linux lets whoever runs finish a slice first (1.4 ms on two cores), which is longer than most
exchanges between processes of one host. A thread with a shorter slice takes its turn earlier and gets no more of the
processor in all. Since Linux 6.12 a thread may ask for one; elsewhere nothing changes.
"""

from __future__ import annotations

import ctypes
import platform
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SLICE_NS = 100_000
"""The shortest that Linux gives."""

_CALLS = {"x86_64": (315, 314), "aarch64": (275, 274)}
_ATTR = struct.Struct("=IIQiIQQQ")  # size, policy, flags, nice, priority, runtime, deadline, period
_ORDINARY = (0, 3)  # SCHED_OTHER, SCHED_BATCH: the policies for which the runtime is a slice
_RUNTIME = 5


def be_prompt(slice_ns: int = SLICE_NS) -> int:
    """Asks for the calling thread, and those it starts from then on; 0 is as usual. The slice it asked for before.

    It is a wish: where it cannot be had, nothing is said.
    """
    numbers = _CALLS.get(platform.machine()) if sys.platform == "linux" else None
    if numbers is None:
        return 0
    get, put = numbers
    call = ctypes.CDLL(None).syscall
    read = ctypes.create_string_buffer(_ATTR.size)
    if call(get, 0, read, _ATTR.size, 0) != 0:
        return 0
    attr = list(_ATTR.unpack(read.raw))
    if attr[1] not in _ORDINARY:
        return 0
    before, attr[_RUNTIME] = attr[_RUNTIME], slice_ns
    call(put, 0, _ATTR.pack(*attr), 0)
    return before if isinstance(before, int) else 0


@contextmanager
def starting_prompt_threads() -> Iterator[None]:
    """Around what starts threads that one has no hold of; the calling thread is as it was after it."""
    before = be_prompt()
    try:
        yield
    finally:
        be_prompt(before)
