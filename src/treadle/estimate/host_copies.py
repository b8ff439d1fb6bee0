"""Offload: what a job's modules copy to the host and back, how long a copy takes, and the host memory it needs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from treadle.estimate.activations import ActivationCut, block_activations
from treadle.estimate.alive import moments
from treadle.estimate.cluster import GIB
from treadle.estimate.job import OFFLOADED, Job
from treadle.estimate.job_stages import rank_rows
from treadle.estimate.rates import constant
from treadle.ir.blocks import LAYERS


def offloaded_bytes(job: Job, block: str) -> int:
    """Return the bytes of a layer (t, d) that one micro-batch copies to the host."""
    return block_activations(ActivationCut.of(job, "p2p", fused_loss=True), block).offloaded


def offload_seconds(job: Job) -> float:
    """Return the time to copy those of a layer over PCIe, one way, while all GPUs that share the link do so."""
    share = job.cluster.pcie_bandwidth / job.cluster.gpus_per_pcie * constant(job.cluster, "pcie")
    return offloaded_bytes(job, "t") / share


def module_bytes(job: Job) -> dict[str, int]:
    """Return the modules of `OFFLOADED` that a layer of the job has, each with the bytes that it would copy."""
    sizes = {name: offloaded_bytes(replace(job, offload=(name,)), "t") for name in OFFLOADED}
    return {name: size for name, size in sizes.items() if size}


def host_bytes(job: Job) -> int:
    """Return the most that a GPU's offloaded activations take on the host."""
    if not job.offload:
        return 0
    sizes = {block: offloaded_bytes(job, block) for block in LAYERS if block in job.model.blocks}
    rows = [[sum(sizes.get(block, 0) for block in row) for row in rank] for rank in rank_rows(job)]
    found = moments(job.schedule, pp=job.pp, vpp=job.vpp, microbatches=job.num_microbatches)
    alive = np.einsum("ic,ic->i", found.full, np.array(rows, np.float64)[found.rank])
    return int(alive.max(initial=0))


def host_shortage(job: Job) -> str | None:
    """Return why the host cannot take what a job offloads, or None if it can."""
    needed, there = host_bytes(job), job.cluster.host_memory_bytes
    if needed <= there:
        return None
    wayout = "offload fewer modules, or set host_memory_gib in a cluster file"
    if not there:
        return f"offload needs {needed / GIB:.1f} GiB of host memory a GPU, and {job.cluster.name} has none; {wayout}"
    return (
        f"offload needs {needed / GIB:.1f} GiB of host memory a GPU, more than its share of {there / GIB:.1f} GiB; "
        f"{wayout}"
    )
