"""Runs steps that overlap and that offload, and holds what they took against what the simulator predicts.

On a device ops take what they take, and the next step is predicted from the durations of the last. On a CPU ranks share
the cores, so there the ops are paced: each takes a given time without computing for all of it, and the prediction is
that of these times.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import treadle
from treadle import sim_device
from treadle.moe import MoELayer
from treadle.runtime.pipeline_options import SavedName
from treadle.selfcheck.check_experts import far
from treadle.selfcheck.check_gradients import OVERLAPPED, schedule_for, shapes_of
from treadle.selfcheck.check_report import FailedError, Passed
from treadle.selfcheck.ranks import run_ranks
from treadle.selfcheck.setup import Setup

NAME, LAYERS = OVERLAPPED[0], 1


class LayerSize(NamedTuple):
    """The size of a layer, and the tokens of a micro-batch."""

    width: int
    hidden: int
    num_tokens: int


ON_CPU, ON_DEVICE = LayerSize(16, 16, 16), LayerSize(1024, 2048, 2048)

STEPS = {False: 6, True: 2}
"""How many steps are measured, in full and with --quick; the first, which finds out shapes, is one more."""

STEP_S = {False: 2.0, True: 1.0}
"""How long a paced step is predicted to take."""

TOLERANCE = 1e-3
"""Between the gradients of two runs in float32."""

ADVICE = "do not offload on this machine; report it with this file"


def check_overlap(setup: Setup) -> Passed:
    """Measures a step of MoE layers whose exchanges run beside computation."""
    told = run_ranks(setup, setup.num_ranks, measure_rank, "leave")[0]
    numbers = {name: told[name] for name in ("measured_ms", "predicted_ms", "ratio", "hidden")}
    return Passed(
        f"{NAME}, {told['mesh']}: a step took {told['measured_ms']:.1f} ms, predicted "
        f"{told['predicted_ms']:.1f}: x{told['ratio']:.2f}; {told['hidden']:.0%} of communication hidden",
        numbers,
    )


def check_offload(setup: Setup) -> Passed:
    """Measures the same step with saved tensors offloaded, and compares gradients and bytes with those left alone."""
    both = run_ranks(setup, setup.num_ranks, offload_rank)
    moved = [offloaded for _, offloaded in both]
    for rank, (a, b) in enumerate(both):
        if not b["moved_bytes"]:
            raise FailedError(f"rank {rank} has offloaded nothing", ADVICE)
        off = max(far(got, want) for got, want in zip(b["grads"], a["grads"], strict=True))
        if not off <= TOLERANCE:
            raise FailedError(f"rank {rank}: a gradient is off by {off:.1e} with offload", ADVICE)
    told = moved[0]
    peak = max(each["peak_bytes"] for each in moved)
    numbers = {
        "measured_ms": told["measured_ms"],
        "predicted_ms": told["predicted_ms"],
        "ratio": told["ratio"],
        "peak_bytes": peak,
        "peak_ratio": peak / max(1, told["predicted_peak_bytes"]),
        "moved_bytes": sum(each["moved_bytes"] for each in moved),
    }
    return Passed(
        f"{NAME}, {told['mesh']}: gradients as without; {peak / 1e6:.3g} MB saved at once, "
        f"x{numbers['peak_ratio']:.2f} of predicted; a step took {told['measured_ms']:.1f} ms, predicted "
        f"{told['predicted_ms']:.1f}: x{told['ratio']:.2f}",
        numbers,
    )


def offload_rank(setup: Setup, rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measures steps that leave saved tensors where they are, and steps that offload them."""
    return measure_rank(setup, rank, "count"), measure_rank(setup, rank, "offload")


