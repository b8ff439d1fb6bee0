"""From the dumps of a run and its schedule to the cause of its hang."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from treadle.ir.schedule import Schedule
from treadle.recorder.dump_directory import WITHOUT, read_dumps
from treadle.recorder.dump_file import GroupName, RankDump, RecorderEntry
from treadle.recorder.hang_cause import HungGroup
from treadle.recorder.hang_report import HangReport, HungPipeline
from treadle.recorder.placing import MatchedPlan, PlacedRank, place
from treadle.schedules import SCHEDULES, generate
from treadle.verifier.communicator_queues import Communicators


def find_hang(
    dumps: str | Path | Sequence[str | Path],
    schedule: Schedule,
    *,
    communicators: Communicators | None = None,
    prefix: str | None = None,
) -> HangReport:
    """Find which rank of a run that hangs stopped at which op, and who waits for whom, or the circle.

    Args:
        dumps: a directory with a dump of Flight Recorder a rank, or the files.
        schedule: the one that the run was given.
        communicators: which channels share a communicator. By default each pair of ranks has one, as unbatched
            messages of torch do, and all ranks have one where the dumps show batches.
        prefix: what stands before the rank in the names of files, where a directory has others too.

    Returns:
        A cause for each pipeline of the run, with the chain from each rank to it.

    Raises:
        ValueError: a file is no dump, the dumps are of a pipeline of another size than the schedule's, or another
            schedule explains them.
        OSError: a file cannot be read.

    Example:
        >>> from treadle import generate
        >>> report = find_hang("examples/dumps/stalled", generate("1f1b", pp=4, microbatches=4))  # doctest: +SKIP
        >>> report.sentence  # doctest: +SKIP
        'rank 2 stopped at B1.0: it had all that it needs, and launched nothing after it'

    """
    paths = [Path(dumps)] if isinstance(dumps, str | Path) else [Path(path) for path in dumps]
    read = read_dumps(paths, prefix)
    report = _diagnosed(read, schedule, communicators)
    if any(pipeline.cause == "order" for pipeline in report.pipelines):
        other = _other_schedule(read, schedule, communicators)
        if other is not None:
            raise ValueError(
                f"the dumps are not of {schedule.name} with {schedule.num_microbatches} micro-batches, which is no "
                f"rank's fault: {other} explains the messages of all ranks; name the schedule that ran"
            )
    return report


def _other_schedule(dumps: Mapping[int, RankDump], given: Schedule, communicators: Communicators | None) -> str | None:
    """Return the options of a schedule that explains the messages of all ranks, the likeliest slip first."""
    num, vpp = given.num_microbatches, given.placement.vpp
    sizes = [mbs for mbs in (num // 2, 2 * num) if mbs >= given.pp]
    named = [(name, chunks) for name in SCHEDULES for chunks in (None, 2)]
    own = [(given.name, None), (given.name, vpp)]
    others = [(*each, mbs) for mbs in sizes for each in own]
    others += [(name, chunks, mbs) for mbs in (num, *sizes) for name, chunks in named]
    others += [(*each, mbs) for mbs in range(2 * num, given.pp - 1, -1) for each in own]
    for name, chunks, mbs in others:
        if (name, mbs) == (given.name, num):
            continue
        try:
            found = generate(name, pp=given.pp, vpp=chunks, microbatches=mbs)
            report = _diagnosed(dumps, found, communicators)
        except ValueError:
            continue
        explained = all(pipeline.cause not in ("order", "outside") for pipeline in report.pipelines)
        if explained and _sends_in_order(dumps, found):
            size = f"--pp {given.pp}{f' --vpp {chunks}' if chunks is not None else ''} -m {mbs}"
            return f"'--schedule {name} {size}'"
    return None


def _sends_in_order(dumps: Mapping[int, RankDump], schedule: Schedule) -> bool:
    """Say whether every rank has sent to the peers that the schedule has, in its order."""
    plan = MatchedPlan.of(schedule)
    for group in _groups(dumps, schedule.pp)[0]:
        for rank, entries in group.entries.items():
            planned = [plan.ends[op] for op in plan.messages(rank) if plan.ends[op].is_send]
            sent = [e.message for e in entries if e.message is not None and e.message.is_send and not e.is_object]
            if any(not planned or end != planned[place % len(planned)] for place, end in enumerate(sent)):
                return False
    return True


def _diagnosed(read: Mapping[int, RankDump], schedule: Schedule, communicators: Communicators | None) -> HangReport:
    """Return the cause for each pipeline."""
    plans = _plans(schedule)
    groups, remarks = _groups(read, schedule.pp)
    batched = any(entry.in_batch for dump in read.values() for entry in dump.entries)
    shared: Communicators = communicators or ("group" if batched else "pair")
    pipelines, used = [], set[int]()
    for group in groups:
        name = ": ".join(part for part in group.name if part)
        found = []
        for plan in plans:
            placed, more = _placed(plan, group)
            found.append(HungGroup(plan, name, group.ranks, placed, shared))
            remarks += [remark for remark in more if remark not in remarks]
        used |= {group.ranks[rank] for hung in found for rank in hung.placed}
        possible = [hung for hung in found if not hung.hung.contradicts()] or found[:1]
        if possible[0] is not found[0]:
            remarks.append(_CROSSED)
        pipelines.append(_either([hung.diagnosed() for hung in possible]))
    pipelines.sort(key=lambda pipeline: (pipeline.cause == "outside", pipeline.cause == "no-dump"))
    return HangReport(schedule.name, shared, tuple(sorted(used)), tuple(pipelines), tuple(remarks))


_CROSSED = (
    "ranks posted receives in the order of use, which is not the order of the sends: messages are crossed, and cells "
    "compute with other micro-batches' data; 'treadle verify', with '--receives use', lists them"
)


def _plans(schedule: Schedule) -> list[MatchedPlan]:
    """The step with receives in the order of the senders, and, if that is another, in the order of use."""
    plan = MatchedPlan.of(schedule)
    used = MatchedPlan.of(schedule, "use") if not schedule.issue else plan
    return [plan] if plan.has_labels_of(used) else [plan, used]


def _either(found: Sequence[HungPipeline]) -> HungPipeline:
    """Return the first cause; of several that accuse different ranks, that they are not to be told apart."""
    first, *others = found
    if not others or others[0].at_fault == first.at_fault:
        return first
    (other,) = others
    sentence = (
        f"not to be told apart: {first.sentence}; or, if receives are posted in the order in which they are read, "
        f"{other.sentence}"
    )
    faulty = tuple(sorted({*first.at_fault, *other.at_fault}))
    return replace(first, sentence=sentence, at_fault=faulty, ops=tuple(dict.fromkeys((*first.ops, *other.ops))))


class _Group(NamedTuple):
    """A process group that sends messages: its ranks in the run, and the entries of those that left a dump."""

    name: GroupName
    ranks: tuple[int, ...]
    entries: Mapping[int, Sequence[RecorderEntry]]


def _groups(dumps: Mapping[int, RankDump], pp: int) -> tuple[list[_Group], list[str]]:
    """The pipelines: process groups of as many ranks as the schedule has, with messages between them."""
    members: dict[tuple[GroupName, tuple[int, ...]], dict[int, RankDump]] = {}
    for rank, dump in dumps.items():
        for name in dict.fromkeys(entry.group for entry in dump.entries if entry.message is not None):
            ranks = dump.groups.get(name) or tuple(range(pp))
            members.setdefault((name, ranks), {})[rank] = dump
    if not members:
        raise ValueError(
            "the dumps have no sends and receives; gloo's recorder writes none, and NCCL's writes them with "
            f"TORCH_FR_BUFFER_SIZE above 0; {WITHOUT}"
        )
    sizes = sorted({len(ranks) for _, ranks in members})
    fitting = {key: found for key, found in members.items() if len(key[1]) == pp}
    if not fitting:
        raise ValueError(
            f"the dumps have messages in groups of {' and '.join(map(str, sizes))} ranks, and the schedule has {pp}; "
            "name the schedule that ran, with --pp of that size"
        )
    groups = []
    for (name, ranks), found in sorted(fitting.items(), key=lambda item: item[0][1]):
        entries = {
            ranks.index(rank): [entry for entry in dump.entries if entry.group == name]
            for rank, dump in found.items()
            if rank in ranks
        }
        for rank in set(ranks) & set(dumps) - set(found):  # it left a dump, without a message of this group
            entries[ranks.index(rank)] = []
        groups.append(_Group(name, ranks, dict(sorted(entries.items()))))
    aside = sum(len(ranks) != pp for _, ranks in members)
    return groups, [f"{aside} groups of another size than the pipeline's are set aside"] if aside else []


def _placed(plan: MatchedPlan, group: _Group) -> tuple[dict[int, PlacedRank], list[str]]:
    placed, remarks = {}, []
    for rank, entries in group.entries.items():
        found = place(plan, rank, entries)
        if found is None:
            remarks.append(
                f"rank {rank}: its buffer begins within a step, and nothing in it shows where; it counts as a rank "
                "without a dump; a larger TORCH_FR_BUFFER_SIZE keeps more"
            )
        else:
            placed[rank] = found
    absent = [rank for rank in range(len(group.ranks)) if rank not in group.entries]
    remarks += [f"rank {rank}: no dump" for rank in absent]
    return placed, remarks
