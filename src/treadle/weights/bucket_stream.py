"""An update as a stream of buckets: their order, their sizes, the bytes each device takes. Tensors are gone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from treadle.ir.program import Ints, Longs
from treadle.weights.matched_steps import Hops
from treadle.weights.tensor_boxes import Tensor
from treadle.weights.update_plan import Take, UpdatePlan


@dataclass(frozen=True, eq=False)
class Stream:
    """Columns over buckets, in the order in which they move; `taken_bytes[bucket, device]`, of one column if all alike.

    Bucket i goes into IPC buffer i % num_ipc. A source's k-th bucket goes into H2D buffer k % num_h2d. With `hops`
    each bucket goes along its route alone.
    """

    num_devices: int
    num_h2d: int
    num_ipc: int
    source: Ints
    round: Ints
    size_bytes: Longs
    taken_bytes: Longs
    hops: Hops | None = None

    def __post_init__(self) -> None:
        if self.num_h2d not in (0, 1, 2) or self.num_ipc not in (1, 2):
            raise ValueError(
                f"a device has 0, 1 or 2 H2D buffers and 1 or 2 IPC buffers, got {self.num_h2d} and {self.num_ipc}"
            )
        if self.num_devices < 1 or (len(self.source) and int(self.source.max()) >= self.num_devices):
            raise ValueError(f"sources are devices 0 to {self.num_devices - 1}, got {self.source.max(initial=0)}")

    @property
    def num_buckets(self) -> int:
        """Broadcasts of the update."""
        return len(self.source)

    @property
    def num_rounds(self) -> int:
        """Buckets of the source that has most."""
        return int(self.round.max(initial=-1)) + 1


def stream_of(plan: UpdatePlan) -> Stream:
    """The stream of a plan; worker w's device is update rank w."""
    num_devices = max(len(plan.takes), 1 + max((bucket.source for bucket in plan.buckets), default=0))
    hops: Hops | None = None
    if plan.is_targeted:
        num_devices, hops = max(num_devices, plan.num_targets), plan.hops
        all_of_it = [_taken(plan, number, bucket.all_of_it) for number, bucket in enumerate(plan.buckets)]
        taken = np.array(all_of_it, np.int64).reshape(-1, 1)
    else:
        taken = _taken_by_workers(plan, num_devices)
    return Stream(
        num_devices,
        plan.num_h2d,
        plan.num_ipc,
        np.array([bucket.source for bucket in plan.buckets], np.int32),
        np.array([bucket.round for bucket in plan.buckets], np.int32),
        np.array([bucket.size_bytes for bucket in plan.buckets], np.int64),
        taken,
        hops,
    )


def _taken_by_workers(plan: UpdatePlan, num_devices: int) -> Longs:
    taken = np.zeros((len(plan.buckets), num_devices), np.int64)
    columns: dict[int, Longs] = {}
    for worker, row in enumerate(plan.takes):
        if id(row) not in columns:
            columns[id(row)] = np.array([_taken(plan, bucket, takes) for bucket, takes in enumerate(row)], np.int64)
        taken[:, worker] = columns[id(row)]
    return taken


def _taken(plan: UpdatePlan, bucket: int, takes: tuple[Take, ...]) -> int:
    tensors: dict[str, Tensor] = plan.tensors
    items = plan.buckets[bucket].items
    return sum(tensors[items[take.item].piece.tensor].itemsize * take.box.num_elements for take in takes)


def even_stream(
    num_devices: int,
    num_rounds: int,
    *,
    bucket_bytes: int = 1,
    total_bytes: int | None = None,
    taken_share: float = 1.0,
    num_h2d: int = 1,
    num_ipc: int = 2,
) -> Stream:
    """Every device a source of as many buckets, all of one size; with `total_bytes` the last round is smaller."""
    if num_devices < 1 or num_rounds < 1:
        raise ValueError(f"an update has at least one device and one round, got {num_devices} and {num_rounds}")
    source = np.tile(np.arange(num_devices, dtype=np.int32), num_rounds)
    turn = np.repeat(np.arange(num_rounds, dtype=np.int32), num_devices)
    size = np.full(len(source), bucket_bytes, np.int64)
    if total_bytes is not None:
        each = -(-total_bytes // num_devices)
        if not (num_rounds - 1) * bucket_bytes < each <= num_rounds * bucket_bytes:
            raise ValueError(
                f"{total_bytes} bytes on {num_devices} devices are {-(-each // bucket_bytes)} rounds of buckets of "
                f"{bucket_bytes} bytes, got {num_rounds}"
            )
        size[turn == num_rounds - 1] = each - (num_rounds - 1) * bucket_bytes
    taken = np.rint(size[:, None] * taken_share).astype(np.int64)
    return Stream(num_devices, num_h2d, num_ipc, source, turn, size, taken)
