"""Runs steps under the stream checker: is every read and write ordered by what a GPU promises, and by nothing else."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import treadle
from treadle.runtime.checker import check_streams, order_findings
from treadle.runtime.checker.log import Collective
from treadle.runtime.pipeline_options import SavedName
from treadle.selfcheck.check_gradients import OVERLAPPED, STEPS, schedule_for, shapes_of
from treadle.selfcheck.check_report import FailedError, Passed
from treadle.selfcheck.models import make_batch, own_stage, whole_model
from treadle.selfcheck.ranks import run_ranks
from treadle.selfcheck.setup import Setup

CASES: dict[bool, list[tuple[str, SavedName]]] = {
    True: [(OVERLAPPED[0], "leave")],
    False: [(OVERLAPPED[0], "leave"), (OVERLAPPED[0], "offload"), *((name, "leave") for name in OVERLAPPED[1:])],
}
"""Schedules that overlap, and what becomes of saved tensors; with --quick and in full."""

ADVICE = "a GPU may compute other numbers than this; report it with this file"


def check_stream_order(setup: Setup) -> Passed:
    """Check overlapped steps. They run on the CPU, whatever the device: the checker is a device of its own."""
    here = replace(setup, device_type="cpu")
    num_entries = num_waits = 0
    for name, saved in CASES[setup.quick]:
        told = run_ranks(here, setup.num_ranks, checked_rank, name, saved)
        findings = [finding for found, _, _, _ in told for finding in found]
        findings += [str(f) for f in order_findings({rank: calls for rank, (_, calls, _, _) in enumerate(told)})]
        if findings:
            raise FailedError(f"{name}, {saved}: {len(findings)} findings, the first: {findings[0]}", ADVICE)
        num_entries += sum(num for _, _, num, _ in told)
        num_waits += sum(num for _, _, _, num in told)
    names = ", ".join(f"{name}{'' if saved == 'leave' else f' with {saved}'}" for name, saved in CASES[setup.quick])
    return Passed(
        f"{names}, {shapes_of(setup)[0]}: {num_entries:,} launches, waits and frees in order",
        {"num_entries": num_entries, "num_host_waits": num_waits},
    )


def checked_rank(setup: Setup, rank: int, name: str, saved: SavedName) -> tuple[list[str], list[Collective], int, int]:
    """Return findings, the calls on communicators, the number of entries, and of the host's waits inside ops."""
    shape, device = shapes_of(setup)[0], setup.device(rank)
    schedule = schedule_for(name, shape.pp)
    pp_rank, replica = divmod(rank, shape.replicas)
    model = whole_model(shape, schedule.placement.num_stages, torch.float32, device)
    numbers = schedule.placement.stages[pp_rank]
    stages: dict[int, nn.Module] = {c: own_stage(model[n], shape.ep, replica % shape.ep) for c, n in enumerate(numbers)}
    inputs, targets = make_batch(shape, schedule, torch.float32, device)
    x, target = list(inputs[replica]), list(targets[replica])
    mesh = init_device_mesh(setup.kind, (shape.pp, shape.dp, shape.ep), mesh_dim_names=("pp", "dp", "ep"))
    options = treadle.RunOptions(deadline_s=setup.deadline_s, saved=saved)
    with check_streams() as checker:
        pipe = treadle.Pipeline(stages, schedule, mesh=mesh, loss_fn=nn.functional.mse_loss, options=options)
        for _ in range(STEPS):
            pipe.step(x, target)
        report, calls = checker.report(), list(checker.collectives)
        pipe.close()
    for finding in report.findings:
        finding.rank = rank
    return [str(finding) for finding in report.findings], calls, report.num_entries, report.host_waits.total()
