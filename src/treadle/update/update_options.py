"""How updates are done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from treadle.update.protocol.update_messages import Close, Rollback
from treadle.weights.buffer_sizes import Memory
from treadle.weights.chosen_plan import Transfer

Policy: TypeAlias = Literal["all"] | int
CompareSources: TypeAlias = Literal["sample", "all", "off"]
Changed: TypeAlias = Literal["tensors", "elements"]


@dataclass(frozen=True)
class UpdateOptions:
    """How updates are done. Must be the same on all update ranks."""

    memory: Memory | None = None
    """Memory for buffers on each rank's device, in bytes, and the size of buckets.

    None takes 2 GiB of a GPU, with what engines copy while they load, or what it has free once the process group is
    made if that is less, and 1 GiB on a host. Buffers of a GPU are freed after each update. Too little costs speed, not
    success: `Updated.notes` names the buffers that were left out.
    """

    rollback: Rollback | None = None
    """Where a worker's rollback copy is until commit: `host` memory, `disk` (the endpoint's `spill`) or `none`.

    The copy has the size of what is overwritten; of engines that cannot export, twice the checkpoint. With `none` a
    failed attempt leaves workers closed until the next update. None: `none`, and with `changed="elements"` `host`.
    """

    close: Close = "drain"
    """How an engine stops serving before it loads: `drain` lets requests end, `abort` breaks them off.

    An engine that cannot break requests off (`vllm.LLM`) waits for them with `abort`, too.
    """

    drain_s: float = 30.0
    """Seconds that requests get to end. If they do not, the update fails and the worker goes on serving."""

    deadline_s: float = 30.0
    """Seconds of each single wait: for a bucket, for a worker's answer. Not the length of the update.

    A worker or rank that is late is named in the error. An engine that takes longer to open or to finish needs more.
    """

    checked: bool = True
    """Whether each worker compares digests of what it loads with those that the source made, on the buffers' device."""

    compare_sources: CompareSources = "sample"
    """How much ranks that have the same piece compare of it: a `sample`, `all` or nothing (`off`).

    A sample is one block of 4 KiB in sixteen, other blocks in each update: one differing element is found with a chance
    of one in sixteen. `all` costs processor time on every rank.
    """

    transfer: Transfer = "broadcast"
    """How buckets move: each to all devices (`broadcast`), or each along the devices that take it (`targeted`).

    `auto` takes what the simulator finds faster. In targeted updates ranks that have the same pieces compare digests of
    them, so that an error names the ranks, and the tensors among which the difference is.
    """

    changed: Changed = "tensors"
    """What of the tensors moves: all of them (`tensors`), or the elements that differ from those served (`elements`).

    With `elements` each rank keeps a copy, in host memory, of what it sent of the committed version. Workers keep the
    elements that they overwrite, in place of a whole rollback copy. All elements move where a rank or a worker lacks
    the committed version: `Updated.notes` has the reason.
    """

    lease_s: float | None = None
    """Seconds that a worker may serve without being heard; None for no end. The updater renews leases while it is open.

    A worker whose lease is over serves nothing until it is heard again, so an update need not wait for it any longer.
    """

    policy: Policy = "all"
    """How many replicas an update needs: `all`, or a number of them, which takes `lease_s`.

    The others' leases run out before the update goes on; they are brought up to date when they are back.
    """

    def __post_init__(self) -> None:
        if self.lease_s is not None and not self.lease_s > 0:
            raise ValueError(f"lease_s is above 0, or None for leases without end, got {self.lease_s}")
        if self.policy != "all" and (isinstance(self.policy, bool) or not isinstance(self.policy, int)):
            raise ValueError(f"policy is 'all' or a number of replicas, got {self.policy!r}")
        if self.policy != "all" and (self.policy < 1 or self.lease_s is None):
            raise ValueError(
                f"policy={self.policy} leaves replicas out, which takes leases that end, and needs one at least; got "
                f"lease_s={self.lease_s}; set lease_s, or policy='all'"
            )
        if self.changed not in ("tensors", "elements"):
            raise ValueError(f"changed is tensors or elements, got {self.changed!r}")
        if self.transfer not in ("auto", "broadcast", "targeted"):
            raise ValueError(f"transfer is auto, broadcast or targeted, got {self.transfer!r}")
        if self.rollback not in (None, "host", "disk", "none"):
            raise ValueError(f"rollback is host, disk or none, got {self.rollback!r}")
        if self.close not in ("drain", "abort"):
            raise ValueError(f"close is drain or abort, got {self.close!r}")
        if self.compare_sources not in ("sample", "all", "off"):
            raise ValueError(f"compare_sources is sample, all or off, got {self.compare_sources!r}")
        if self.deadline_s <= 0 or self.drain_s < 0:
            raise ValueError(f"deadline_s is above 0 and drain_s 0 or more, got {self.deadline_s}, {self.drain_s}")

    @property
    def rollback_place(self) -> Rollback:
        """Where the rollback copy is: engines that cannot export need it to decode changed elements."""
        if self.rollback is not None:
            return self.rollback
        return "host" if self.changed == "elements" else "none"

    @property
    def phase_s(self) -> float:
        """Seconds that ranks may be apart in a phase: one may wait for requests to end while another does not."""
        return self.deadline_s + self.drain_s

    @property
    def lease_ns(self) -> int | None:
        """The lease in nanoseconds."""
        return round(self.lease_s * 1e9) if self.lease_s is not None else None

    @property
    def least(self) -> int | None:
        """How many replicas an update needs; None for all."""
        return self.policy if self.policy != "all" else None

    @property
    def meet_s(self) -> float:
        """Seconds in which a worker answers when an attempt begins; a lease, where it may be left out."""
        return min(self.deadline_s, self.lease_s) if self.least is not None and self.lease_s else self.deadline_s
