"""What is printed about a suspect: what it is, where, what it costs, and what to look at."""

from __future__ import annotations

import numpy as np

from treadle.diagnosis.suspects import Suspect, Suspects
from treadle.ir.show import show_time

UNEVEN = 1.2
"""How much longer than the fastest step the slowest one takes, from which on steps are said to vary."""

NAMED = 4
"""Ranks that a sentence names."""

A_STAGE = 0.95
"""Of a stage's layers, more than are moved."""


def sentence_of(suspects: Suspects, suspect: Suspect, *, ambiguous: bool) -> str:
    """Return the sentence about a suspect."""
    if suspect.what in ("stage", "rank"):
        return _either(suspects, suspect) if ambiguous else _OF[suspect.what](suspects, suspect)
    return _OF[suspect.what](suspects, suspect)


def percent(share: float) -> str:
    """Return a share in percent, with a decimal below 10 %."""
    return f"{share:.0%}" if abs(share) >= 0.1 or share == 0 else f"{share:.1%}"


def _worker(suspects: Suspects, place: tuple[int, int]) -> str:
    dp, pp = place
    return f"dp {dp} rank {pp}" if suspects.whatif.program.layout.num_replicas > 1 else f"rank {pp}"


def _between(suspects: Suspects, suspect: Suspect) -> str:
    much = percent(suspect.share)
    look = "look at the data loader, then at optimizer, checkpoints and logging"
    if suspect.workers:
        where = ", ".join(_worker(suspects, place) for place in suspect.workers[:NAMED])
        several = len(suspect.workers) > 1
        more = f" and {len(suspect.workers) - NAMED} more" if len(suspect.workers) > NAMED else ""
        begins, of = ("begin their", "of these ranks") if several else ("begins its", "of that rank")
        clocks = suspects.whatif.program.layout.num_replicas > 1 and not suspects.whatif.is_collective.any()
        shift = f"; not to be told apart: {of}, or clocks of replicas that differ by as much" if clocks else f" {of}"
        return f"{where}{more} {begins} steps late, which takes {much} of a step: {look}{shift}"
    took = show_time(suspects.steps.clock, float(suspects.steps.between.mean()))
    return f"time between steps takes {much} of a step, {took}, in which no micro-batch is computed: {look}"


def _gaps(suspects: Suspects, suspect: Suspect) -> str:
    much, host = percent(suspect.share), "launches, Python, garbage collection, oversubscribed cores"
    if suspect.link is not None:
        low, high = suspect.link
        return (
            f"gaps before ops that read messages between ranks {low} and {high} take {much} of a step, and the profile "
            f"has no messages; not to be told apart: the link between ranks {low} and {high}, or their hosts ({host})"
        )
    if suspect.workers:
        where = _worker(suspects, suspect.workers[0])
        return f"gaps between the ops of {where} take {much} of a step: look at what the host of {where} does ({host})"
    shortest, _, longest = _spans(suspects)
    spans = suspects.steps.makespans
    varies = f", and steps take from {shortest} to {longest}" if spans.max() > UNEVEN * spans.min() else ""
    return (
        f"gaps between ops take {much} of a step, on no rank more than on others{varies}: the run is host-bound "
        f"({host}): give each rank cores of its own, and look at what its host does between ops"
    )


def _pauses(suspects: Suspects, suspect: Suspect) -> str:
    where = f" of {_worker(suspects, suspect.workers[0])}" if suspect.workers else ""
    return (
        f"single ops{where} take much longer than others of their kind, which takes {percent(suspect.share)} of a "
        "step: look for what interrupts the host or the device (garbage collection, other processes, clocks)"
    )


def _steps(suspects: Suspects, suspect: Suspect) -> str:
    periods, clock = suspects.steps.periods, suspects.steps.clock
    number = suspects.steps.numbers[int(periods.argmax())]
    longest, median = (show_time(clock, float(each)) for each in (periods.max(), np.median(periods)))
    return (
        f"a few steps are slow and take {percent(suspect.share)} of the time: step {number} takes {longest}, the "
        f"median {median}: look at what happens in those alone (checkpoints, evaluation, other jobs)"
    )


def _spans(suspects: Suspects) -> tuple[str, ...]:
    """The shortest, the median and the longest step, without the time to the next."""
    spans, clock = suspects.steps.makespans, suspects.steps.clock
    return tuple(show_time(clock, float(each)) for each in (spans.min(), np.median(spans), spans.max()))


def _of_worker(suspects: Suspects, suspect: Suspect) -> str:
    (dp, pp), *more = suspect.workers
    others = f" (and {len(more)} more)" if more else ""
    return (
        f"worker (dp {dp}, pipeline rank {pp}){others} computes {suspect.ratio:.2f} times as long as the others of its "
        "place: look at that machine (clocks, thermal throttling, other processes), or replace it"
    )


