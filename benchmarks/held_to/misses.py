"""Causes of rows that a plan is far off for, as far as they are known."""

from __future__ import annotations

from held_to.printed import Row

_CAUSES = {
    "vtrain": "attention that is not fused, layers that are recomputed whole, and no sequence parallelism",
    "gpt-oss-120b": "heads of 64 with sinks and windows: their share of the rate stands for more than attention",
    "nvfp4": "NVFP4 on GB200 gains 1.2 to 1.3 over FP8 at 70B and 1.4 to 1.5 at 405B; nothing in the runs shows why",
    "b300": "two releases with the same flags were measured 22 % apart",
    "host": "bound by the host: its time for a layer is the same on all GPUs in the fit, and differs by host",
    "25.": "a release of 2025, which the constants of the newest release are ahead of",
}


def cause_of(row: Row) -> str:
    """Return why a plan is off for a run, or that it is not known."""
    job = row.job
    if job.cluster.gpu == "a100":
        return _CAUSES["vtrain"]
    if job.model.name == "gpt-oss-120b":
        return _CAUSES["gpt-oss-120b"]
    if job.precision == "nvfp4":
        return _CAUSES["nvfp4"]
    if row.release.startswith("25."):
        return _CAUSES["25."]
    if job.model.name == "qwen3-235b-a22b" and job.cluster.gpu == "b300":
        return _CAUSES["b300"]
    if job.model.is_moe and job.cuda_graph != "whole":
        return _CAUSES["host"]
    return "not known"
