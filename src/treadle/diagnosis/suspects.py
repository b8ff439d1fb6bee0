"""What stands out by itself in measured steps, and the time of a step without it.

between       time from the end of a step to the begin of the next one; of one worker, its late begin
steps         every step takes as long as the median step: what happens in a few of them only
gaps          no op waits for anything but other ops; of one worker, where most of them are its
pauses        no op takes more than PAUSE times what its worker takes for its like
microbatches  all micro-batches of a replica take the same: unequal sequences
worker        workers that compute longer than the same rank of other replicas
replica       a replica all of whose workers do
rank          a rank of the pipeline all of whose stages, several, take longer than the other stages
stage         the stage that takes longest, once workers and ranks that stand out do not: a cut
communication every message and collective takes the median of its type; of one link, where it is what varies
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from treadle.diagnosis.factors import Factors
from treadle.diagnosis.rank_gaps import RankGaps
from treadle.diagnosis.whatif import WhatIf
from treadle.ir.program import Bools, Longs
from treadle.ir.steps import Steps
from treadle.simulator.grouping import Floats, work_of

STANDS_OUT = 1.05
"""How many times what the others take, at least, does what is accused."""

PAUSE = 1.6
"""An op that takes so many times its like was interrupted."""

MOST_OF_IT = 0.6
"""The share of a cost that one worker or link has, from which on it is named."""

SLOW_LINK = 1.5
"""How many times the usual transfer a link takes that is named."""

NOTICED = 0.02
"""Of a computation's time, what a message of that link takes more at least."""


CHANCE = 4.0
"""Standard deviations of a step's mean that unequal micro-batches explain."""

UNEVEN_DATA = 0.02
"""A step whose data takes so much longer than that of others is slow by its data."""


@dataclass(frozen=True)
class Suspect:
    """`share` is what it costs of a measured step; `ratio` how many times longer than the others it takes.

    `proven` says that it stands out by itself; where it does not, it is counted and never named.
    """

    what: str
    share: float
    proven: bool
    ratio: float = 1.0
    stages: tuple[int, ...] = ()
    workers: tuple[tuple[int, int], ...] = ()
    """Those to name, as (dp, pipeline rank)."""
    link: tuple[int, int] | None = None
    """Two ranks of the pipeline; in `workers[0][0]`'s replica where there are workers, else in all."""
    times: tuple[float, float] = (0.0, 0.0)
    """Ticks of a message on that link, and of others."""
    of_data: bool = True
    """Of micro-batches: their times differ on all ranks together, as lengths of sequences do."""


