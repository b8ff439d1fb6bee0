"""The advised job: the simplest within the error of the fastest; offload only where nothing fits without."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest

from treadle.estimate import Job, load_cluster, load_model
from treadle.estimate.host_copies import host_bytes, offloaded_bytes
from treadle.estimate.job import OFFLOADED
from treadle.planner import SearchResult, SearchSpace, find_plan, search
from treadle.planner.advised_job import within_error_s
from treadle.planner.job_estimate import estimate_job
from treadle.planner.memory_margin import leaves_margin
from treadle.planner.moving_parts import moving_parts, parts_left_out
from treadle.planner.offload_choice import _sets
from treadle.planner.space import Candidate, candidates
from treadle.schedules import SCHEDULES

GIB = 1 << 30
LLAMA, H100 = load_model("llama3-8b"), load_cluster("h100:8")
SMALL = replace(LLAMA, num_hidden_layers=16, vocab_size=8192, name="small")


def job(**knobs: object) -> Job:
    return Job(LLAMA, H100, **{"global_batch_size": 64, **knobs})  # type: ignore[arg-type]


def points(space: SearchSpace, gpus: str = "h100:8", batch: int = 64) -> list[Candidate]:
    return list(candidates(SMALL, load_cluster(gpus), space, global_batch_size=batch, seq_len=4096))


def test_jobs_compare_by_what_a_person_has_to_get_right() -> None:
    order = [
        job(),
        job(sharding="gradients"),
        job(sharding="parameters"),
        job(tp=2),
        job(tp=2, pp=2),
        job(tp=2, pp=2, vpp=2, schedule="interleaved"),
        job(recompute=("core_attn",)),
        job(recompute=("attn", "layernorm")),
        job(recompute=("attn", "core_attn")),
        job(recompute=("mlp",)),
        job(offload=("attn_norm",)),
        job(offload=("mlp_act",)),
        job(pp=2, vpp=2, schedule="v-half"),
    ]
    parts = [moving_parts(each) for each in order]
    assert parts == sorted(set(parts))
    assert moving_parts(job(pp=2, schedule="zb-h1")).kinds == moving_parts(job(pp=2, tp=2)).kinds


def test_what_is_left_out_is_named() -> None:
    other = job(tp=2, pp=2, vpp=4, schedule="interleaved", recompute=("attn",), offload=("mlp_act",))
    assert parts_left_out(job(tp=4), other) == "no PP, no VPP, no recompute attn, no offload mlp_act"
    assert parts_left_out(job(pp=2), job(pp=2, vpp=2, schedule="zb-v")) == "no VPP, no zb-v"


def test_every_module_that_can_be_recomputed_has_its_place() -> None:
    from treadle.estimate.job import RECOMPUTED

    free = {name for name in RECOMPUTED if not moving_parts(job(recompute=(name,))).recompute}
    assert free == {"layernorm", "mlp_act", "moe_act", "mla_up_proj"}


def check_advice(found: SearchResult) -> None:
    """The advised job fits and is within the error; no job that is known to be is simpler, or as simple and faster."""
    longest = within_error_s(found.fastest)
    assert found.best.step_s <= longest
    assert found.best.memory_bytes <= found.memory_limit
    mine = moving_parts(found.best.job), found.best.step_s
    for each in found.fitting:
        if each.least_s <= longest and moving_parts(each.job) < mine[0]:
            exact = each.simulated_whole()
            tighter = leaves_margin(found.best, found.memory_limit) and not leaves_margin(exact, found.memory_limit)
            assert exact.step_s > longest or exact.memory_bytes > found.memory_limit or tighter


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_bounding_keeps_the_advised_job_and_the_fastest(seed: int) -> None:
    rng = random.Random(seed)
    names = [name for name, each in SCHEDULES.items() if not each.overlapped]
    space = SearchSpace(
        tp=tuple(rng.sample((1, 2, 4), 2)),
        pp=tuple(rng.sample((1, 2, 4), 2)),
        vpp=(2,),
        micro_batch_size=tuple(rng.sample((1, 2, 4), 2)),
        schedules=("1f1b", *rng.sample(names, 2)),
        recompute=((), ("attn",), ("mlp",)),
        offload=rng.choice((((),), ((), ("mlp_act", "core_attn")))),
        balanced=(rng.random() < 0.5,),
    )
    some = points(space, batch=rng.choice((16, 32, 64)))
    limit = rng.choice((14, 20, 60)) * GIB
    bounded, every = search(some, limit), search(some, limit, bounded=False)
    assert (bounded.best, bounded.fastest, bounded.reason) == (every.best, every.fastest, every.reason)
    assert bounded.num_simulated <= every.num_simulated
    check_advice(bounded)


def test_one_host_gets_no_pipeline_and_no_offload() -> None:
    found = find_plan("llama3-8b", "h100:8", space=SearchSpace(tp=(1, 2), pp=(1, 2), balanced=(True,)))
    assert (found.best.job.pp, found.best.job.offload, found.best.job.recompute) == (1, (), ())
    assert found.fastest.step_s <= found.best.step_s <= within_error_s(found.fastest)
    assert found.without_offload is None
    if found.best != found.fastest:
        assert found.reason.startswith(f"{100 * (found.best.step_s / found.fastest.step_s - 1):.1f} % slower")
        assert re.search("fewer moving parts: no |leaves a margin of memory", found.reason)


def test_offload_is_not_considered_while_something_fits_without() -> None:
    found = search(points(SearchSpace(tp=(1,), pp=(2,), schedules=("1f1b",))), 60 * GIB, offload=True)
    assert not any(each.job.offload for each in (*found.fitting, *found.too_large))
    assert found.without_offload is None


ONE = SearchSpace(
    tp=(1,), cp=(1,), pp=(4,), micro_batch_size=(1,), schedules=("1f1b",), recompute=((),), balanced=(False,)
)


def tight() -> int:
    """A limit that the one job of the space exceeds by a little."""
    with pytest.raises(ValueError, match=r"fits into 1\.0 GiB; the least takes"):
        search(points(ONE), GIB)
    (alone,) = search(points(ONE), 80 * GIB).fitting
    return alone.memory_bytes - GIB // 4


def test_offload_is_as_little_as_fits() -> None:
    limit = tight()
    found = search(points(ONE), limit, offload=True)
    best = found.best
    assert best.job.offload
    assert best.memory_bytes <= limit
    assert found.without_offload is None
    for modules in _sets(best.job):
        if offloaded_bytes(replace(best.job, offload=modules), "t") < offloaded_bytes(best.job, "t"):
            assert estimate_job(replace(best.job, offload=modules)).simulated_whole().memory_bytes > limit, modules


def test_the_best_job_without_offload_stands_beside_one_with() -> None:
    space = replace(ONE, offload=((), ("mlp_act",)), recompute=((), ("mlp",)))
    found = search(points(space), tight())
    assert found.without_offload is not None
    assert found.without_offload.job.offload == ()
    assert found.best.job.offload == () or found.best.step_s < found.without_offload.step_s


@pytest.mark.parametrize("host_gib", [0.0, 1.0])
def test_offload_that_the_host_cannot_take_is_refused(host_gib: float) -> None:
    cluster = replace(H100, host_memory_gib=host_gib)
    space = replace(ONE, offload=(OFFLOADED,))
    some = list(candidates(SMALL, cluster, space, global_batch_size=64, seq_len=4096))
    plenty = [Candidate(replace(each.job, cluster=H100), each.balanced) for each in some]
    taken = search(plenty, 80 * GIB).best.job
    assert taken.offload == OFFLOADED
    there = "has none" if not host_gib else "more than its share of 1.0 GiB"
    needed = f"{host_bytes(taken) / GIB:.1f}"
    with pytest.raises(ValueError, match=f"offload needs {needed} GiB of host memory a GPU, .*{there}"):
        search(some, 80 * GIB)
