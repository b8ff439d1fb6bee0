"""Turns a CPU into a device with streams for a block, and reports on what was launched in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from treadle.dist.streams import replace_streams
from treadle.runtime.checker.analysis import analyse
from treadle.runtime.checker.communicator import CheckedStreams
from treadle.runtime.checker.kernels import Functions, Kernels
from treadle.runtime.checker.log import Collective, Entry, HostWait, LaunchSite
from treadle.runtime.checker.stream_findings import FindingKind, StreamFinding
from treadle.runtime.checker.stream_recorder import OUTSIDE

MOST_SHOWN = 12
"""Findings that a report prints; its `findings` has them all."""


@dataclass(frozen=True)
class CheckReport:
    """What a checked run did wrong, and where its launching thread waits.

    `host_waits` counts the waits inside ops, by why and where: there the host blocks until the device has come so far,
    and launches nothing meanwhile. They are not findings.
    """

    findings: list[StreamFinding] = field(default_factory=list)
    host_waits: Counter[tuple[str, LaunchSite]] = field(default_factory=Counter)
    num_entries: int = 0

    @property
    def clean(self) -> bool:
        """True if there is no finding."""
        return not self.findings

    def __str__(self) -> str:
        by_place: Counter[tuple[str, str]] = Counter()
        for (why, where), times in self.host_waits.items():
            by_place[why, where.line] += times
        waits = [f"the host waits for {why} at {line}, {times} times" for (why, line), times in by_place.items()]
        found = [str(finding) for finding in self.findings[:MOST_SHOWN]]
        found = found or [f"nothing found in {self.num_entries:,} entries"]
        if len(self.findings) > MOST_SHOWN:
            found.append(f"and {len(self.findings) - MOST_SHOWN} other places")
        return "\n".join([*found, *waits])


class StreamChecker:
    """A checked run. Its log grows until the block of `check_streams` ends; a report may be asked for at any time."""

    def __init__(self) -> None:
        self.recorder = CheckedStreams()
        self._forgotten = 0

    @property
    def log(self) -> list[Entry]:
        """Everything that was noted."""
        return self.recorder.log

    @property
    def streams(self) -> list[str]:
        """The names of all streams; the first is the host."""
        return self.recorder.streams

    @property
    def collectives(self) -> list[Collective]:
        """The calls on communicators, for `order_findings` over all ranks."""
        return self.recorder.collectives

    def forget(self) -> None:
        """Drops host waits and calls noted so far, as a first step has more of them than later ones; orders stay."""
        self._forgotten = len(self.log)
        self.recorder.collectives.clear()

    def report(self, *, host_orders: bool = False, strict: bool = True) -> CheckReport:
        """Judges what was noted; the arguments are those of `analysis.analyse`."""
        found = analyse(self.log, self.streams, host_orders=host_orders, strict=strict)
        for (node, forward, backward, where), times in self.recorder.stray.items():
            told = f"{node}, whose forward ran on {forward}"
            found.append(StreamFinding(FindingKind.OTHER_STREAM, told, f"backward on {backward} {where}", times=times))
        found += [replace(finding) for finding in self.recorder.misplaced.values()]
        waits = (entry for entry in self.log[self._forgotten :] if isinstance(entry, HostWait))
        inside = Counter((entry.why, entry.where) for entry in waits if entry.where.op != OUTSIDE)
        return CheckReport(found, inside, len(self.log))


@contextmanager
def check_streams() -> Iterator[StreamChecker]:
    """Checks the order of everything that is launched in a block, as if this CPU were a GPU.

    Make the Pipeline inside the block. Tensors made before it, or with `device=`, are the device's; others made inside
    are the host's, as on a GPU.

    Yields:
        The StreamChecker, whose `report` tells what nothing orders.

    Example:
        >>> with check_streams() as checker:
        ...     side = checker.recorder.new(torch.device("cpu"), "side")
        ...     x = torch.ones(4, device="cpu")
        ...     with checker.recorder.on(side):
        ...         y = x + 1  # no event says that x is there
        >>> print(checker.report().findings[0].kind.value)
        a tensor is read before the write of another stream is done

    """
    checker = StreamChecker()
    kernels = Kernels(checker.recorder)
    with replace_streams("cpu", checker.recorder), Functions(checker.recorder, kernels), kernels:
        try:
            yield checker
        finally:
            checker.recorder.close()
