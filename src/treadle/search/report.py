"""A plan for programs to read, and the texts that the terminal and the page share."""

from __future__ import annotations

from typing import Any

from treadle.ir.blocks import write_layout
from treadle.plan.stragglers import StragglerStudy
from treadle.search.chosen import Chosen
from treadle.search.files import untrainable
from treadle.search.judged import Judged
from treadle.search.search import Found
from treadle.search.why import Alternative


def plan_object(
    found: Found, chosen: Chosen, others: tuple[Alternative, ...], study: StragglerStudy | None = None
) -> dict[str, Any]:
    """Return a dict for JSON: the chosen job, the front, and what other values of its knobs would cost."""
    job = chosen.judged.job
    return {
        "model": job.model.name,
        "cluster": job.cluster.name,
        "gpus": job.cluster.num_gpus,
        "candidates": len(found.fitting) + len(found.too_large),
        "too_large": len(found.too_large),
        "simulated": found.num_simulated,
        "chosen": {
            **job_object(chosen.judged),
            "step_s": chosen.step_s,
            "tokens_per_s_per_gpu": chosen.tokens_per_s_per_gpu,
            "tflops_per_gpu": chosen.flops_per_s_per_gpu / 1e12,
            "mfu": chosen.mfu,
            "bubble": chosen.bubble,
            "exposed_communication": chosen.exposed_share,
            "clean": chosen.report.clean,
            "untrainable": untrainable(job),
            "memory": [rank._asdict() for rank in chosen.judged.memory],
        },
        "front": [job_object(each) for each in found.front],
        "alternatives": [
            {
                "knob": other.knob,
                "value": other.value,
                "fits": other.fits,
                "slower": other.slower,
                "memory_bytes": other.judged.memory_bytes,
                "reason": other.reason,
            }
            for other in others
        ],
        "stragglers": study.as_dict() if study is not None else None,
    }


def job_object(judged: Judged) -> dict[str, Any]:
    """Return a job's knobs, its step and its memory."""
    job = judged.job
    assert job.layout is not None
    return {
        "schedule": job.schedule,
        "tp": job.tp,
        "cp": job.cp,
        "pp": job.pp,
        "vpp": job.vpp,
        "ep": job.ep,
        "dp": job.dp,
        "micro_batch_size": job.micro_batch_size,
        "microbatches": job.num_microbatches,
        "global_batch_size": job.global_batch_size,
        "seq_len": job.seq_len,
        "precision": job.precision,
        "layout": write_layout(job.layout, dense=True),
        "recompute": list(job.recompute),
        "offload": job.offload,
        "cuda_graph": job.cuda_graph,
        "step_s": judged.step_s,
        "memory_bytes": judged.memory_bytes,
    }
