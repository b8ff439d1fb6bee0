"""The estimate of activations is held to what the job's Program, simulated, keeps alive."""

from __future__ import annotations

from dataclasses import replace

import pytest

from treadle.estimate import Job, load_cluster, load_model
from treadle.estimate.job import OFFLOADED
from treadle.estimate.job_memory import estimate_memory
from treadle.estimate.job_stages import stage_rows
from treadle.estimate.op_costs import estimate_costs
from treadle.lowering.lower import lower
from treadle.lowering.options import LoweringOptions
from treadle.schedules import generate
from treadle.simulator import measure, simulate

MODEL = replace(load_model("llama3-8b"), num_hidden_layers=16)
RECOMPUTED = [(), ("attn",), ("mlp",), ("attn", "mlp")]


def _job(schedule: str, pp: int, vpp: int, recompute: tuple[str, ...], *, offload: tuple[str, ...] = ()) -> Job:
    return Job(
        MODEL,
        load_cluster(f"h100:{pp}"),
        pp=pp,
        vpp=vpp,
        schedule=schedule,
        recompute=recompute,
        offload=offload,
        global_batch_size=12,
    )


def _peaks(job: Job) -> list[float]:
    """Bytes that the Program's ranks keep at most."""
    costs = estimate_costs(job)
    options = LoweringOptions(
        blocks=stage_rows(job), by_layer=True, padded=True, recompute=job.recompute, offload=bool(job.offload), moe=True
    )
    schedule = generate(job.schedule, pp=job.pp, vpp=job.vpp, microbatches=job.num_microbatches)
    return list(measure(simulate(lower(schedule, costs, options), costs)).peaks)


@pytest.mark.parametrize("recompute", RECOMPUTED)
@pytest.mark.parametrize(("schedule", "pp", "vpp"), [("zb-h1", 2, 1), ("zb-h1", 4, 1), ("zb-v", 2, 2), ("zb-v", 4, 2)])
def test_split_backwards_keep_what_was_computed_again(
    schedule: str, pp: int, vpp: int, recompute: tuple[str, ...]
) -> None:
    job = _job(schedule, pp, vpp, recompute)
    saved = [rank.activations + rank.logits for rank in estimate_memory(job)]
    assert saved == pytest.approx(_peaks(job), rel=0.04)  # the half of a layer that is computed again


@pytest.mark.parametrize("recompute", RECOMPUTED)
def test_whole_backwards_free_what_was_computed_again(recompute: tuple[str, ...]) -> None:
    job = _job("1f1b", 4, 1, recompute)
    found, peaks = estimate_memory(job), _peaks(job)
    saved = [rank.activations + rank.logits for rank in found]
    if not recompute:
        assert saved == pytest.approx(peaks, rel=0.02)
    for low, rank, peak in zip(saved, found, peaks, strict=True):  # a layer that is computed again is temporary
        assert low <= 1.01 * peak
        assert low + rank.temporary >= 0.75 * peak


@pytest.mark.parametrize(("schedule", "vpp"), [("zb-h1", 1), ("zb-v", 2)])
def test_what_weight_halves_wait_with_is_not_offloaded(schedule: str, vpp: int) -> None:
    job = _job(schedule, 4, vpp, ("attn", "mlp"), offload=OFFLOADED)
    saved = [rank.activations + rank.logits for rank in estimate_memory(job)]
    peaks = _peaks(job)
    assert max(saved) == pytest.approx(max(peaks), rel=0.04)
    assert all(0.95 * peak <= each <= peak + 2**30 for each, peak in zip(saved, peaks, strict=True))
