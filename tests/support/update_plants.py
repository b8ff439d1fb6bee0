"""Mistakes with streams, devices and pinned memory in weight updates; `planted.py --streams` plants them."""

from __future__ import annotations

from tests.support.plant import Plant

UPDATES = "updates"
"""In place of the steps that meet a mistake: it is looked for in updates (`support/update/sim_updates.py`)."""

COPYING = "treadle.update.memory.copying"
WORKER = "treadle.update.worker.worker"
LOOP = "treadle.update.rank.bucket_loop"


def _line(about: str, module: str, old: str, new: str) -> Plant:
    return Plant(about, module, ((old, new),), UPDATES)


UPDATE_PLANTS = {
    "uploaded-from-pageable-memory": _line(
        "weights are uploaded from memory that is not pinned",
        COPYING,
        "room = streams.pinned(part.nbytes).view(into.dtype).view(part.shape)",
        "room = torch.empty(part.shape, dtype=into.dtype)",
    ),
    "piece-read-early": _line(
        "weights are read on the host before their copy has ended",
        COPYING,
        "    for done, part in ahead:\n        yield done, opaque(part.tensor())",
        "    for done, part in ahead:\n        yield done, opaque(part._room)",
    ),
    "copies-not-finished": _line(
        "nothing waits for copies on a device",
        COPYING,
        "            event = streams.event(device)\n            while not event.query():\n"
        "                time.sleep(_POLL_S)\n",
        "            event = streams.event(device)\n",
    ),
    "load-not-waited-for": _line(
        "a bucket's buffer is filled again before it is loaded",
        WORKER,
        "                finish_copies(buffer.tensor.device, self.adapter.device)\n                self._refuse_wrong(",
        "                self._refuse_wrong(",
    ),
    "finish-not-waited-for": _line(
        "a worker votes before its engine has made the model whole",
        WORKER,
        "        finish_copies(self.adapter.device)  #",
        "        #",
    ),
    "packed-before-the-weights": _line(
        "weights are packed before the trainer's stream has written them",
        LOOP,
        "            stream.wait_event(self._streams.event(device))\n",
        "",
    ),
    "broadcast-before-packing": _line(
        "a bucket is broadcast before it is packed",
        LOOP,
        "            self._streams.current(self._device).wait_event(ready)\n",
        "            pass\n",
    ),
    "broadcast-not-waited-for": _line(
        "a bucket is loaded before it has come",
        "treadle.update.rank.broadcast",
        "                work.wait(self._deadline)\n",
        "                work.is_completed()\n",
    ),
    "buffers-on-the-first-device": _line(
        "buffers are on device 0",
        "treadle.update.rank.rank_buffers",
        "self.memory.make(size_bytes, self.device)",
        "self.memory.make(size_bytes, type(self.device)(self.device.type, 0))",
    ),
    "digests-on-the-host": _line(
        "numbers for the digests of a device are made without a device",
        "treadle.update.memory.device_sums",
        "like.new_ones(num, dtype=torch.int64)",
        "torch.ones(num, dtype=torch.int64)",
    ),
}
