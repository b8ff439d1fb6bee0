"""Counts of weight updates: an engine's memory while it takes the first one, and bytes through the host's memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.support.update import far
from treadle.dist.rank_world import RankWorld
from treadle.update import Endpoint, Plain, Source, Updater
from treadle.update.rank import context
from treadle.update.worker.arrived_boxes import Arrival, Assembly
from treadle.update.worker.staging import assembled
from treadle.weights.buffer_sizes import Memory
from treadle.weights.layouts import replicated, sharded
from treadle.weights.tensor_boxes import Box, Tensor
from treadle.weights.update_plan import UpdatePlan, plan_update

LAYERS, WIDTH, HIDDEN, VOCABULARY = 32, 4096, 14336, 128256
SHARDS, WORKERS = 64, 8
FREE_BYTES = 8 << 30
"""Of a GPU of 80 GiB, of which vLLM has taken nine tenths."""


def counts() -> dict[str, float]:
    """Return the counts."""
    plan = _plan()
    buffers, assembled_bytes = plan.bucket_bytes * (plan.num_h2d + plan.num_ipc), _most_assembled(plan)
    model = sum(tensor.size_bytes for tensor in plan.tensors.values())
    shape = f"first update of vLLM, FSDP{SHARDS} into TP{WORKERS}, {model / 2**30:.1f} GiB"
    through, moved = _through_host()
    return {
        f"{shape}: buckets": len(plan.buckets),
        f"{shape}: MiB of a bucket": plan.bucket_bytes / 2**20,
        f"{shape}: GiB of buffers": buffers / 2**30,
        f"{shape}: most GiB in assembly": assembled_bytes / 2**30,
        f"{shape}: most GiB of both": (buffers + assembled_bytes) / 2**30,
        "update on a device, defaults: bytes through the host a byte": through / moved,
    }


def _tensors() -> Iterator[Tensor]:
    """A dense model of 8 billion parameters in bf16, by layers."""
    yield Tensor("embed", (VOCABULARY, WIDTH), "bfloat16")
    for layer in range(LAYERS):
        for name, rows, columns in (
            ("q", WIDTH, WIDTH),
            ("k", WIDTH // 4, WIDTH),
            ("v", WIDTH // 4, WIDTH),
            ("o", WIDTH, WIDTH),
            ("gate", HIDDEN, WIDTH),
            ("up", HIDDEN, WIDTH),
            ("down", WIDTH, HIDDEN),
        ):
            yield Tensor(f"layers.{layer}.{name}", (rows, columns), "bfloat16")
    yield Tensor("head", (VOCABULARY, WIDTH), "bfloat16")


def _plan() -> UpdatePlan:
    """The plan that update ranks make: an engine that copies while it loads, of which each worker takes all."""
    tensors = list(_tensors())
    free = min(FREE_BYTES, getattr(context, "DEVICE_BYTES", FREE_BYTES))
    return plan_update(sharded(tensors, SHARDS), replicated(tensors, WORKERS), Memory(free, copies=1))


def _most_assembled(plan: UpdatePlan) -> int:
    """The most bytes of tensors that a worker puts together at once, complete ones included until they are loaded."""
    assembly, most = Assembly(), 0
    wanted = {name: [Box.whole(tensor.shape)] for name, tensor in plan.tensors.items()}
    for number, bucket in enumerate(plan.buckets):
        parts = []
        for take in plan.taken(0, number):
            name = bucket.items[take.item].piece.tensor
            made = torch.empty(take.box.shape, dtype=torch.bfloat16, device="meta")
            parts.append(Arrival(name, take.box, made))
        held = assembled(assembly, parts, wanted)
        whole = [arrival for arrival, _ in assembly._parts.values()]
        most = max(most, sum(arrival.tensor.nbytes for arrival in (*held, *whole)))
    return most


def _through_host() -> tuple[int, int]:
    """Bytes that the second update of an engine copies between a device and the host, and those that it moves."""
    far.enter()
    copied = 0
    copy, dispatch = far._copy, far.FarTensor.__torch_dispatch__

    def counting_copy(target: Any, source: Any, non_blocking: bool = False) -> Any:
        nonlocal copied
        if isinstance(target, far.FarTensor) != isinstance(source, far.FarTensor):
            copied += target.nbytes
        return copy(target, source, non_blocking)

    def counting_dispatch(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        nonlocal copied
        if kwargs and kwargs.get("device") is not None and kwargs["device"].type == "cpu":
            copied += args[0].nbytes
        return dispatch(func, types, args, kwargs)

    state = {f"w{i}": torch.full((256, 512), float(i), dtype=torch.bfloat16) for i in range(6)}
    state |= {f"norm{i}": torch.full((512,), float(i), dtype=torch.bfloat16) for i in range(6)}
    weights = Source.of({name: far.far(tensor) for name, tensor in state.items()})
    engine = Plain({name: far.far(torch.zeros_like(tensor)) for name, tensor in state.items()})
    far._copy, far.FarTensor.__torch_dispatch__ = counting_copy, classmethod(counting_dispatch)  # type: ignore[assignment]
    try:
        with tempfile.TemporaryDirectory(prefix="treadle-c") as place:
            sockets = Path(place, "s")
            sockets.mkdir(mode=0o700)
            world = RankWorld.host(1)
            with (
                Endpoint(engine, sockets, 0),
                Updater(sockets, ledger=Path(place, "l"), device=far.FAR, world=world) as updater,
            ):
                updater.update(weights, 1)
                before = copied
                done = updater.update(weights, 2)
                return copied - before, done.size_bytes
    finally:
        far._copy, far.FarTensor.__torch_dispatch__ = copy, dispatch  # type: ignore[method-assign]
