"""Columns of a Program bundled for kernels, which take NamedTuples of arrays but no dataclasses."""

from __future__ import annotations

from typing import NamedTuple

from treadle.ir.program import Bytes, Ints, Longs, Program, Shorts


class OpLabels(NamedTuple):
    """The columns that label each op."""

    kind: Bytes
    mb: Ints
    chunk: Shorts
    layer: Shorts

    @classmethod
    def of(cls, program: Program) -> OpLabels:
        """Take a program's columns."""
        return cls(program.kind, program.mb, program.chunk, program.layer)


class LaneTable(NamedTuple):
    """The columns that describe each lane; `ptr[l]` to `ptr[l + 1]` are the ops of lane l."""

    ptr: Longs
    rank: Ints
    kind: Bytes
    peer: Ints

    @classmethod
    def of(cls, program: Program) -> LaneTable:
        """Take a program's columns."""
        return cls(program.lane_ptr, program.lane_rank, program.lane_kind, program.lane_peer)


class GroupTable(NamedTuple):
    """The lanes of each group: `lane[ptr[g]]` to `lane[ptr[g + 1]]`, excluding the last."""

    ptr: Longs
    lane: Ints

    @classmethod
    def of(cls, program: Program) -> GroupTable:
        """Take a program's columns."""
        return cls(*program.groups)


class Waits(NamedTuple):
    """The dependencies of each op besides its lane: `dep[ptr[i]]` to `dep[ptr[i + 1]]`, excluding the last."""

    ptr: Longs
    dep: Ints

    @classmethod
    def of(cls, program: Program) -> Waits:
        """Take a program's columns."""
        return cls(program.dep_ptr, program.dep)
