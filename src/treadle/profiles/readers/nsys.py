"""Nsight Systems: the SQLite files of `nsys export --type sqlite`, one or more processes each.

This reader is written from NVIDIA's documentation of the export and from the names in the frameworks' sources, and is
tested on files made after them: no public recording of a pipeline was at hand. Each import says so.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from treadle.profiles.nsys_file import NsysFile, Range, open_nsys
from treadle.profiles.nsys_marks import is_megatron, is_wanted, marks_of
from treadle.profiles.reader import Advance, Opening
from treadle.profiles.recording import UNKNOWN, RankRecording, Recording, Remark
from treadle.profiles.warmup import size_by_warmup

_UNTRIED = "read as NVIDIA documents the export, not tried on a recording of a real pipeline: check the result"
_REPORTS = (".nsys-rep", ".qdrep")
_RANK = re.compile(r"rank[_-]?(\d+)")
_SETUP = re.compile(r"rank=(\d+); pp=(\d+)/(\d+) dp=(\d+)/(\d+).*")


class NsysReader:
    """Reads exports of Nsight Systems with the ranges of torch, Treadle, PithTrain or Megatron."""

    form = "Nsight Systems (SQLite export)"

    def recognises(self, opening: Opening) -> bool:
        """Look for SQLite's first bytes; a report that is not exported yet is recognised to say how."""
        return opening.head.startswith(b"SQLite format 3\0") or opening.path.name.endswith(_REPORTS)

    def read(self, paths: Sequence[Path], advance: Advance) -> Recording:
        """Read the processes of all files, a rank each."""
        ranks: list[RankRecording] = []
        remarks = [Remark(_UNTRIED)]
        sizes: list[tuple[int, int]] = []
        megatron = host_only = False
        for path in paths:
            if path.name.endswith(_REPORTS):
                raise ValueError(
                    f"{path}: a report of Nsight Systems: 'nsys export --type sqlite {path}' makes it readable"
                )
            with open_nsys(path) as file:
                processes = _processes(file)
                host_only |= not file.has_device
                for ranges in processes:
                    rank, setup = _rank(file, ranges, len(processes), remarks)
                    if rank is not None:
                        ranks.append(rank)
                        megatron |= is_megatron(ranges)
                    sizes += [setup] if setup is not None else []
            advance(path.stat().st_size)
        if not any(len(rank) for rank in ranks):
            raise ValueError(
                f"{paths[0]}: no range names the work of a pipeline: PP:0F3 (torch, Treadle), forward chunk 0 (phase0) "
                "(PithTrain), P2PCommunicator.send_forward (Megatron with --nvtx-ranges) are read"
            )
        if megatron:
            sized = size_by_warmup(ranks)
            remarks.append(Remark("ranks, chunks and steps are not named: derived from forwards before backwards"))
            return Recording(
                self.form,
                sized.ranks,
                pp=sized.pp,
                vpp=sized.vpp,
                dp=sized.dp,
                num_mb=sized.num_mb,
                remarks=tuple(remarks),
            )
        pp, dp = sizes[0] if sizes else (None, None)
        return Recording(self.form, tuple(ranks), pp=pp, dp=dp, waits_inside=host_only, remarks=tuple(remarks))


def _processes(file: NsysFile) -> list[list[Range]]:
    """The ranges of each process that has any, in order."""
    by_process: dict[int, list[Range]] = defaultdict(list)
    for each in file.ranges(lambda name: is_wanted(name) or _SETUP.fullmatch(name) is not None):
        by_process[each.process].append(each)
    return [by_process[process] for process in sorted(by_process)]


def _rank(
    file: NsysFile, ranges: Sequence[Range], num_processes: int, remarks: list[Remark]
) -> tuple[RankRecording | None, tuple[int, int] | None]:
    """The rank of a process, and the sizes (pp, dp) that its first range names."""
    marks, device, said = marks_of(file, ranges)
    remarks += said
    if not marks:
        return None, None
    begin = file.begins_at
    marks = [mark._replace(start=mark.start + (begin or 0), end=mark.end + (begin or 0)) for mark in marks]
    clock = "UTC" if begin is not None else str(file.path)
    setup = next((found for each in ranges if (found := _SETUP.fullmatch(each.name))), None)
    source = str(file.path) if num_processes == 1 else f"{file.path}, process {ranges[0].process & 0xFFFFFF}"
    if setup is not None:
        number, place, num_pp, replica, num_dp = map(int, setup.groups())
        rank = RankRecording.of(marks, source=source, clock=clock, rank=number, pp=place, dp=replica)
        return rank, (num_pp, num_dp)
    named = _RANK.search(file.path.name)
    if num_processes > 1:
        number = device if device >= 0 else UNKNOWN
        remarks.append(Remark("several processes are in one file: their ranks are taken to be their devices'", source))
    else:
        number = int(named[1]) if named is not None else UNKNOWN
    return RankRecording.of(marks, source=source, clock=clock, rank=number), None
