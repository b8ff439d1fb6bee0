"""The cause of a slow run: of several things made ordinary, one at a time, the one that costs a step most.

    gaps           no op waits for anything but other ops: hosts that do not keep up, cores that are shared
    steps          every step takes as long as the median step: what happens in a few of them only
    microbatches   every micro-batch of a worker takes that worker's mean: unequal sequences, data that differs
    stage          every stage's computation is scaled to the mean over stages: a cut that is not balanced
    worker         the slowest workers (the top 3 % by score) compute like the others of their stage: a machine
    replica        the slowest replica computes like the others: a node or a network that all its workers share
    communication  every message and collective takes the median of its type

Gaps and steps are of the measured time; the others, stragglers, are of the time without gaps. A worker is a rank of the
pipeline in one replica. Scaling keeps how the durations vary, so that long sequences on the last stage count as unequal
micro-batches, and not as a slow stage.

Gaps or steps are the cause where they cost more than any straggler, and 5 %. Otherwise there is no cause where S is
below 1.05, and none that explains it where nothing recovers 30 % of the time lost to stragglers (`several`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from treadle.diagnosis.whatif import WhatIf
from treadle.ir.program import Bools, Longs
from treadle.ir.show import show_time
from treadle.ir.steps import Steps
from treadle.simulator.grouping import work_of

if TYPE_CHECKING:
    from treadle.diagnosis.printed_why import SlowCauseJson

SLOW = 1.05
"""S from which on a run is called slow."""

UNEVEN = 1.2
"""How much longer than the fastest step the slowest one takes, from which on steps are said to vary."""

EXPLAINS = 0.3
"""The least share of the lost time that a cause recovers."""


@dataclass(frozen=True)
class StragglerCause:
    """`what` is none, several, or one of the seven; `stage`, or `pp` and `dp`, say where.

    `recovers` is the share of the time lost to stragglers that comes back; of gaps and steps their share of the step.
    """

    what: str
    stage: int | None
    pp: int | None
    dp: int | None
    recovers: float
    sentence: str

    def as_dict(self) -> SlowCauseJson:
        """Return a dict for JSON."""
        return {
            "what": self.what,
            "stage": self.stage,
            "pp": self.pp,
            "dp": self.dp,
            "recovers": self.recovers,
            "sentence": self.sentence,
        }


@dataclass(frozen=True)
class Suspects:
    """The workers, as (dp, pipeline rank), the stage and the replica that stand out."""

    workers: tuple[tuple[int, int], ...]
    stage: int
    replica: int


def recoveries(whatif: WhatIf, suspects: Suspects) -> dict[str, float]:
    """The share of the lost time that each of the what-ifs recovers."""
    program = whatif.program
    found = {"microbatches": whatif.recovered(whatif.taking(_alike(whatif)))}
    if program.layout.placement.pp > 1:
        found["stage"] = whatif.recovered(whatif.taking(stages_balanced(whatif)))
    if program.layout.num_replicas > 1:
        workers = [_of_worker(whatif, dp, place) for dp, place in suspects.workers]
        peers = [whatif.place == place for _, place in suspects.workers]
        found["worker"] = whatif.recovered(whatif.taking(_like_others(whatif, workers, peers)))
        replica = whatif.replica == suspects.replica
        found["replica"] = whatif.recovered(whatif.taking(_like_others(whatif, [replica], [np.ones_like(replica)])))
    if whatif.communicates.any():
        found["communication"] = whatif.recovered(whatif.without(whatif.communicates))
    return found


def step_shares(whatif: WhatIf, steps: Steps, recovered: dict[str, float]) -> dict[str, float]:
    """The share of the measured step that each costs, the largest first."""
    measured = float(steps.makespans.mean())
    if not measured:
        return {}
    straggled = whatif.no_gaps.mean() - whatif.ideal
    shares = {
        "gaps": float(1 - whatif.no_gaps.mean() / measured),
        "steps": float(1 - np.median(steps.makespans) / measured),
        **{name: float(share * straggled / measured) for name, share in recovered.items()},
    }
    return dict(_sorted(shares))


def name_cause(
    whatif: WhatIf, suspects: Suspects, recovered: dict[str, float], steps: Steps, shares: dict[str, float]
) -> StragglerCause:
    """Choose what costs a step most, and say what to do about it."""
    first = next(iter(shares), "")
    if first in ("gaps", "steps") and shares[first] >= 1 - 1 / SLOW:
        sentence = _gaps_sentence(steps, shares[first]) if first == "gaps" else _steps_sentence(steps, shares[first])
        return StragglerCause(first, None, None, None, shares[first], sentence)
    slowdown = whatif.slowdown(whatif.no_gaps)
    if slowdown < SLOW:
        much = _percent(slowdown - 1) if slowdown > 1 else "nothing"
        sentence = f"nothing stands out: stragglers slow the run down by {much}"
        return StragglerCause("none", None, None, None, 0.0, sentence)
    what = max(recovered, key=lambda name: recovered[name])
    share = recovered[what]
    if share < EXPLAINS:
        parts = ", ".join(f"{name} {_percent(share)}" for name, share in _sorted(recovered))
        sentence = f"no single cause: lost time recovered by fixing one at a time: {parts}"
        return StragglerCause("several", None, None, None, share, sentence)
    if what == "worker":
        dp, place = suspects.workers[0]
        return StragglerCause(what, None, place, dp, share, _worker_sentence(whatif, suspects))
    if what == "replica":
        return StragglerCause(what, None, None, suspects.replica, share, _replica_sentence(whatif, suspects.replica))
    if what == "stage":
        return StragglerCause(what, suspects.stage, None, None, share, _stage_sentence(whatif, suspects.stage))
    sentence = _microbatches_sentence(whatif, share) if what == "microbatches" else _communication_sentence(whatif)
    return StragglerCause(what, None, None, None, share, sentence)


def stages_balanced(whatif: WhatIf) -> Longs:
    """Durations in which each stage computes a micro-batch, forward and backward, in the mean time of all stages."""
    times = stage_times(whatif)
    factor = np.where(times > 0, times.mean() / np.maximum(times, 1e-9), 1.0)
    scaled = np.where(whatif.computes, whatif.measured * factor[whatif.stage], whatif.measured)
    return np.rint(scaled).astype(np.int64)


def stage_times(whatif: WhatIf) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Ticks that each stage computes in a step, on average over replicas and steps."""
    counted = whatif.computes & ~whatif.program.joined  # the ops of an overlapped pair have one time
    mean = np.where(counted, whatif.measured.mean(axis=0), 0.0)
    layout = whatif.program.layout
    return np.bincount(whatif.stage, mean, minlength=layout.placement.num_stages) / layout.num_replicas


