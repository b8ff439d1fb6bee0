"""A job that somebody runs, judged: what it is predicted to take, and which settings to change first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from treadle.estimate import Job
from treadle.estimate.host_copies import host_shortage
from treadle.planner.job_estimate import JobEstimate, estimate_candidate, estimate_job
from treadle.planner.run_errors import run_errors
from treadle.planner.space import Candidate, check_schedule, numbers_of_chunks, recompute_sets, searched_schedules
from treadle.schedules import default_schedule, family
from treadle.trainers import TrainerFormat

_FIRST = 5
"""Changes that pairs begin with."""

_CUT = ("pp", "vpp", "schedule", "layout")
"""Fields that decide how layers are put on stages."""

_SIZES = ("tp", "cp", "pp", "ep", "etp", "micro_batch_size")


class KnobMove(NamedTuple):
    """A change of one knob: the fields of Job that take other values."""

    knob: str
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Change:
    """A better job, as the settings of a trainer that make it."""

    moves: tuple[KnobMove, ...]
    estimate: JobEstimate
    settings: tuple[tuple[str, str | None], ...]
    """The settings that differ, each with its value there; None where it is left out."""

    step: float
    """Share by which the step is longer; below 0 if it is shorter."""

    memory_bytes: int
    """Bytes that the fullest rank holds more."""


@dataclass(frozen=True)
class JudgedJob:
    """A job with what to change first."""

    estimate: JobEstimate
    memory_limit: int
    changes: tuple[Change, ...]
    """Better by more than the error of a comparison, the best first, each knob once; if the job does not fit, those
    that make it fit."""

    pair: Change | None
    """The best two together, where they are better than the best alone by more than the error."""

    @property
    def fits(self) -> bool:
        """True if the job fits into memory."""
        return _fits(self.estimate, self.memory_limit)

    @property
    def error(self) -> float:
        """The share by which ratios of predicted steps are off: nearer jobs cannot be ranked."""
        return run_errors(self.estimate.job).pair

    @property
    def best(self) -> JobEstimate:
        """The job with the best change, or as it is."""
        first = self.pair or (self.changes[0] if self.changes else None)
        return first.estimate if first is not None else self.estimate


def judge(job: Job, memory_limit: int, trainer: TrainerFormat) -> JudgedJob:
    """Judge a job that has its layout, and look for better ones next to it that its trainer runs."""
    base = estimate_job(job).simulated_whole()
    search = _Neighbours(base, memory_limit, trainer)
    found = JudgedJob(base, memory_limit, (), None)
    longest = base.step_s * (1 - found.error) if found.fits else float("inf")
    singles = search.better([(move,) for move in _moves(job)], longest)
    nearest = sorted(search.seen.values(), key=lambda each: each.step)
    first = list(dict.fromkeys([*(each.moves[0].knob for each in nearest)]))[:_FIRST]
    pairs = search.better(list(_pairs(job, first)), min([longest, *(each.estimate.step_s for each in singles)]))
    alone = singles[0].estimate.step_s if singles else longest
    pair = next((each for each in pairs if each.estimate.step_s < alone * (1 - found.error)), None)
    return replace(found, changes=tuple(_each_knob_once(singles)), pair=pair)


def _each_knob_once(changes: Iterable[Change]) -> Iterator[Change]:
    seen: set[str] = set()
    for each in changes:
        if each.moves[0].knob not in seen:
            seen.add(each.moves[0].knob)
            yield each


def _pairs(job: Job, first: list[str]) -> Iterator[tuple[KnobMove, ...]]:
    """Yield two moves of different knobs, one of them of those that looked best."""
    moves = list(_moves(job))
    for place, one in enumerate(moves):
        for other in moves[place + 1 :]:
            if one.knob != other.knob and (one.knob in first or other.knob in first):
                yield one, other


class _Neighbours:
    """Estimates jobs near one; `seen` are those that fit and were simulated."""

    def __init__(self, base: JobEstimate, memory_limit: int, trainer: TrainerFormat) -> None:
        self._base, self._limit, self._trainer = base, memory_limit, trainer
        self._settings = trainer.settings(base.job)
        self.seen: dict[Job, Change] = {}

    def better(self, moves: list[tuple[KnobMove, ...]], longest: float) -> list[Change]:
        """Return the changes that fit and whose step is shorter than `longest`, the shortest first."""
        found: list[Change] = []
        bounded = [each for move in moves for each in self._estimates(move)]
        for move, estimate in sorted(bounded, key=lambda each: each[1].least):
            if estimate.least_s >= longest or not _fits(estimate, self._limit):
                continue
            change = self.seen.get(estimate.job) or self._changed(move, estimate)
            if change is not None and change.estimate.step_s < longest:
                found.append(change)
                longest = longest if len(move) == 1 else change.estimate.step_s
        return sorted(found, key=lambda each: each.estimate.step_s)

    def _changed(self, move: tuple[KnobMove, ...], estimate: JobEstimate) -> Change | None:
        exact = estimate.simulated_whole()
        if not _fits(exact, self._limit):
            return None
        new = self._trainer.settings(exact.job)
        differing = [name for name in (*self._settings, *new) if self._settings.get(name) != new.get(name)]
        change = Change(
            move,
            exact,
            tuple((name, new.get(name)) for name in dict.fromkeys(differing)),
            exact.step_s / self._base.step_s - 1,
            exact.memory_bytes - self._base.memory_bytes,
        )
        self.seen[exact.job] = change
        return change

    def _estimates(self, moves: tuple[KnobMove, ...]) -> Iterator[tuple[tuple[KnobMove, ...], JobEstimate]]:
        """Yield the estimate of a job after its moves, unless it divides nothing or its trainer cannot run it."""
        fields: dict[str, Any] = {}
        for move in moves:
            fields |= move.fields
        if any(name in _CUT for name in fields):
            fields.setdefault("layout", None)
        try:
            job = replace(self._base.job, **fields)
            check_schedule(job)
            if not self._trainer.runs(job):
                return
            even = job.model.num_hidden_layers % job.num_stages == 0 and "layout" not in {m.knob for m in moves}
            estimate = estimate_candidate(Candidate(job, balanced=not even))
            if self._trainer.runs(estimate.job) and estimate.job != self._base.job:
                yield moves, estimate
        except ValueError:
            return


def _fits(estimate: JobEstimate, limit: int) -> bool:
    return estimate.memory_bytes <= limit and host_shortage(estimate.job) is None


def _moves(job: Job) -> Iterator[KnobMove]:
    """Yield the changes of one knob; numerics, the batch and the sequence stay as they are."""
    for name in _SIZES:
        size = getattr(job, name)
        yield from (KnobMove(name, {name: other}) for other in (2 * size, size // 2) if other >= 1)
    if job.pp > 1:
        yield from _schedules(job)
        yield KnobMove("layout", {"layout": None})
    for parts in recompute_sets(job.model):
        if parts != job.recompute:
            yield KnobMove("recompute", {"recompute": parts, "recompute_layers": 0})
    if job.recompute_layers:
        yield KnobMove("recompute", {"recompute_layers": job.recompute_layers // 2 or 1})
    if job.offload:
        yield KnobMove("offload", {"offload": ()})
    choices: dict[str, Callable[[], Iterable[Any]]] = {
        "sharding": lambda: ("optimizer", "parameters") if job.pp == 1 and not job.model.is_moe else ("optimizer",),
        "sequence_parallel": lambda: (True,),
        "cuda_graph": lambda: ("none", "partial"),
    }
    for name, values in choices.items():
        yield from (KnobMove(name, {name: value}) for value in values() if value != getattr(job, name))


def _schedules(job: Job) -> Iterator[KnobMove]:
    for vpp in (1, *numbers_of_chunks(job.model, job.pp)):
        if vpp != job.vpp:
            yield KnobMove("vpp", {"vpp": vpp, "schedule": default_schedule(vpp)})
    for name in searched_schedules(job.model):
        for vpp in family(name).vpps or ((job.vpp,) if job.vpp > 1 else numbers_of_chunks(job.model, job.pp)):
            if (name, vpp) != (job.schedule, job.vpp):
                yield KnobMove("schedule", {"schedule": name, "vpp": vpp})
