"""One file of torch.profiler (Kineto), reduced to columns: annotations of the host, launches, events of the device."""

from __future__ import annotations

import re
from array import array
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from treadle.ir.program import Bools, Ints, Longs
from treadle.profiles.chrome_events import ChromeEvents, Event, span_ns
from treadle.profiles.reader import Advance

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver", "hip_runtime", "xpu_runtime")
ANNOTATIONS = ("user_annotation", "gpu_user_annotation")
SENDS = "c10d::send"
"""An op of torch that counts as an annotation: `gloo:send` begins only when the message has left."""

_TALKS = re.compile(r"nccl|rccl|nvshmem|deep_ep|\bep::", re.IGNORECASE)
"""Names of kernels that communicate. What they communicate is in the annotation around their launch, never by
their name: `ncclDevKernel_SendRecv` is an all-to-all or a message of the pipeline."""

NO_LAUNCH = -1


class Annotation(NamedTuple):
    """A range that a program named, on a thread of the host. Times are nanoseconds of the file's clock."""

    name: str
    thread: int
    start: int
    end: int


class Launch(NamedTuple):
    """Columns of all calls of the host that may launch work, sorted by `correlation`."""

    correlation: Longs
    thread: Ints
    time: Longs


class DeviceEvents(NamedTuple):
    """Columns of what ran on the device: `talks` marks communication, `copies` what is no kernel."""

    start: Longs
    end: Longs
    correlation: Longs
    stream: Ints
    talks: Bools
    copies: Bools


@dataclass(frozen=True, eq=False)
class KinetoFile:
    """What is used of a file. `annotation_of[i]` is the host's annotation of the i-th of `on_device`, or NO_LAUNCH."""

    source: str
    about: dict[str, Any]
    annotations: tuple[Annotation, ...]
    on_device: tuple[Annotation, ...]
    annotation_of: tuple[int, ...]
    launches: Launch
    device: DeviceEvents
    trouble: str | None
    """Why the file could be read in part only."""
    num_copies: int = 0
    """Annotations that are the same as another, which are left out."""


def read_file(path: Path, advance: Advance) -> KinetoFile:
    """Read a file, plain or compressed. A ValueError names a file that is no Chrome trace."""
    events = ChromeEvents(path, (*DEVICE, *LAUNCHES, *ANNOTATIONS), advance, named={"cpu_op": SENDS})
    columns = _Columns()
    for event in events:
        columns.add(event, str(path))
    base = int(events.about.get("baseTimeNanoseconds", 0))
    return columns.made(str(path), base, events)


class _Columns:
    """Collects events into arrays: a file has millions."""

    def __init__(self) -> None:
        self.threads: dict[tuple[Any, Any], int] = {}
        self.annotations: list[Annotation] = []
        self.on_device: list[Annotation] = []
        self.known: set[Annotation] = set()
        self.num_copies = 0
        self.ids: list[tuple[str, Any]] = []
        self.id_of: dict[tuple[str, Any], int] = {}
        self.launches = array("q")
        self.device = array("q")

    def add(self, event: Event, source: str) -> None:
        if event.get("ph") != "X":
            return
        category, args = event["cat"], event.get("args") or {}
        start, end = span_ns(event, source)
        if category in LAUNCHES:
            if "correlation" in args:
                self.launches.extend((int(args["correlation"]), self._thread(event), start))
            return
        if category in DEVICE:
            is_kernel = category == "kernel"
            stream = args.get("stream", event.get("tid", 0))
            talks = is_kernel and _talks(event["name"])
            correlation = int(args.get("correlation", NO_LAUNCH))
            self.device.extend((start, end, correlation, _number(stream), talks, not is_kernel))
            return
        annotation = Annotation(event["name"], self._thread(event), start, end)
        identity = (event["name"], args.get("External id", start))
        if category != "gpu_user_annotation":
            if annotation in self.known:
                self.num_copies += 1
                return
            self.known.add(annotation)
            self.id_of[identity] = len(self.annotations)
            self.annotations.append(annotation)
        else:
            self.ids.append(identity)
            self.on_device.append(annotation)

    def _thread(self, event: Event) -> int:
        return self.threads.setdefault((event.get("pid"), event.get("tid")), len(self.threads))

    def made(self, source: str, base: int, events: ChromeEvents) -> KinetoFile:
        launches = np.array(self.launches, np.int64).reshape(-1, 3)
        launches = launches[np.argsort(launches[:, 0], kind="stable")]
        device = np.array(self.device, np.int64).reshape(-1, 6)
        return KinetoFile(
            source=source,
            about=events.about,
            annotations=tuple(_moved(one, base) for one in self.annotations),
            on_device=tuple(_moved(one, base) for one in self.on_device),
            annotation_of=tuple(self.id_of.get(identity, NO_LAUNCH) for identity in self.ids),
            launches=Launch(launches[:, 0], launches[:, 1].astype(np.int32), launches[:, 2] + base),
            device=DeviceEvents(
                device[:, 0] + base,
                device[:, 1] + base,
                device[:, 2],
                device[:, 3].astype(np.int32),
                device[:, 4].astype(np.bool_),
                device[:, 5].astype(np.bool_),
            ),
            trouble=events.trouble,
            num_copies=self.num_copies,
        )


def _moved(annotation: Annotation, base: int) -> Annotation:
    return annotation._replace(start=annotation.start + base, end=annotation.end + base)


@lru_cache(maxsize=2**14)
def _talks(kernel: str) -> bool:
    return _TALKS.search(kernel) is not None


@lru_cache(maxsize=2**10)
def _number(stream: object) -> int:
    return int(stream) if isinstance(stream, (int, str)) and str(stream).isdigit() else NO_LAUNCH
