"""Primus: the JSON files that `dump_pp_data: true` makes, one for each rank of the pipeline.

    config.json       {"pp_size": 8, "vp_size": 1, "num_mbs": 16, "dp_size": 1, ...}
    pp_rank_3.json    {"1": {"fwd_start": [183.8, ...], "fwd_end": [...], "bwd_start": [...], "total": 3007.3}, ...}

Times are milliseconds since the step began on that rank, so each step has a clock of its own on each rank. Newer
versions have `fwd_minibatch` and `fwd_chunk`, and `wgrad_start` where weight gradients are split off. A forward and a
backward that run overlapped have the same start and end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from treadle.fields.kinds import FROM_1
from treadle.ir.ops import OpKind
from treadle.ir.program import Bools, Bytes, Ints, Longs, Shorts
from treadle.profiles.entries import entries
from treadle.profiles.reader import Advance, Opening
from treadle.profiles.recording import UNKNOWN, RankRecording, Recording, Remark

_RANK = re.compile(r"pp_rank_([0-9]+)\.json(?:\.gz)?")
_SERIES = ("fwd", "bwd", "wgrad")
_FIELDS = {f"{series}_{field}" for series in _SERIES for field in ("start", "end", "minibatch", "chunk")}
_READ = {*_FIELDS, "total"}
_LEFT_OUT = {"memory": "the reserved memory of each step is not imported"}
_NS_PER_MS = 1_000_000
_LATE = 1.01
"""A step's last end may be after its `total` by this factor: the events are of two streams."""


class PrimusReader:
    """Reads what Primus's `dump_pp_data` wrote."""

    form = "Primus"

    def recognises(self, opening: Opening) -> bool:
        """Look for the start of a forward, or the sizes of the run."""
        head = opening.head.lstrip()
        config = b'"pp_size"' in head and (b'"num_mbs"' in head or b'"micro_batches"' in head)
        return head.startswith(b"{") and (config or b'"fwd_start"' in head)

    def read(self, paths: Sequence[Path], advance: Advance) -> Recording:
        """Read the ranks' files of one run, with the config.json beside them."""
        config = _config(paths)
        found, unread = [], set[str]()
        for path in paths:
            if (named := _RANK.fullmatch(path.name)) is not None:
                steps = []
                for number, content in entries(path):
                    steps.append(_Step.of(path, number, content))
                    unread |= set(content) - _READ
                if not steps:
                    raise ValueError(f"{path}: has no step; the run ended before its first one, leave the file out")
                found.append((path, int(named[1]), steps))
            elif not path.name.startswith("config.json"):
                raise ValueError(f"{path}: Primus names a rank's file pp_rank_3.json; its name has the rank")
            advance(path.stat().st_size)
        if not found:
            raise ValueError(f"{paths[0]}: no pp_rank_0.json is beside it; give the directory that Primus wrote")
        begins = _begins([_extent(steps) for _, _, steps in found])
        ranks = tuple(_recording(path, rank, steps, begins) for path, rank, steps in found)
        remarks = [Remark(_LEFT_OUT.get(key, f"entries {key!r} are not known, and left out")) for key in sorted(unread)]
        if not config:
            remarks.append(Remark("no config.json is beside the ranks' files: sizes are taken from what ran"))
        if config.get("dp_size", 1) > 1:
            remarks.append(Remark(f"Primus writes the first of {config['dp_size']} replicas only"))
        num_mb = config.get("num_mbs", config.get("micro_batches"))
        vpp = config.get("vp_size", config.get("vpp_size"))
        return Recording(
            self.form,
            ranks,
            pp=config.get("pp_size"),
            vpp=vpp,
            dp=1,
            num_mb=num_mb,
            late_receives=True,
            remarks=tuple(remarks),
        )


def _config(paths: Sequence[Path]) -> dict[str, Any]:
    """The sizes of the run, from the one config.json among the files or beside them."""
    beside = {path.parent / name for path in paths for name in ("config.json", "config.json.gz")}
    found = sorted(path for path in beside if path.is_file())
    if len(found) > 1:
        raise ValueError(f"{found[0]} and {found[1]} are of two runs; give the directory of one")
    config = dict(entries(found[0])) if found else {}
    for key in ("pp_size", "vp_size", "vpp_size", "num_mbs", "micro_batches", "dp_size"):
        if key in config:
            FROM_1.check(config[key], f"{found[0]}: {key}")
    return config