@dataclass(frozen=True, eq=False)
class Suspects:
    """The suspects of measured steps."""

    steps: Steps
    whatif: WhatIf

    @cached_property
    def all(self) -> tuple[Suspect, ...]:
        """Every suspect, the costliest first."""
        found = [self._between(), self._steps(), *self._gaps(), *self._computing()]
        if self.whatif.communicates.any():
            found.append(self._communication())
        return tuple(sorted(found, key=lambda suspect: -suspect.share))

    @cached_property
    def period(self) -> float:
        """Ticks from the begin of a step to the begin of the next one, on average."""
        return float(self.steps.periods.mean())

    @cached_property
    def gaps(self) -> RankGaps:
        """The gaps of the steps."""
        return RankGaps.of(self.steps, self.whatif)

    @cached_property
    def factors(self) -> Factors:
        """The factors of the steps."""
        return Factors.of(self.whatif)

    def recovered(self, suspect: Suspect) -> float:
        """The share of the time lost to stragglers that a suspect explains."""
        lost = self.whatif.no_gaps.mean() - self.whatif.ideal
        return float(suspect.share * self.period / lost) if lost else 0.0

    # -- time beside the ops ---------------------------------------------------------------------------------------

    def _share(self, ticks: float) -> float:
        return float(ticks / self.period) if self.period else 0.0

    def _saved(self, dur: Longs) -> float:
        """The share of a step that goes with these durations."""
        return self._share(self.whatif.no_gaps.mean() - self.whatif.taking(dur).mean())

    def _between(self) -> Suspect:
        worker, op = self.gaps.latest
        late, all_late = self._share(self.gaps.cost(op)), self._share(self.gaps.late)
        every = self._share(float(self.steps.between.mean()))
        if all_late <= every:
            return Suspect("between", every, proven=True)
        if late >= MOST_OF_IT * all_late:
            return Suspect("between", late, proven=True, workers=(self._place(worker),))
        starts = np.unique(self.whatif.worker[self.gaps.opens & (self.gaps.total > 0)]).tolist()
        return Suspect("between", all_late, proven=True, workers=tuple(map(self._place, starts)))

    def _steps(self) -> Suspect:
        share = self._share(self.period - float(np.median(self.steps.periods)))
        return Suspect("steps", share, proven=share > 0 and not self._varies_with_data())

    def _varies_with_data(self) -> bool:
        """Say whether steps differ by no more than the mean of so many unequal micro-batches does."""
        if not len(self.factors.op):
            return False
        means, spread = self.factors.microbatch.mean(axis=1), self.factors.microbatch.std(axis=1)
        layout = self.whatif.program.layout
        expected = float(np.median(spread)) / np.sqrt(layout.num_microbatches * layout.num_replicas)
        slow = int(self.steps.periods.argmax())
        usual = float(np.median(means))
        return bool(1 + UNEVEN_DATA < means[slow] / usual < 1 + CHANCE * expected)

    def _gaps(self) -> list[Suspect]:
        gaps = self.gaps
        every = self._share(float(self.steps.makespans.mean() - self.whatif.no_gaps.mean()) - gaps.late)
        worker, ops = gaps.slowest
        own, linked = self._share(gaps.cost(ops)), 0.0
        link, readers = gaps.link
        if link is not None:
            linked = self._share(gaps.cost(readers))
        if linked > own and linked >= MOST_OF_IT * every:
            return [Suspect("gaps", linked, proven=True, link=link)]
        if own >= MOST_OF_IT * every:
            return [Suspect("gaps", own, proven=True, workers=(self._place(worker),))]
        return [Suspect("gaps", every, proven=True)]

    def _place(self, worker: int) -> tuple[int, int]:
        num = self.whatif.program.layout.num_replicas
        return worker % num, worker // num

    # -- computation -----------------------------------------------------------------------------------------------

    def _computing(self) -> list[Suspect]:
        if not len(self.factors.op):
            return []
        placement = self.whatif.program.layout.placement
        stages = np.array(placement.stages, np.int64)
        times = self.factors.stage
        found = [self._microbatches(), self._pauses()]
        if len(times) > 1:
            suspects, times = self._workers(times, stages)
            found += suspects
        usual = np.median(times, axis=0)
        if stages.shape[1] > 1 and placement.pp > 1 and placement.num_pipes == 1:
            suspect, usual = self._rank(usual, stages)
            found.append(suspect)
        if placement.num_stages > 1:
            found.append(self._stage(usual, stages))
        return found

    def _workers(self, times: Floats, stages: Longs) -> tuple[list[Suspect], Floats]:
        """Workers and replicas that take longer than the others of their place; the times without that."""
        others = np.stack([np.median(np.delete(times, dp, axis=0), axis=0) for dp in range(len(times))])
        ratio = times / np.maximum(others, 1e-9)
        worker = ratio[:, stages].min(axis=2)  # all of its stages
        slow = worker >= np.maximum(STANDS_OUT, 1 + 5 * _spread(worker))
        whole = slow.all(axis=1) & (stages.shape[0] > 1)
        alone = slow & ~whole[:, None]
        found = []
        for what, chosen in (("replica", slow & whole[:, None]), ("worker", alone)):
            places = sorted(zip(*np.nonzero(chosen), strict=True), key=lambda at: -worker[at])
            named = tuple((int(dp), int(pp)) for dp, pp in places)
            factor = np.where(chosen, worker, 1.0)
            share = self._saved(self._over(factor)) if named else 0.0
            most = float(np.mean([worker[at] for at in places])) if what == "replica" and named else 1.0
            most = float(worker[places[0]]) if what == "worker" and named else most
            found.append(Suspect(what, share, proven=bool(named), ratio=most, workers=named))
        times = times.copy()
        for dp, pp in zip(*np.nonzero(slow), strict=True):
            times[dp, stages[pp]] /= worker[dp, pp]
        return found, times

    def _over(self, factor: Floats) -> Longs:
        """Durations divided by a factor of each worker, `[dp, pp]`."""
        op = self.factors.op
        return self.factors.scaled(self.whatif, 1 / factor[self.whatif.replica[op], self.whatif.place[op]])

    def _rank(self, usual: Floats, stages: Longs) -> tuple[Suspect, Floats]:
        """The rank whose stages all take longer than those of the others; the times without what it takes more."""
        others = np.array([np.median(np.delete(usual, row)) for row in stages])
        ratio = (usual[stages] / np.maximum(others[:, None], 1e-9)).min(axis=1)
        rank = int(ratio.argmax())
        proven = bool(ratio[rank] >= STANDS_OUT)
        factor = np.ones((len(self.factors.stage), len(stages)))
        factor[:, rank] = ratio[rank] if proven else 1.0
        usual = usual.copy()
        usual[stages[rank]] /= factor[0, rank]
        share = self._saved(self._over(factor)) if proven else 0.0
        named = tuple(map(int, stages[rank]))
        return Suspect("rank", share, proven, float(ratio[rank]), named, ((0, rank),)), usual

    def _stage(self, usual: Floats, stages: Longs) -> Suspect:
        others = np.array([np.median(np.delete(usual, stage)) for stage in range(len(usual))])
        ratio = usual / np.maximum(others, 1e-9)
        stage = int(ratio.argmax())
        rank = int(np.flatnonzero((stages == stage).any(axis=1))[0])
        proven = bool(ratio[stage] >= STANDS_OUT)
        share = self._saved(self.balanced(usual))
        return Suspect("stage", share, proven, float(ratio[stage]), (stage,), ((0, rank),))

    def balanced(self, usual: Floats) -> Longs:
        """Durations in which each stage computes a micro-batch in the mean time of all stages."""
        factor = np.where(usual > 0, usual.mean() / np.maximum(usual, 1e-9), 1.0)
        return self.factors.scaled(self.whatif, factor[self.whatif.stage[self.factors.op]])

    def _microbatches(self) -> Suspect:
        factors, whatif = self.factors, self.whatif
        share = self._saved(self._equal())
        data = self._saved(factors.scaled(whatif, 1 / np.where(factors.microbatch > 0, factors.microbatch, 1.0)))
        spread = factors.microbatch if data >= share / 2 else factors.microbatch * factors.rest
        single = self._pauses()
        proven = single.share < MOST_OF_IT * share
        return Suspect("microbatches", share, proven, float(np.std(spread)), of_data=data >= share / 2)

    def _equal(self) -> Longs:
        """Durations in which each micro-batch takes the mean of its worker, chunk and layer."""
        whatif, program = self.whatif, self.whatif.program
        ops = np.flatnonzero(whatif.computes)
        labels = (whatif.worker, work_of(program), program.chunk, program.layer)
        _, code = np.unique(np.stack([label[ops] for label in labels]), axis=1, return_inverse=True)
        code = code.reshape(-1)
        total = np.bincount(code, whatif.measured[:, ops].mean(axis=0))
        dur = whatif.measured.copy()
        dur[:, ops] = np.rint(total[code] / np.bincount(code)[code]).astype(np.int64)
        return dur

    def _pauses(self) -> Suspect:
        factors, whatif = self.factors, self.whatif
        paused = factors.rest > PAUSE
        share = (
            self._saved(factors.scaled(whatif, np.where(paused, 1 / np.maximum(factors.rest, 1e-9), 1.0)))
            if paused.any()
            else 0.0
        )
        more = whatif.measured[:, factors.op] * np.where(paused, 1 - 1 / np.maximum(factors.rest, 1e-9), 0)
        by_worker = np.bincount(whatif.worker[factors.op], more.sum(axis=0))
        worker = int(by_worker.argmax())
        one = by_worker[worker] >= MOST_OF_IT * by_worker.sum()
        return Suspect("pauses", share, proven=share > 0, workers=(self._place(worker),) if one else ())

    # -- communication ---------------------------------------------------------------------------------------------

    def _communication(self) -> Suspect:
        whatif = self.whatif
        share = self._share(whatif.no_gaps.mean() - whatif.without(whatif.communicates).mean())
        link, replicas, times, ops = self._slow_link()
        if link is not None:
            own = self._share(whatif.no_gaps.mean() - whatif.without(ops).mean())
            if own >= MOST_OF_IT * share:
                one = ((replicas[0], link[0]), (replicas[0], link[1])) if len(replicas) == 1 else ()
                return Suspect("communication", own, proven=True, workers=one, link=link, times=times)
        return Suspect("communication", share, proven=True)

    def _slow_link(self) -> tuple[tuple[int, int] | None, list[int], tuple[float, float], Bools]:
        """The two ranks with the longest messages, the replicas where they are, their times and others', the ops."""
        whatif, program = self.whatif, self.whatif.program
        num = program.layout.num_replicas
        ops = np.flatnonzero(whatif.is_message)
        none = np.zeros(program.num_ops, bool)
        if not len(ops):
            return None, [], (0.0, 0.0), none
        place = whatif.place[ops].astype(np.int64)
        peer = program.lane_peer[program.lane_of[ops]].astype(np.int64) // num
        code = np.minimum(place, peer) * program.layout.placement.pp + np.maximum(place, peer)
        links, code = np.unique(code, return_inverse=True)
        code = code.reshape(-1) * num + whatif.replica[ops]
        size = len(links) * num
        moved = np.maximum(whatif.measured[:, ops], 0).mean(axis=0)
        took = np.bincount(code, moved, minlength=size) / np.maximum(np.bincount(code, minlength=size), 1)
        took = took.reshape(-1, num)
        worst = int(took.max(axis=1).argmax())
        usual = float(np.median(np.delete(took, worst, axis=0))) if len(links) > 1 else float(np.median(took))
        if took[worst].max() < SLOW_LINK * usual + NOTICED * float(np.median(whatif.measured[:, whatif.computes])):
            return None, [], (0.0, 0.0), none
        slow = took[worst] >= (took[worst].max() + usual) / 2
        replicas = np.flatnonzero(slow).tolist()
        none[ops] = (code // num == worst) & slow[code % num]
        found = divmod(int(links[worst]), program.layout.placement.pp)
        if 1 < len(replicas) < num:
            return None, [], (0.0, 0.0), none
        return found, replicas, (float(took[worst][slow].mean()), usual), none


def _spread(ratio: Floats) -> float:
    """How far workers, `[dp, pp]`, usually are apart; of two replicas within each, as one moves the other, too."""
    middle = _low_median(ratio, axis=1)[:, None] if len(ratio) == 2 else np.median(ratio)
    return float(_low_median(np.abs(ratio / middle - 1).reshape(1, -1), axis=1)[0])


def _low_median(values: Floats, axis: int) -> Floats:
    ordered = np.sort(values, axis=axis)
    return np.asarray(np.take(ordered, (ordered.shape[axis] - 1) // 2, axis=axis))
