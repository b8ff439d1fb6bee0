"""A pipeline spread over a mesh: every GPU a rank of its own, expert groups and data-parallel groups joined.

Ranks are numbered (pp * dp + d) * ep + e. Pipelines with the same d share their experts, so the EP lanes of a pp
are a group over e; gradients are summed over all pipelines, so the DP lanes of a pp are a group over d and e. A tied
parameter is summed over all of its holders in all pipelines, and a norm is taken over all ranks.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from treadle.host.free_memory import available_bytes
from treadle.ir.ops import LaneKind
from treadle.ir.program import Ints, Program

OP_BYTES = 55
"""Memory that an op of a simulated Program takes, about (docs/scale.md)."""

MAX_OPS = int(np.iinfo(np.int32).max)

GIB = 1 << 30
_WAY_OUT = (
    "leave `every_gpu` out, so that one pipeline stands for all, or fold those that are alike: 'treadle simulate' "
    "without -o and --unfolded, treadle.folding.fold"
)


def spread(program: Program, *, ep: int, dp: int) -> Program:
    """Return `ep * dp` copies of a pipeline, side by side.

    Raises:
        ValueError: they have more ops than are numbered, or than this machine has memory for.

    """
    num, size = ep * dp, program.num_ops
    if num == 1:
        return program
    if num * size > MAX_OPS:
        raise ValueError(
            f"a Program numbers its ops up to {MAX_OPS}, and {num} copies of {size} ops are {num * size}; {_WAY_OUT}"
        )
    _check_memory(num * size, num * program.num_ranks)

    copy = np.arange(num, dtype=np.int32)
    which = np.repeat(copy, program.num_lanes)
    lane_pp = np.tile(program.lane_rank, num)
    peer = np.tile(program.lane_peer, num)
    starts = program.lane_ptr[:-1] + np.int64(size) * copy[:, None]
    deps = np.diff(program.dep_ptr)
    shift = np.repeat(copy * np.int32(size), len(program.dep))
    dep = np.tile(program.dep, num)
    is_rank = np.isin(np.tile(program.lane_kind, num), (LaneKind.SEND, LaneKind.RECV))  # what a peer is there
    return replace(
        program,
        layout=replace(program.layout, ep=ep, dp=dp),
        **{name: np.tile(getattr(program, name), num) for name in ("kind", "mb", "chunk", "layer", "cell", "launch")},
        size_bytes=np.tile(program.size_bytes, num),
        joined=np.tile(program.joined, num),
        lane_ptr=np.append(starts.reshape(-1), num * size),
        lane_rank=(lane_pp * num + which).astype(np.int32),
        lane_kind=np.tile(program.lane_kind, num),
        lane_peer=np.where(is_rank, peer * num + which, peer).astype(np.int32),
        lane_group=_groups(program, which, ep, num),
        dep_ptr=np.r_[0, np.cumsum(np.tile(deps, num))].astype(np.int64),
        dep=np.where(dep < 0, dep, dep + shift).astype(np.int32),
    )


def _check_memory(num_ops: int, num_ranks: int) -> None:
    available, needed = available_bytes(), OP_BYTES * num_ops
    if available is not None and needed > available:
        raise ValueError(
            f"every one of {num_ranks:,} GPUs as a rank makes {num_ops:,} ops, about {needed / GIB:.1f} GiB, and this "
            f"machine has {available / GIB:.1f} GiB left; {_WAY_OUT}"
        )


def _groups(program: Program, which: Ints, ep: int, num: int) -> Ints:
    """Number the groups: channels are copied, EP lanes meet in an expert group, other collectives over all copies."""
    kind, pp = np.tile(program.lane_kind, num), np.tile(program.lane_rank, num)
    group = np.tile(program.lane_group, num)
    num_groups = int(program.lane_group.max(initial=-1)) + 1
    num_pp = int(program.lane_rank.max(initial=-1)) + 1
    own = np.where(group < 0, group, group + which * num_groups)
    first_ep = num_groups * num
    experts = first_ep + pp * (num // ep) + which // ep if ep > 1 else own
    first_dp = first_ep + num_pp * (num // ep)
    reduces = first_dp + np.where(group < 0, pp, group)  # copies of a stage on two ranks are a group already
    everywhere = np.isin(kind, (LaneKind.TIED, LaneKind.WORLD))
    first_shared = first_dp + max(num_groups, num_pp)
    wheres = [kind == LaneKind.EP, kind == LaneKind.DP, everywhere]
    chosen = np.select(wheres, [experts, reduces, first_shared + group], own)
    _, numbered = np.unique(chosen[chosen >= 0], return_inverse=True)
    result = np.full(len(chosen), -1, np.int32)
    result[chosen >= 0] = numbered
    return result
