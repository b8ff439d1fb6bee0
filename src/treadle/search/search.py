"""The search: feasible jobs are bounded, simulated and ranked."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from treadle.costs import Costs
from treadle.estimate import Job
from treadle.estimate.memory import MemoryEstimate, estimate_memory
from treadle.estimate.op_costs import estimate_costs
from treadle.schedules import family
from treadle.search.bound import least_ticks
from treadle.search.front import Front
from treadle.search.layout import layout
from treadle.search.space import Candidate
from treadle.search.step import Step, simulate_step, simulate_whole
from treadle.search.structure import Structure, recomputed_ops

Progress = Callable[[int, int], None]
"""Called with how many candidates are done, and of how many."""


@dataclass(frozen=True)
class Judged:
    """A candidate with its memory, the least time its step can take, and the simulated one where it was needed.

    What a job holds that offloads shows in its simulation only. Before it, its memory is without saved activations.
    """

    job: Job
    costs: Costs
    structure: Structure
    memory: tuple[MemoryEstimate, ...]
    least: int
    ticks: int | None = None

    @property
    def memory_bytes(self) -> int:
        """Bytes of the rank that holds most."""
        return max(rank.total for rank in self.memory)

    @property
    def step_s(self) -> float:
        """Seconds of a step, simulated or at least."""
        ticks = self.ticks if self.ticks is not None else self.least
        return ticks / self.costs.clock.ticks / 1e6

    def simulated(self) -> Judged:
        """Return it with the simulated time."""
        if self.ticks is not None:
            return self
        return self.with_step(simulate_step(self.structure, self.job.num_microbatches, self.costs))

    def simulated_whole(self) -> Judged:
        """Return it with the time of all its micro-batches."""
        return self.with_step(simulate_whole(self.structure, self.job.num_microbatches, self.costs))

    def with_step(self, step: Step) -> Judged:
        """Return it with a simulated step, and with what the step holds where activations are offloaded."""
        held = step.held or (0,) * len(self.memory)
        memory = tuple(
            rank._replace(activations=max(0, size - rank.logits)) if step.held else rank
            for rank, size in zip(self.memory, held, strict=True)
        )
        return replace(self, ticks=step.ticks, memory=memory)


@dataclass(frozen=True)
class Found:
    """What a search found. `front` is in order of time, simulated whole; `fitting` are all that fit, those first."""

    best: Judged
    front: tuple[Judged, ...]
    fitting: tuple[Judged, ...]
    too_large: tuple[Judged, ...]
    num_simulated: int


def search(
    candidates: Iterable[Candidate], memory_limit: int, *, bounded: bool = True, progress: Progress | None = None
) -> Found:
    """Find the job with the shortest step that fits, and the front of time and memory.

    Of jobs with the same time, one that does not offload is preferred, as it has less to go wrong.

    Args:
        candidates: from `treadle.search.space.candidates`.
        memory_limit: bytes that a rank may hold.
        bounded: pass over jobs that cannot be best or on the front. The result is the same, later.
        progress: called with the candidates done, and all of them.

    Raises:
        ValueError: nothing fits; the message says what comes nearest.

    """
    points = list(candidates)
    if not points:
        raise ValueError("there is no candidate to search among; widen the space")
    judged = []
    for number, point in enumerate(points):
        judged.append(judge(point))
        if progress is not None:
            progress(number // 2, len(points))
    fitting = [each for each in judged if each.memory_bytes <= memory_limit]
    done, num_simulated = _simulate(fitting, memory_limit, bounded=bounded, progress=progress, total=len(points))
    too_large = [each for each in judged if each.memory_bytes > memory_limit]
    too_large += [each for each in done if each.memory_bytes > memory_limit]
    fitting = [each for each in done if each.memory_bytes <= memory_limit]
    timed = sorted((each for each in fitting if each.ticks is not None), key=_rank)
    if not timed:
        raise _nothing_fits(too_large, memory_limit)
    exact, others = _simulate_front(timed, too_large, memory_limit)
    front = tuple(_front(exact))
    untimed = [each for each in fitting if each.ticks is None]
    best = _without_offload(front[0], (*others, *untimed), memory_limit)
    shown = {each.job for each in (*front, best)}
    rest = (each for each in (*exact, *others, *untimed) if each.job not in shown)
    named = (*front, *([best] if best not in front else []), *rest)
    return Found(best, front, named, tuple(too_large), num_simulated)


def _simulate_front(
    timed: list[Judged], too_large: list[Judged], memory_limit: int
) -> tuple[list[Judged], list[Judged]]:
    """Simulate the front whole; return it in order of time, and the others. What does not fit after all is dropped."""
    while True:
        front = list(_front(timed))
        found = set(map(id, front))
        timed = [each for each in timed if id(each) not in found]
        whole = sorted((each.simulated_whole() for each in front), key=_rank)
        too_large += [each for each in whole if each.memory_bytes > memory_limit]
        exact = [each for each in whole if each.memory_bytes <= memory_limit]
        if exact:
            return exact, timed
        if not timed:
            raise _nothing_fits(too_large, memory_limit)


def _nothing_fits(too_large: list[Judged], memory_limit: int) -> ValueError:
    nearest = min(too_large, key=lambda each: each.memory_bytes)
    return ValueError(
        f"none of {len(too_large)} candidates fits into {memory_limit / 2**30:.1f} GiB; the least takes "
        f"{nearest.memory_bytes / 2**30:.1f} GiB ({describe(nearest.job)}); take more GPUs or a higher limit"
    )


def judge(candidate: Candidate) -> Judged:
    """Estimate a candidate's costs and memory, lay out its stages, and bound its time."""
    job = candidate.job
    blocks = layout(
        _block_costs(replace(job, schedule="1f1b", vpp=1, offload=False)),
        job.model.blocks,
        job.schedule,
        job.pp,
        job.vpp,
        balanced=candidate.balanced,
    )
    return judge_job(replace(job, layout=blocks))


