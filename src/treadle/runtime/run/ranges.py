"""The ranges of ops that a profiler shows, under torch's own names: `PP:0F3`, `PP:1SEND_F3`, `PP:attn_f 3.1 L0`.

A range costs microseconds even where nobody profiles, so a step asks once whether anybody does. torch.profiler sees the
thread that started it, and all others only if asked to (`profile_all_threads`); what ran on lanes that it does not see
is left in its file beside the events. `torch.autograd.profiler.emit_nvtx` makes NVTX ranges of them all.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence

from torch._C._autograd import _add_metadata_json, _profiler_enabled
from torch.autograd import profiler
from torch.profiler import record_function

from treadle.profiles.work_names import CONTINUED, LANES
from treadle.runtime.run.instructions import Instruction


def is_profiled() -> bool:
    """Return whether a torch profiler runs: one of this thread, or one of all threads."""
    return sees_this_thread() or profiler._is_profiler_enabled


def sees_this_thread() -> bool:
    """Return whether a profiler runs that was started in this thread and sees no other."""
    return bool(_profiler_enabled())


def labelled(listed: Sequence[Instruction], names: Sequence[str], unseen: list[int]) -> list[Instruction]:
    """Return the same list with a range around each call; places of ops that the profiler does not see go to `unseen`.

    `names` are those of the ops by their places.
    """
    begun, made, one_thread = set[int](), [], sees_this_thread()
    for instruction in listed:
        at = instruction.at
        name = names[at] + (CONTINUED if at in begun else "")
        begun.add(at)
        made.append(instruction._replace(run=_in_range(name, instruction.run, at, unseen if one_thread else None)))
    return made


def _in_range(name: str, run: Callable[[], None], at: int, unseen: list[int] | None) -> Callable[[], None]:
    def ranged() -> None:
        with record_function(name):
            run()
        if unseen is not None and not sees_this_thread():
            unseen.append(at)

    return ranged


def leave(ops: Sequence[tuple[str, int, int]]) -> None:
    """Put ops that the profiler has not seen into its file: names, starts and ends of `perf_counter_ns`."""
    now = time.time_ns()
    to_unix = now - time.perf_counter_ns()
    told = [(name, start + to_unix, end + to_unix) for name, start, end in ops]
    _add_metadata_json(f"{LANES}{now}", json.dumps(told))
