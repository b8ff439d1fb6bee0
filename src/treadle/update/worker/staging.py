"""Between a buffer and an engine: a worker's share of a bucket as arrivals, and the export of one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from treadle.update.memory.digests import read_digests, write_digests
from treadle.update.memory.ipc_buffers import Buffer
from treadle.update.protocol.update_messages import Share
from treadle.update.worker.adapter import Adapter
from treadle.update.worker.arrived_boxes import Arrival, Assembly, Leaving, StagedArrivals
from treadle.update.worker.worker_plan import WorkerPlan
from treadle.weights.tensor_boxes import Box


def arrivals_of(plan: WorkerPlan, share: Share, buffer: Buffer, *, checked: bool) -> StagedArrivals:
    """Return the boxes that a worker takes of a bucket in a buffer."""
    table = read_digests(buffer.tensor, share.table_bytes, share.checks) if checked else {}
    return StagedArrivals(plan.staged(share), buffer.tensor, table)


def assembled(assembly: Assembly, parts: Iterable[Arrival], wanted: Mapping[str, Sequence[Box]]) -> list[Arrival]:
    """Return the wanted pieces, given by name, that these parts complete. A part may belong to several pieces."""
    whole = []
    for part in parts:
        meeting = [(box, common) for box in wanted.get(part.name, ()) if (common := part.box.meet(box)) is not None]
        if not meeting:
            raise ValueError(f"{part.name} {part.box} was never wanted")
        for box, common in meeting:
            done = assembly.add(_part_of(part, common), box)
            if done is not None:
                whole.append(done)
    return whole


def _part_of(part: Arrival, box: Box) -> Arrival:
    """A part of an arrival. It has no digest: that of the whole arrival is checked after `load`."""
    if box == part.box:
        return part
    return Arrival(part.name, box, part.tensor[box.slices(part.box)])


def export_bucket(adapter: Adapter, plan: WorkerPlan, share: Share, buffer: Buffer, *, checked: bool) -> str | None:
    """Copy a bucket of an engine's weights, and its digests, into a buffer; None, or what went wrong."""
    items = plan.items_of(share)
    items.check_room(buffer.tensor)
    error = adapter.export(Leaving(items, buffer.tensor))
    if error is None and checked:
        arrived = StagedArrivals(plan.columns_of(share), buffer.tensor, {})
        write_digests(buffer.tensor, share.table_bytes, arrived.digests())
    return error