def _replica(_suspects: Suspects, suspect: Suspect) -> str:
    return (
        f"replica {suspect.workers[0][0]} computes {suspect.ratio:.2f} times as long as the others: look at what its "
        "ranks share: their node, their data loader, the length of their sequences"
    )


def _rank(_suspects: Suspects, suspect: Suspect) -> str:
    _, rank = suspect.workers[0]
    stages = " and ".join(map(str, suspect.stages))
    return (
        f"rank {rank} computes {suspect.ratio:.2f} times as long as the others, in all its stages ({stages}): look at "
        "that machine (clocks, thermal throttling, other processes), or replace it"
    )


def _longer(suspects: Suspects, suspect: Suspect) -> str:
    stage, num_stages = suspect.stages[0], suspects.whatif.program.layout.placement.num_stages
    last = ", the last," if stage == num_stages - 1 else ""
    return f"stage {stage}{last} takes {percent(suspect.ratio - 1)} longer than the others for a micro-batch"


def _stage(suspects: Suspects, suspect: Suspect) -> str:
    layout = suspects.whatif.program.layout
    num_stages, stage = layout.placement.num_stages, suspect.stages[0]
    moved = (suspect.ratio - 1) * (num_stages - 1) / num_stages  # of the layers of another stage: then all take as long
    gain = percent(suspect.share * suspects.period / float(suspects.whatif.no_gaps.mean()))
    if all(layout.layers):
        num = moved * float(np.mean(np.delete(layout.layers, stage)))
        what = f"moving {num:.1f} layers' worth of work" if num >= 0.05 else "moving a part of a layer"
    elif moved < A_STAGE:
        what = f"moving {percent(moved)} of a stage's layers"
    else:
        what = "moving that work"
    return f"{_longer(suspects, suspect)}: {what} elsewhere would cut the step time by {gain}"


def _work(suspects: Suspects, stage: int) -> str:
    """What the first and the last stage compute besides layers, as far as their blocks do not say otherwise."""
    layout = suspects.whatif.program.layout
    blocks = layout.blocks[stage] if layout.blocks else ""
    first = stage == 0 and (not blocks or "E" in blocks)
    last = stage == layout.placement.num_stages - 1 and (not blocks or "L" in blocks)
    return "layers or embedding" if first else "layers or head" if last else "layers"


def _either(suspects: Suspects, suspect: Suspect) -> str:
    _, rank = suspect.workers[0]
    if suspect.what == "rank":
        stages = " and ".join(map(str, suspect.stages))
        longer = f"rank {rank} computes {suspect.ratio:.2f} times as long as the others, in all its stages and replicas"
        layers = f"the layers of stages {stages}"
    else:
        longer, layers = _longer(suspects, suspect), f"stage {suspect.stages[0]}'s {_work(suspects, suspect.stages[0])}"
    machine = f"the machine{'s' if suspect.what == 'rank' else ''} of rank {rank}"
    return (
        f"{longer}; not to be told apart: {layers}, or {machine}: put another machine in its place, or time one GEMM "
        f"on both, and see whether the time moves with it"
    )


def _microbatches(suspects: Suspects, suspect: Suspect) -> str:
    if not suspect.of_data:
        return (
            f"ops of one kind vary by {percent(suspect.ratio)} (standard deviation) on each rank by itself, and equal "
            f"ones would recover {percent(suspects.recovered(suspect))} of the lost time: look at what shares the "
            "machine (other processes, clocks), or at work that differs by rank (experts)"
        )
    return (
        f"micro-batches are unequal: their times vary by {percent(suspect.ratio)} (standard deviation), and equal ones "
        f"would recover {percent(suspects.recovered(suspect))} of the lost time: pack sequences so that each "
        "micro-batch costs the same (attention costs the square of a sequence's length)"
    )


def _communication(suspects: Suspects, suspect: Suspect) -> str:
    if suspect.link is not None:
        low, high = suspect.link
        several = suspects.whatif.program.layout.num_replicas > 1
        where = f" of dp {suspect.workers[0][0]}" if suspect.workers else " in all replicas" if several else ""
        own, others = (show_time(suspects.steps.clock, each) for each in suspect.times)
        return (
            f"messages between ranks {low} and {high}{where} take {own}, others {others}, which costs "
            f"{percent(suspect.share)} of a step: look at the link between them"
        )
    whatif = suspects.whatif
    names = [name for name, ops in whatif.types.items() if (ops & whatif.communicates).any()]
    slowest = max(names, key=lambda name: whatif.only(whatif.types[name]).mean())
    return (
        f"communication varies, {slowest} most, on no link more than on others, and takes {percent(suspect.share)} of "
        "a step: look at the network that its ranks share"
    )


_OF = {
    "between": _between,
    "gaps": _gaps,
    "pauses": _pauses,
    "steps": _steps,
    "worker": _of_worker,
    "replica": _replica,
    "rank": _rank,
    "stage": _stage,
    "microbatches": _microbatches,
    "communication": _communication,
}