def _alike(whatif: WhatIf) -> Longs:
    """Durations in which each micro-batch takes the mean of its worker, chunk and layer, over all of them and steps."""
    program, ops = whatif.program, np.flatnonzero(whatif.computes)
    labels = (whatif.place, whatif.replica, work_of(program), program.chunk, program.layer)
    _, code = np.unique(np.stack([label[ops] for label in labels]), axis=1, return_inverse=True)
    code = code.reshape(-1)
    total = np.bincount(code, whatif.measured[:, ops].mean(axis=0))
    dur = whatif.measured.copy()
    dur[:, ops] = np.rint(total[code] / np.bincount(code)[code]).astype(np.int64)
    return dur


def _like_others(whatif: WhatIf, groups: list[Bools], peers: list[Bools]) -> Longs:
    """Durations in which the ops of each group are scaled, type by type, to the mean of its peers in no group."""
    work, dur = work_of(whatif.program), whatif.measured.copy()
    none = ~np.logical_or.reduce(groups)
    for group, alike in zip(groups, peers, strict=True):
        for kind in np.unique(work[whatif.computes]):
            of_kind = whatif.computes & (work == kind)
            own, others = of_kind & group, of_kind & alike & none
            if own.any() and others.any() and whatif.measured[:, own].any():
                factor = whatif.measured[:, others].mean() / whatif.measured[:, own].mean()
                dur[:, own] = np.rint(whatif.measured[:, own] * factor).astype(np.int64)
    return dur


def _of_worker(whatif: WhatIf, dp: int, place: int) -> Bools:
    found: Bools = (whatif.replica == dp) & (whatif.place == place)
    return found


def _ratio(whatif: WhatIf, own: Bools, others: Bools) -> float:
    """How long the computation of some takes to that of others."""
    mine, theirs = whatif.measured[:, whatif.computes & own], whatif.measured[:, whatif.computes & others]
    return float(mine.mean() / theirs.mean()) if theirs.size and theirs.any() else 1.0


def _worker_sentence(whatif: WhatIf, suspects: Suspects) -> str:
    dp, place = suspects.workers[0]
    own = _of_worker(whatif, dp, place)
    ratio = _ratio(whatif, own, (whatif.place == place) & ~own)
    more = f" (and {len(suspects.workers) - 1} more)" if len(suspects.workers) > 1 else ""
    return (
        f"worker (dp {dp}, pipeline rank {place}){more} computes {ratio:.2f} times as long as the others of its "
        "place: look at that machine (clocks, thermal throttling, other processes), or replace it"
    )