def judge_job(job: Job) -> Judged:
    """Estimate the costs and memory of a job that has its layout, and bound its time."""
    assert job.layout is not None
    again = recomputed_ops(job)
    costs = estimate_costs(job, inline_recompute=again != job.recompute)
    placement = family(job.schedule).placement(job.pp, job.vpp)
    least = least_ticks(costs, job.layout, placement, job.num_microbatches, again)
    memory = estimate_memory(job)
    if job.offload:
        memory = tuple(rank._replace(activations=0) for rank in memory)
    return Judged(job, costs, Structure.of(job, job.layout, costs), memory, least)


@lru_cache(maxsize=4096)
def _block_costs(job: Job) -> Costs:
    """Return what blocks take; neither schedule nor layout matter to that."""
    return estimate_costs(job)


def _without_offload(best: Judged, others: Iterable[Judged], memory_limit: int) -> Judged:
    """Return the same job without offload, if it fits and is as fast; else the job."""
    if not best.job.offload:
        return best
    plain = replace(best.job, offload=False)
    for each in others:
        if each.job == plain:
            timed = each.simulated_whole()
            assert timed.ticks is not None
            assert best.ticks is not None
            if timed.ticks <= best.ticks and timed.memory_bytes <= memory_limit:
                return timed
    return best


def describe(job: Job) -> str:
    """Return a job's knobs in a line."""
    sizes = {"TP": job.tp, "CP": job.cp, "PP": job.pp, "VPP": job.vpp, "EP": job.ep, "DP": job.dp}
    named = " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1 or name in ("TP", "PP", "DP"))
    extra = [f"recompute {'+'.join(job.recompute)}"] if job.recompute else []
    extra += ["offload"] if job.offload else []
    return ", ".join([f"{job.schedule} {named} MBS{job.micro_batch_size}", *extra])


def _simulate(
    fitting: list[Judged], memory_limit: int, *, bounded: bool, progress: Progress | None, total: int
) -> tuple[list[Judged], int]:
    """Simulate structure after structure, the most promising first; what the front beats is passed over."""
    groups: dict[Structure, list[Judged]] = {}
    for each in sorted(fitting, key=lambda each: each.least):
        groups.setdefault(each.structure, []).append(each)
    front, done, count = Front(), [], 0
    for group in groups.values():
        for each in group:
            if bounded and front.beats(each.least, each.memory_bytes):
                done.append(each)
            else:
                timed = each.simulated()
                assert timed.ticks is not None
                if timed.memory_bytes <= memory_limit:
                    front.add(timed.ticks, timed.memory_bytes)
                done.append(timed)
                count += 1
            if progress is not None:
                progress(total // 2 + len(done) * total // (2 * len(fitting)), total)
    return done, count


def _rank(each: Judged) -> tuple[int, int, str]:
    assert each.ticks is not None
    return each.ticks, each.memory_bytes, f"{describe(each.job)} {each.job.layout}"


def _front(timed: list[Judged]) -> Iterable[Judged]:
    """Yield those that no faster one beats in memory; `timed` is in order of time."""
    least = None
    for each in timed:
        if least is None or each.memory_bytes < least:
            least = each.memory_bytes
            yield each
