"""Updates workers beside the ranks, checks every byte, and holds what it took against what the rates predict."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch

from treadle import sim_device
from treadle.ir.ops import OpKind
from treadle.ir.trace import Trace
from treadle.selfcheck.check_report import FailedError, Passed, SkippedError
from treadle.selfcheck.ranks import run_ranks
from treadle.selfcheck.setup import Setup
from treadle.simulator.waiting import shortest
from treadle.update import Endpoint, Plain, Source, UpdateOptions, Updater
from treadle.update.worker.asking import ask
from treadle.weights.buffer_sizes import Memory
from treadle.weights.layouts import Parallel
from treadle.weights.tensor_boxes import Box, Holding, Tensor
from treadle.weights.update_rates import Rates, simulate_update

NUM_TENSORS, SIDE, BUCKET_BYTES = 16, 512, 1 << 20
VERSIONS = (1, 2, 3)
"""The first connects, the second gives the rates, the third is held against them."""

ADVICE = "do not update engines from this machine; report it with this file"


def check_update(setup: Setup) -> Passed:
    """Update two workers three times: pipeline stages into tensor parallelism."""
    if setup.kind == sim_device.NAME:
        raise SkippedError("processes share memory of cpu and cuda alone; give --device cpu")
    place = Path(tempfile.mkdtemp(prefix="treadle-selfcheck-"))
    try:
        told = run_ranks(setup, 2, update_rank, place, beside=serve)[0]
    finally:
        shutil.rmtree(place, ignore_errors=True)
    size_mb = NUM_TENSORS * SIDE * SIDE * 2 / 1e6
    return Passed(
        f"{size_mb:.0f} MB into 2 workers, every byte right: moved in {told['measured_ms']:.1f} ms, predicted from its "
        f"rates {told['predicted_ms']:.1f}: x{told['ratio']:.2f}",
        told,
    )


def layouts(num: int) -> tuple[Holding, Holding]:
    """Return what ranks have and what workers want."""
    tensors = [Tensor(f"layers.{at}", (SIDE, SIDE), "bfloat16") for at in range(NUM_TENSORS)]
    stage = {tensor.name: at * num // NUM_TENSORS for at, tensor in enumerate(tensors)}
    have = Parallel(pp=num, stage=stage.__getitem__).holding(tensors)
    return have, Parallel(tp=num, dim=lambda name: int(name.split(".")[1]) % 2).holding(tensors)


def numbers(name: str, version: int) -> torch.Tensor:
    """Return a whole tensor of a version."""
    draw = torch.Generator().manual_seed(1000 * version + int(name.split(".")[1]))
    return torch.randn(SIDE, SIDE, generator=draw).to(torch.bfloat16)


def update_rank(setup: Setup, rank: int, place: Path) -> dict[str, float]:
    """Updates, asks the worker beside this rank what it has, and returns milliseconds."""
    have, want = layouts(2)
    options = UpdateOptions(
        Memory(free_bytes=4 * BUCKET_BYTES, share=1.0, target_bytes=BUCKET_BYTES, least_bytes=BUCKET_BYTES),
        deadline_s=setup.deadline_s,
    )
    traces = []
    with Updater(place, ledger=place / "log", options=options, device=setup.device(rank)) as updater:
        for version in VERSIONS:
            state = {p.tensor: numbers(p.tensor, version).to(setup.device(rank)) for p in have.pieces[rank]}
            done = updater.update(Source.of(state, have, rank), version)
            traces.append(updater.trace(done))
            served, body = ask(place, rank, b"")
            boxes = {piece.tensor: piece.box for piece in want.pieces[rank]}
            expected = digest({name: _cut(numbers(name, version), box) for name, box in boxes.items()})
            if (served, body) != (version, expected):
                raise FailedError(f"worker {rank} has other bytes than version {version}, and says {served}", ADVICE)
    predicted = simulate_update(traces[-1].program, rates_of(traces[-2]))
    measured_ms, predicted_ms = traces[-1].makespan / 1e6, predicted.makespan / 1e6
    return {"measured_ms": measured_ms, "predicted_ms": predicted_ms, "ratio": measured_ms / predicted_ms}


def rates_of(trace: Trace) -> Rates:
    """Return bytes a second of each kind of op, without the waits of ranks for each other."""
    dur, kind, size = shortest(trace), trace.program.kind, trace.program.size_bytes

    def rate(of: OpKind) -> float | None:
        took_s = float(np.sum(dur[kind == of])) / 1e9
        return float(np.sum(size[kind == of])) / took_s if took_s > 0 else None

    return Rates(h2d=rate(OpKind.H2D), broadcast=rate(OpKind.BROADCAST), reload=rate(OpKind.RELOAD))


def serve(setup: Setup, rank: int, place: Path) -> None:
    """Is a worker until its process is ended."""
    _, want = layouts(2)
    device, boxes = setup.device(rank), {piece.tensor: piece.box for piece in want.pieces[rank]}
    held = {name: torch.zeros(box.shape, dtype=torch.bfloat16, device=device) for name, box in boxes.items()}
    plain = Plain(held, tensors=want.tensors, boxes=boxes)
    with Endpoint(plain, place, rank, answer=partial(_answer, plain)):
        threading.Event().wait()


def _answer(plain: Plain, body: bytes) -> tuple[int, bytes]:
    with plain.serving() as version:
        return version, digest(plain.held)


def _cut(whole: torch.Tensor, box: Box) -> torch.Tensor:
    return whole[box.slices(Box.whole(tuple(whole.shape)))]


def digest(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return a digest of tensors by name."""
    hashed = hashlib.sha256()
    for name in sorted(tensors):
        hashed.update(tensors[name].cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return hashed.digest()