@dataclass(frozen=True, eq=False)
class _Step:
    """The marks of one step of a rank, sorted by start; times in nanoseconds since it began."""

    number: int
    kind: Bytes
    mb: Ints
    chunk: Shorts
    joined: Bools
    start: Longs
    end: Longs
    total: int

    @classmethod
    def of(cls, path: Path, number: str, content: Any) -> _Step:
        where = f"{path}: step {number}"
        if not number.isdigit() or not isinstance(content, dict) or "fwd_start" not in content:
            raise ValueError(f"{where}: Primus writes fwd_start, fwd_end, bwd_start, bwd_end for each step's number")
        columns = [_marks(where, content, series) for series in _SERIES]
        kind, mb, chunk, start, end = (np.concatenate(parts) for parts in zip(*columns, strict=True))
        total = _milliseconds(where, [content.get("total", 0)], "total")[0]
        if "total" in content and end.max(initial=0) > _LATE * total + _NS_PER_MS:
            raise ValueError(
                f"{where}: ends {end.max() / _NS_PER_MS:g} ms after it began, and its total is "
                f"{total / _NS_PER_MS:g} ms; times are milliseconds since the step began: its units are mixed, or its "
                "files are of two runs"
            )
        order = np.lexsort((kind, end, start))
        kind, start, end = kind[order], start[order], end[order]
        joined = np.r_[False, (start[1:] == start[:-1]) & (end[1:] == end[:-1]) & (kind[1:] != kind[:-1])][: len(kind)]
        return cls(int(number), kind, mb[order], chunk[order], joined, start, end, int(total))


def _marks(where: str, content: dict[str, Any], series: str) -> tuple[Bytes, Ints, Shorts, Longs, Longs]:
    start = _milliseconds(where, content.get(f"{series}_start", []), f"{series}_start")
    end = _milliseconds(where, content.get(f"{series}_end", []), f"{series}_end")
    if len(start) != len(end) or (end < start).any():
        raise ValueError(
            f"{where}: {series}_end has an end for each of the {len(start)} starts, none before it, got {len(end)}"
        )
    split = bool(content.get("wgrad_start"))
    kind = OpKind[{"fwd": "F", "bwd": "I" if split else "B", "wgrad": "W"}[series]]
    labels = []
    for name in ("minibatch", "chunk"):
        given = content.get(f"{series}_{name}") or [UNKNOWN] * len(start)
        if len(given) != len(start):
            raise ValueError(f"{where}: {series}_{name} has a number for each of {len(start)}, got {len(given)}")
        labels.append(np.array(given, np.int64))
    return np.full(len(start), kind, np.uint8), labels[0].astype(np.int32), labels[1].astype(np.int16), start, end


def _milliseconds(where: str, values: Any, name: str) -> Longs:
    try:
        found = np.array(values, np.float64)
    except (TypeError, ValueError):
        found = np.array([np.nan])
    if found.ndim != 1 or not np.isfinite(found).all():
        raise ValueError(f"{where}: {name} is a list of milliseconds, got {str(values)[:40]}")
    return np.rint(found * _NS_PER_MS).astype(np.int64)


def _extent(steps: Sequence[_Step]) -> dict[int, int]:
    """How long each step is at least, in nanoseconds."""
    return {step.number: max(step.total, int(step.end.max(initial=0))) for step in steps}


def _recording(path: Path, rank: int, steps: Sequence[_Step], begins: dict[int, int]) -> RankRecording:
    num = [len(step.kind) for step in steps]
    unknown = np.full(sum(num), UNKNOWN, np.int16)
    return RankRecording(
        source=str(path),
        rank=UNKNOWN,
        pp=rank,
        dp=0,
        clock=f"steps of {path}",
        kind=_joined(step.kind for step in steps),
        mb=_joined(step.mb for step in steps),
        stage=unknown,
        chunk=_joined(step.chunk for step in steps),
        layer=np.zeros_like(unknown),
        step=np.repeat(np.array([step.number for step in steps], np.int32), num),
        joined=_joined(step.joined for step in steps),
        start=_joined(step.start + begins[step.number] for step in steps),
        end=_joined(step.end + begins[step.number] for step in steps),
    )


def _joined(parts: Iterator[Any]) -> Any:
    return np.concatenate(list(parts))


def _begins(extents: Sequence[dict[int, int]]) -> dict[int, int]:
    """When each step begins, where one follows the other: what is between them was not written down."""
    begins, now = {}, 0
    for number in sorted(set().union(*extents)):
        begins[number] = now
        now += max(extent.get(number, 0) for extent in extents)
    return begins
