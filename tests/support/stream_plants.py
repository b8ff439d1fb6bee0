"""Mistakes with streams, devices and pinned memory, which only a device shows; `planted.py --streams` plants them."""

from __future__ import annotations

from tests.support.plant import Plant

OVERLAPPED = "kind=layers,ep=2,schedule=interleaved-overlap,num_layers=1,dropout=False"
CELLS = "kind=cells,schedule=1f1b|zb-h1,dropout=False"
REPLICAS = "kind=dp,layered=True,schedule=interleaved|zb-v,num_layers=1,dropout=False"
SHARDED = "kind=sharded,layered=True,num_layers=2,dropout=False"
OFFLOADED = "kind=offload,schedule=interleaved-overlap,dropout=False"
RANDOM = "kind=layers,ep=2,schedule=interleaved-overlap,num_layers=1,dropout=True"

STREAMS = "treadle.dist.streams"
LANES = "treadle.runtime.run.lanes.stream"
CHANNEL = "treadle.dist.channel"
GROUPS = "treadle.dist.groups"
SEGMENTS = "treadle.runtime.model.segments"
BUCKET = "treadle.runtime.model.gradient_bucket"


def _line(about: str, module: str, old: str, new: str, only: str = OVERLAPPED) -> Plant:
    return Plant(about, module, ((old, new),), only)


STREAM_PLANTS = {
    "event-not-recorded": _line(
        "events are made and not recorded",
        STREAMS,
        "event.record(torch.accelerator.current_stream(device))",
        "pass",
    ),
    "event-of-the-default-stream": _line(
        "events are recorded on the stream of the thread that launches",
        STREAMS,
        "event.record(torch.accelerator.current_stream(device))",
        "event.record(torch.Stream(stream_id=0, device_index=device.index, device_type=20))",
    ),
    "nothing-recorded": _line(
        "no stream is recorded for any tensor",
        STREAMS,
        "tensor.record_stream(torch.accelerator.current_stream(tensor.device))",
        "pass",
    ),
    "upload-from-pageable-memory": _line(
        "numbers are uploaded from memory that is not pinned",
        STREAMS,
        "room = streams.pinned(made.nbytes).view(dtype).view(made.shape)\n    room.copy_(made)",
        "room = made",
    ),
    "uploaded-to-the-first-device": _line(
        "numbers are uploaded to device 0",
        STREAMS,
        "there = torch.empty(made.shape, dtype=dtype, device=device)",
        "there = torch.empty(made.shape, dtype=dtype, device=torch.device(device.type, 0))",
    ),
    "download-read-early": _line(
        "numbers are read before their copy has ended",
        STREAMS,
        "(await_event or _poll)(self._event)",
        "pass",
    ),
    "download-event-before-its-copy": _line(
        "the event of a download is recorded before its copy",
        STREAMS,
        "        self._room.copy_(tensor.detach(), non_blocking=True)\n"
        "        self._event = streams.event(tensor.device)",
        "        self._event = streams.event(tensor.device)\n"
        "        self._room.copy_(tensor.detach(), non_blocking=True)",
    ),
    "lanes-do-not-wait-for-the-step": _line(
        "lanes do not wait for the stream on which the step begins",
        LANES,
        "stream.wait_stream(current)",
        "pass",
        SHARDED,
    ),
    "lanes-do-not-wait-for-ops": _line(
        "a lane does not wait for the ops of other lanes",
        LANES,
        "stream.wait_event(event)",
        "pass",
    ),
    "end-does-not-wait-for-lanes": _line(
        "the end of a step does not wait for its lanes",
        LANES,
        "self._streams[0].wait_stream(stream)",
        "pass",
        REPLICAS,
    ),
    "end-not-caught-up": _line(
        "the host does not wait for the end of a step",
        LANES,
        "self.device.catch_up()",
        "pass",
    ),
    "end-before-its-op": _line(
        "the event of an op's end is recorded before its kernels",
        LANES,
        "            run()\n            self.failed = None\n            self._end[op] = end = self.device.now()",
        "            self._end[op] = end = self.device.now()\n            run()\n            self.failed = None",
    ),
    "receive-not-waited-for-by-its-stream": _line(
        "a message is read before it has come",
        CHANNEL,
        "for work in works:\n            self.wait(work)\n        return tensors",
        "return tensors",
        CELLS,
    ),
    "received-on-the-first-device": _line(
        "messages are received into memory of device 0",
        CHANNEL,
        "spec.empty(self.device) for spec in boundary",
        "spec.empty(torch.device(self.device.type, 0)) for spec in boundary",
        CELLS,
    ),
    "exchange-not-waited-for-by-its-stream": _line(
        "rows are read before they have come",
        GROUPS,
        "self.wait(self.communicator.alltoall_base(arrived, rows.contiguous(), receive, send))",
        "self.under_way = self.communicator.alltoall_base(arrived, rows.contiguous(), receive, send)",
    ),
    "control-on-the-device": _line(
        "a message of control is made on the default device",
        GROUPS,
        "both = torch.tensor([call, -call], dtype=torch.int64, device=HOST_MEMORY)",
        "both = torch.tensor([call, -call], dtype=torch.int64)",
        REPLICAS,
    ),
    "value-not-recorded": _line(
        "a value is read that another stream has allocated",
        SEGMENTS,
        "for tensor in tensors_in(thing):\n            keep(tensor)",
        "for tensor in tensors_in(thing):\n            pass",
    ),
    "gradient-not-recorded": _line(
        "a gradient is read that another stream has allocated",
        SEGMENTS,
        "keep(grad)  # made on the stream",
        "pass  # made on the stream",
    ),
    "saved-tensor-not-recorded": _line(
        "a tensor is copied to the host that another stream has allocated",
        "treadle.runtime.model.saved.saved_store",
        "        keep(self.tensor)\n",
        "",
        OFFLOADED,
    ),
    "pinned-room-given-back-first": _line(
        "pinned memory is given back before it is read",
        "treadle.runtime.model.saved.saved_store",
        "        flat.copy_(self.room[: self.size_bytes], non_blocking=True)\n"
        "        self._pool.give_back(self.room)\n",
        "        self._pool.give_back(self.room)\n        self.room.zero_()\n"
        "        flat.copy_(self.room[: self.size_bytes], non_blocking=True)\n",
        OFFLOADED,
    ),
    "reduction-not-waited-for-by-its-stream": _line(
        "gradients are read before they are reduced",
        BUCKET,
        "            for work in self._works:\n                self.group.wait(work)\n",
        "",
        REPLICAS,
    ),
    "gather-not-waited-for-by-its-stream": _line(
        "parameters are put in place before they have come",
        "treadle.runtime.model.parameter_bucket",
        "self._group.wait(work)",
        "self.under_way = work",
        SHARDED,
    ),
    "generator-of-the-host": _line(
        "the generator of the host is seeded in place of the device's",
        "treadle.runtime.model.seeding",
        'if device.type in ("cpu", "meta"):',
        "if device.type:",
        RANDOM,
    ),
    "counts-read-early": _line(
        "row counts are read before their copy has ended",
        "treadle.moe.exchanges.all_to_all",
        "routing.trip.tensor(self.await_event)",
        "routing.trip._room",
    ),
}