def measure_rank(setup: Setup, rank: int, saved: SavedName) -> dict[str, Any]:
    """Return what steps took and what was predicted, from the durations of the ops of the step before each."""
    shape, device = shapes_of(setup)[0], setup.device(rank)
    pp, ep = shape.pp, shape.ep
    size = ON_DEVICE if setup.kind not in ("cpu", sim_device.NAME) else ON_CPU
    schedule = schedule_for(NAME, pp)
    mesh = init_device_mesh(setup.kind, (pp, 1, ep), mesh_dim_names=("pp", "dp", "ep"))
    torch.manual_seed(5 + rank // ep)
    stages: dict[int, nn.Module] = {}
    for chunk in range(schedule.vpp):
        layers = [MoELayer(size.width, size.hidden, 4, ep=ep, ep_rank=rank % ep) for _ in range(LAYERS)]
        stages[chunk] = nn.Sequential(*layers).to(device)
    paced = paced_costs(setup, schedule) if setup.kind == "cpu" else None
    options = treadle.RunOptions(deadline_s=setup.deadline_s, saved=saved)
    if paced is not None:
        options = replace(options, lanes="paced", costs=paced)
    pipe = treadle.Pipeline(stages, schedule, mesh=mesh, loss_fn=nn.functional.mse_loss, options=options)
    num_tokens, draw = schedule.num_microbatches * size.num_tokens, torch.Generator().manual_seed(rank % ep)
    x = torch.randn(num_tokens, size.width, generator=draw).to(device)
    pipe.step(x, x)
    before = pipe.gather_trace()
    measured, predicted, hidden = [], [], []
    for _ in range(STEPS[setup.quick]):
        for stage in stages.values():
            stage.zero_grad()
        pipe.step(x, x)
        trace = pipe.gather_trace()
        expected = treadle.simulate(trace.program, paced if paced is not None else treadle.fit(before))
        measured.append(_ms(trace))
        predicted.append(_ms(expected))
        cover = [of_rank.communication for of_rank in treadle.measure(trace).ranks]
        hidden.append(sum(c.hidden for c in cover) / max(1, sum(c.total for c in cover)))
        before = trace
    told: dict[str, Any] = {
        "mesh": f"PP{pp} x EP{ep}",
        "measured_ms": statistics.median(measured),
        "predicted_ms": statistics.median(predicted),
        "ratio": statistics.median(m / p for m, p in zip(measured, predicted, strict=True)),
        "hidden": statistics.median(hidden),
        "grads": [_host(p.grad) for stage in stages.values() for p in stage.parameters()],
    }
    if saved != "leave":
        told |= _bytes(pipe, paced if paced is not None else treadle.fit(before))
    pipe.close()
    return told


def paced_costs(setup: Setup, schedule: treadle.Schedule) -> treadle.Costs:
    """Return DeepSeek-V3's published times, all scaled alike so that a step takes `STEP_S`."""
    costs = treadle.load_costs("deepseek-v3-h800")
    trace = treadle.simulate(treadle.lower(schedule, costs, treadle.LoweringOptions(layers=LAYERS, moe=True)), costs)
    factor = STEP_S[setup.quick] / (trace.makespan / 1e9)
    layer, message = ({name: round(t * factor) for name, t in of.items()} for of in (costs.layer, costs.message))
    return replace(costs, layer=layer, message=message)


def _bytes(pipe: treadle.Pipeline, costs: treadle.Costs) -> dict[str, int]:
    assert pipe.report is not None
    report = pipe.report.saved
    assert report is not None
    layout = replace(pipe.program.layout, saved=report.by_kind, saved_unit="bytes")
    peak = treadle.measure(treadle.simulate(replace(pipe.program, layout=layout), costs)).peak
    return {"peak_bytes": report.peak, "moved_bytes": report.moved, "predicted_peak_bytes": int(peak)}


def _ms(trace: treadle.Trace) -> float:
    """Return the milliseconds of a trace in real time, whose ticks are nanoseconds."""
    return trace.makespan / 1e6


def _host(grad: Tensor | None) -> Tensor:
    assert grad is not None
    return grad.cpu()
