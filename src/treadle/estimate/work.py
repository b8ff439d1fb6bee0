"""The work of each part of a block: GEMMs by shape, attention, bytes touched, messages, kernel launches.

All of it is for one micro-batch on one GPU. Parts have the names that costs have (`treadle.costs.format`): attn_f,
dispatch_f, mlp_f, combine_f, dgrad combine_b, mlp_b, dispatch_b, attn_b, wgrad mlp_w, attn_w, and attn_r, mlp_r:
recomputed. `treadle.estimate.block_work` makes it from a job, `treadle.estimate.rates` turns it into seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from treadle.estimate.cluster import Cluster

BF16 = 2
FP32 = 4


class Gemm(NamedTuple):
    """`groups` GEMMs [m, k] x [k, n] in one kernel. `precision` is "" where it is the job's."""

    m: float
    n: int
    k: float
    groups: int = 1
    precision: str = ""
    out_bytes: int = BF16
    """Bytes of an element of the result; 8 where it is added to an FP32 gradient: read and written."""

    @property
    def flops(self) -> float:
        """Floating-point operations."""
        return 2.0 * self.m * self.n * self.k * self.groups

    def moved_bytes(self, element: float) -> float:
        """Bytes read and written, if an element of the operands has `element` bytes."""
        operands = self.m * self.k + self.k * self.n
        return self.groups * (operands * element + self.m * self.n * self.out_bytes)


class GroupMessage(NamedTuple):
    """A message or collective of a group: the bytes that one GPU sends over NVLink and over its NIC."""

    collective: str
    """all_gather, reduce_scatter, all_reduce, all_to_all, ring (of context parallelism) or send."""

    group: str
    """tp, cp, ep, pp, dp or expert_dp."""

    ranks: int
    nvlink_bytes: float
    nic_bytes: float

    @property
    def inside(self) -> bool:
        """True if it stays in an NVLink domain."""
        return self.nic_bytes == 0

    @property
    def size_bytes(self) -> float:
        """Bytes over both links."""
        return self.nvlink_bytes + self.nic_bytes

    def nvlink_seconds(self, cluster: Cluster) -> float:
        """Return the seconds of its bytes over NVLink at the peak rate."""
        return self.nvlink_bytes / cluster.nvlink_bandwidth

    def nic_seconds(self, cluster: Cluster) -> float:
        """Return the seconds of its bytes over the NIC at the peak rate."""
        return self.nic_bytes / cluster.nic_bandwidth

    def seconds(self, cluster: Cluster) -> float:
        """Return the seconds of its bytes over both links, one after the other, at their peak rates."""
        return self.nvlink_seconds(cluster) + self.nic_seconds(cluster)


@dataclass(frozen=True, slots=True)
class OpWork:
    """What one part of a block does. Works add."""

    gemms: tuple[Gemm, ...] = ()
    grouped: tuple[Gemm, ...] = ()
    """GEMMs of experts: as many as a rank has, in one kernel."""

    attention_flops: float = 0.0
    """Of the GEMMs with queries, keys and values; what the causal mask leaves out is not counted."""

    vector_bytes: float = 0.0
    """Read and written by norms, activations, positions, residuals and losses."""

    cast_bytes: float = 0.0
    """Read and written to cast operands of GEMMs to a smaller precision."""

    permuted_bytes: float = 0.0
    """Read and written to sort tokens by expert, and back."""

    messages: tuple[GroupMessage, ...] = ()
    launches: float = 0.0
    """Kernels that the host launches one by one; those inside CUDA graphs are not counted."""

    expert_launches: float = 0.0
    """Local experts whose operands the host prepares one by one, in forwards."""

    def __add__(self, other: OpWork) -> OpWork:
        return OpWork(
            self.gemms + other.gemms,
            self.grouped + other.grouped,
            self.attention_flops + other.attention_flops,
            self.vector_bytes + other.vector_bytes,
            self.cast_bytes + other.cast_bytes,
            self.permuted_bytes + other.permuted_bytes,
            self.messages + other.messages,
            self.launches + other.launches,
            self.expert_launches + other.expert_launches,
        )

    @property
    def flops(self) -> float:
        """All floating-point operations."""
        return sum(gemm.flops for gemm in self.gemms + self.grouped) + self.attention_flops


@dataclass(frozen=True, slots=True)
class PartWork:
    """A part of a block in all its phases: `f` forward, `b` dgrad, `w` wgrad. Works add."""

    f: OpWork
    b: OpWork
    w: OpWork
    again: OpWork = OpWork()
    """What recomputation of less than the whole part adds to dgrad."""

    def __add__(self, other: PartWork) -> PartWork:
        return PartWork(self.f + other.f, self.b + other.b, self.w + other.w, self.again + other.again)