def _replica_sentence(whatif: WhatIf, dp: int) -> str:
    ratio = _ratio(whatif, whatif.replica == dp, whatif.replica != dp)
    return (
        f"replica {dp} computes {ratio:.2f} times as long as the others: look at what its ranks share: "
        "their node, their data loader, the length of their sequences"
    )


def _stage_sentence(whatif: WhatIf, stage: int) -> str:
    layout, times = whatif.program.layout, stage_times(whatif)
    num_stages = layout.placement.num_stages
    longer = times[stage] / np.delete(times, stage).mean() - 1
    moved = longer * (num_stages - 1) / num_stages  # of the layers of another stage: then all take as long
    last = ", the last," if stage == num_stages - 1 else ""
    if all(layout.layers):
        num = moved * float(np.mean(np.delete(layout.layers, stage)))
        what = f"{num:.1f} layers' worth of work" if num >= 0.05 else "a part of a layer"
    else:
        what = f"{_percent(moved)} of a stage's layers"
    gain = 1 - float(whatif.taking(stages_balanced(whatif)).mean() / whatif.no_gaps.mean())
    finds = "" if layout.by_layer else "; 'treadle balance' finds the cut"
    return (
        f"stage {stage}{last} takes {_percent(longer)} longer than the others for a micro-batch: moving {what} "
        f"elsewhere would cut the step time by {_percent(gain)}{finds}"
    )


def _gaps_sentence(steps: Steps, share: float) -> str:
    shortest, _, longest = _spans(steps)
    uneven = steps.makespans.max() > UNEVEN * steps.makespans.min()
    varies = f", and steps take from {shortest} to {longest}" if uneven else ""
    return (
        f"gaps between ops take {_percent(share)} of a step, more than any straggler{varies}: the run is host-bound "
        "(launches, Python, data loading, garbage collection), or its cores are oversubscribed: give each rank cores "
        "of its own, and look at what its host does between ops"
    )


def _steps_sentence(steps: Steps, share: float) -> str:
    _, median, longest = _spans(steps)
    number = steps.numbers[int(steps.makespans.argmax())]
    return (
        f"a few steps are slow and take {_percent(share)} of the time: step {number} takes {longest}, the median "
        f"{median}: look at what happens in those alone (checkpoints, evaluation, garbage collection, other jobs)"
    )


def _spans(steps: Steps) -> tuple[str, ...]:
    """The shortest, the median and the longest step."""
    spans = steps.makespans
    return tuple(show_time(steps.clock, float(each)) for each in (spans.min(), np.median(spans), spans.max()))


def _microbatches_sentence(whatif: WhatIf, share: float) -> str:
    ops = np.flatnonzero(whatif.computes)
    mean = _alike(whatif)[:, ops]
    spread = float(np.std(whatif.measured[:, ops] / np.maximum(mean, 1)))
    return (
        f"micro-batches are unequal: on one worker their times vary by {_percent(spread)} (standard deviation), and "
        f"equal ones would recover {_percent(share)} of the lost time: pack sequences so that each micro-batch costs "
        "the same (attention costs the square of a sequence's length)"
    )


def _communication_sentence(whatif: WhatIf) -> str:
    names = [name for name, ops in whatif.types.items() if (ops & whatif.communicates).any()]
    slowest = max(names, key=lambda name: whatif.only(whatif.types[name]).mean())
    ranks = _slowest_ranks(whatif, whatif.types[slowest] & whatif.communicates)
    return f"communication varies, {slowest} most: check the links of the slowest ranks: {', '.join(ranks)}"


def _slowest_ranks(whatif: WhatIf, chosen: Bools) -> list[str]:
    """Return the two ranks, the ends of a link, whose chosen ops take longest on average; the slower one first."""
    ops = np.flatnonzero(chosen)
    num_replicas = whatif.program.layout.num_replicas
    rank = whatif.place[ops] * num_replicas + whatif.replica[ops]
    took = np.bincount(rank, whatif.measured[:, ops].mean(axis=0)) / np.maximum(np.bincount(rank), 1)
    slowest = np.argsort(-took, kind="stable")[:2].tolist()
    return [
        f"dp {each % num_replicas} rank {each // num_replicas}" if num_replicas > 1 else str(each) for each in slowest
    ]


def _sorted(recovered: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(recovered.items(), key=lambda item: -item[1])


def _percent(share: float) -> str:
    return f"{share:.0%}" if abs(share) >= 0.1 or share == 0 else f"{share:.1%}"
