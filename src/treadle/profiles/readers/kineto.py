"""torch.profiler's files (Kineto), one a rank: pipelines of torch and of Treadle, and annotated parts of layers.

    PP:0F3, PP:1SEND_F3, Forward 3      what runs, which micro-batch and which stage: exact (torch, Treadle)
    attn(F), dispatch(B), mlp(W)        parts of layers, one after the other (DeepSeek, Megatron): the k-th of its kind
                                        within the annotation around it (`1F1B`) is of its k-th layer

`kineto_ops.py` says when an op starts and ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from treadle.profiles.kineto_file import KinetoFile, read_file
from treadle.profiles.kineto_ops import marks_of
from treadle.profiles.reader import Advance, Opening
from treadle.profiles.recording import UNKNOWN, RankRecording, Recording, Remark

_SIGNS = (b'"schemaVersion"', b'"deviceProperties"', b'"distributedInfo"', b'"baseTimeNanoseconds"')
_CATEGORIES = (b'"cpu_op"', b'"user_annotation"', b'"cuda_runtime"', b'"kernel"', b'"ac2g"')
_RANK = re.compile(r"rank[_-]?(\d+)")
_PIPELINE_GROUP = re.compile(r"(?:^|_)pp$|PIPELINE_MODEL_PARALLEL_GROUP|^pipeline", re.IGNORECASE)
_DATA_GROUP = re.compile(r"(?:^|_)(?:dp|fsdp|dp_shard|dp_replicate)$|^DATA_PARALLEL_GROUP$", re.IGNORECASE)


class KinetoReader:
    """Reads the files of torch.profiler, a rank each."""

    form = "torch.profiler (Kineto)"

    def recognises(self, opening: Opening) -> bool:
        """Look for Kineto's keys, or the categories of its events."""
        head = opening.head
        if head.lstrip()[:1] != b"{":
            return False
        signs = sum(sign in head for sign in _SIGNS)
        return signs >= 2 or (b'"traceEvents"' in head and any(category in head for category in _CATEGORIES))

    def read(self, paths: Sequence[Path], advance: Advance) -> Recording:
        """Read one file after the other, each of one rank."""
        remarks: list[Remark] = []
        ranks: list[RankRecording] = []
        sizes: list[tuple[int, int]] = []
        holders: dict[int, str] = {}
        on_host = False
        for path in paths:
            file = read_file(path, advance)
            on_host |= not len(file.device.start)
            if file.trouble is not None:
                remarks.append(Remark(f"{file.trouble}; what stands before that is used", file.source))
            place = _place(file, path, len(paths), remarks)
            if place.rank in holders:
                raise ValueError(
                    f"{file.source}: of rank {place.rank}, as {holders[place.rank]}; give the files of one run and, of "
                    "each rank, one"
                )
            holders[place.rank] = file.source
            marks = marks_of(file, remarks)
            clock = str(file.about.get("host_name") or file.source)
            own = RankRecording.of(marks, source=file.source, clock=clock, rank=place.rank, pp=place.pp, dp=place.dp)
            ranks.append(own)
            sizes.append((place.num_pp, place.num_dp))
        if not any(len(rank) for rank in ranks):
            raise ValueError(f"{paths[0]}: {_unmarked(paths)}")
        for rank in ranks:
            if not len(rank):
                remarks.append(Remark("no op of a pipeline is marked in it", rank.source))
        pp, dp = (max(size) for size in zip(*sizes, strict=True))
        known = tuple(sorted((rank for rank in ranks if len(rank)), key=lambda rank: rank.rank))
        return Recording(
            self.form,
            known,
            pp=pp if pp != UNKNOWN else None,
            dp=dp if dp != UNKNOWN else None,
            waits_inside=on_host,
            remarks=tuple(remarks),
        )


def _unmarked(paths: Sequence[Path]) -> str:
    return (
        f"no op of a pipeline is marked in {'it' if len(paths) == 1 else 'any of the files'}: ranges named PP:0F3 are "
        "looked for, Forward 3, attn(F). torch's Schedule1F1B marks nothing (its other schedules do); Megatron's "
        "ranges are NVTX, which Nsight Systems records"
    )


# -- who the file is of ------------------------------------------------------------------------------------------------


class _Place(NamedTuple):
    """A rank, its places in the pipeline and among replicas, and their sizes, where the file names them."""

    rank: int
    pp: int = UNKNOWN
    dp: int = UNKNOWN
    num_pp: int = UNKNOWN
    num_dp: int = UNKNOWN


def _place(file: KinetoFile, path: Path, num_files: int, remarks: list[Remark]) -> _Place:
    info = file.about.get("distributedInfo") or {}
    named = _RANK.search(path.name) or _RANK.search(path.parent.name)
    if "rank" in info:
        rank = int(info["rank"])
        if named is not None and int(named[1]) != rank:
            remarks.append(Remark(f"its name says rank {named[1]}, its content rank {rank}, which counts", file.source))
    elif named is not None:
        rank = int(named[1])
    elif num_files == 1:
        rank = 0
    else:
        raise ValueError(
            f"{file.source}: neither its content (distributedInfo) nor its name says which rank it is of; call it "
            "rank0_trace.json"
        )
    groups = [group for group in info.get("pg_config") or [] if isinstance(group, dict)]
    pipeline, data = _group(groups, _PIPELINE_GROUP, rank), _group(groups, _DATA_GROUP, rank)
    if not pipeline and len(groups) == 1:  # nothing but the default group: the pipeline is all there is
        pipeline = _group(groups, re.compile(""), rank)
    if not pipeline and groups:
        names = ", ".join(sorted({str(group.get("pg_desc")) for group in groups}))
        remarks.append(
            Remark(f"no process group is called that of a pipeline ({names}); ranks are ordered by stages", file.source)
        )
    return _Place(
        rank,
        pp=pipeline.index(rank) if pipeline else UNKNOWN,
        dp=data.index(rank) if data else UNKNOWN,
        num_pp=len(pipeline) or UNKNOWN,
        num_dp=len(data) or UNKNOWN,
    )


def _group(groups: Iterable[dict[str, Any]], pattern: re.Pattern[str], rank: int) -> list[int]:
    """The ranks of the group that is called so and that the rank is in."""
    for group in groups:
        ranks = group.get("ranks") or []
        if pattern.search(str(group.get("pg_desc", ""))) and rank in ranks:
            return list(ranks)
    return []
