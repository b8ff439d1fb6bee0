"""Names the cause of a hang: the first that holds of another order, a circle, and an op that waits for nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from treadle.ir.program import NEVER, Program
from treadle.recorder.dump_file import ChannelEnd
from treadle.recorder.hang_graph import Waiting
from treadle.recorder.hang_report import HungPipeline
from treadle.recorder.launched_order import HungStep
from treadle.recorder.placing import MatchedPlan, PlacedMessage, PlacedRank
from treadle.verifier.communicator_checks import SHARED
from treadle.verifier.communicator_queues import Communicators


@dataclass(frozen=True, eq=False)
class HungGroup:
    """The pipeline of one process group: what its ranks launched, and which left no dump, or an old one."""

    plan: MatchedPlan
    group: str
    ranks: tuple[int, ...]
    placed: Mapping[int, PlacedRank]
    communicators: Communicators

    @cached_property
    def old(self) -> dict[int, tuple[ChannelEnd, int, int]]:
        """Ranks whose dump is older than another's: the channel, the sends it has, and the receives that have ended."""
        found = {}
        for end in self.plan.channels:
            if not end.is_send or end.src not in self.placed or end.dst not in self.placed:
                continue
            sent = self.placed[end.src].launched.get(end, 0)
            received = self.placed[end.dst].completed.get(ChannelEnd(False, end.src, end.dst), 0)
            if received > sent:
                found[end.src] = (end, sent, received)
        return found

    @cached_property
    def hung(self) -> HungStep:
        """The step that hangs, without dumps that are old."""
        return HungStep.of(self.plan, {rank: at for rank, at in self.placed.items() if rank not in self.old})

    @cached_property
    def waiting(self) -> Waiting:
        """Who waits for whom."""
        return Waiting(self.hung, self.communicators)

    @property
    def program(self) -> Program:
        """The Program of a step."""
        return self.plan.program

    # -- causes ------------------------------------------------------------------------------------------------------

    def diagnosed(self) -> HungPipeline:
        """Return the cause, and each rank's chain to it."""
        if strange := self._strange():
            return strange
        if not self.hung.is_open:
            return self._outside()
        if other := self._other_order(all_launched=False):
            return other
        if circle := self.waiting.circle:
            if other := self._other_order(all_launched=True):
                return other
            what = "op waits for itself" if len(circle) == 1 else f"{len(circle)} ops wait for each other"
            sentence = f"circle with {SHARED[self.communicators]}: {what}"
            ops = [step.waiting for step in circle]
            faulty = sorted({self._rank(op) for op in ops})
            return self._made("circle", sentence, faulty, ops, circle=tuple(step.words for step in circle))
        roots = self._roots()
        return self._of_roots(roots) if roots else self._outside()

    def _strange(self) -> HungPipeline | None:
        for rank, at in self.placed.items():
            if at.strange:
                end = at.strange[0]
                verb = f"sends to rank {end.dst}" if end.is_send else f"receives from rank {end.src}"
                sentence = f"rank {rank} {verb}, which the schedule does nowhere: it runs another schedule"
                return self._made("order", sentence, [rank], [], graph=False)
        return None

    def _other_order(self, *, all_launched: bool) -> HungPipeline | None:
        """A rank that has sent what comes later in the schedule before what comes earlier; or instead of that."""
        for rank, seen in sorted(self.hung.seen.items()):
            planned = [op for op in self.plan.messages(rank) if self.plan.ends[op].is_send]
            turn = {op: place for place, op in enumerate(planned)}
            sent = [message for message in seen if message.op in turn]
            launched = [op for batch in _batches(sent) for op in sorted(batch, key=turn.__getitem__)]
            for place, op in enumerate(launched):
                before = [held for held in planned[: turn[op]] if held not in launched[:place]]
                held = next((held for held in before if all_launched and held in launched), None)
                held = next((held for held in before if not self.hung.launched[held]), held)
                if held is not None:
                    return self._in_another_order(rank, op, held)
        return None

    def _in_another_order(self, rank: int, launched: int, held: int) -> HungPipeline:
        sentence = (
            f"rank {rank} runs another order than the schedule: it launched {self.program.op(launched)} without or "
            f"before {self.program.op(held)}, which comes first in the schedule"
        )
        return self._made("order", sentence, [rank], [launched, held], graph=False)

    def _outside(self) -> HungPipeline:
        sentence = "no message of the pipeline is waited for: the hang is outside it, or between two steps"
        return self._made("outside", sentence, [], [], graph=False)

    # -- roots -------------------------------------------------------------------------------------------------------

    def _roots(self) -> dict[int, list[int]]:
        """For each rank that is a cause its nodes; a rank may wait for its own send where several have stopped."""
        found: dict[int, list[int]] = {}
        for node in self.waiting.stopped or self.waiting.roots:  # where a receive was posted is not sure
            found.setdefault(self._rank(self.waiting.op_of(node)), []).append(node)
        if len(found) < 2:
            return found
        kept = {rank: nodes for rank, nodes in found.items() if not self._waits_for_send(rank, found)}
        return kept or found

    def _waits_for_send(self, rank: int, roots: Mapping[int, Sequence[int]]) -> bool:
        """True if a launched send of the rank has not ended for want of another that has stopped."""
        waiting, hung = self.waiting, self.hung
        others = {node for other, nodes in roots.items() if other != rank for node in nodes}
        for op in waiting.row(rank):
            if op in self.plan.ends and self.plan.ends[op].is_send and hung.launched[op] and not hung.completed[op]:
                node = int(waiting.graph.node[waiting.queues.num + waiting.item[op]])
                if waiting.chain(node, others) is not None:
                    return True
        return False

    def _of_roots(self, roots: Mapping[int, Sequence[int]]) -> HungPipeline:
        rank = min(roots, key=lambda rank: (rank not in self.hung.placed, rank))
        op = self.waiting.op_of(roots[rank][0])
        if not self.waiting.stopped:
            return self._in_flight(op)
        ops = self._may_be_at(rank)
        places = " or ".join(dict.fromkeys(str(self.program.op(cell)) for cell in ops))
        if rank in self.hung.placed:
            cause, sentence = (
                "stopped",
                f"rank {rank} stopped at {places}: it had all that it needs, and launched nothing after it"
                f"{self._waits_instead(rank, ops)}",
            )
        elif rank in self.old:
            end, sent, received = self.old[rank]
            cause = "old-dump"
            sentence = (
                f"rank {rank} was lost, or its dump is of another time: the dump has {sent} sends to rank {end.dst}, "
                f"which has received {received}; the others wait for it from {places} on"
            )
        else:
            cause = "no-dump"
            sentence = f"rank {rank} left no dump, and the others wait for it: it had all that it needs for {places}"
        return self._made(cause, sentence, [rank], ops, goals=set(roots[rank]))

    def _waits_instead(self, rank: int, ops: Sequence[int]) -> str:
        """What a rank of another schedule would wait for: a receive that the plan issues after these cells."""
        row = self.plan.rows[rank]
        later = row[row.index(ops[-1]) :] if ops else []
        for op in later:
            if op in self.plan.ends and self.hung.launched[op] and not self.hung.completed[op]:
                return f"; it waits for {self.program.op(op)}, which comes later in the schedule: did it run this one?"
        return ""

    def _in_flight(self, op: int) -> HungPipeline:
        end = self.plan.ends[op]
        sentence = (
            f"{self.program.op(op)} of rank {self._rank(op)} is launched at both ends, with nothing before it: the "
            f"link between ranks {end.src} and {end.dst}, or a kernel before it on either device"
        )
        return self._made("in-flight", sentence, [end.src, end.dst], [op], goals=set(self.waiting.roots))

    def _may_be_at(self, rank: int) -> list[int]:
        """The cells at which a host may be: from the first that it has not surely passed to the next that sends."""
        at, found = self.waiting.host_at(rank), list[int]()
        makers = {self.program.deps(op)[0] for op in self.plan.messages(rank) if self.plan.ends[op].is_send}
        cells = self.waiting.cells[rank]
        for op in cells[cells.index(at) :] if at is not None else []:
            if found and any(
                self.hung.completed[need] == 0 for need in self.program.deps(op) if need in self.plan.ends
            ):
                break
            found.append(op)
            if op in makers:
                break
        return found

    # -- results -----------------------------------------------------------------------------------------------------

    def _rank(self, op: int) -> int:
        return int(self.program.lane_rank[self.program.lane_of[op]])

    def _made(
        self,
        cause: str,
        sentence: str,
        at_fault: Sequence[int],
        ops: Sequence[int],
        *,
        circle: tuple[str, ...] = (),
        goals: set[int] | None = None,
        graph: bool = True,
    ) -> HungPipeline:
        waits = (
            self._chains(goals, {int(self.waiting.graph.node[self.waiting.item[op]]) for op in ops}) if graph else {}
        )
        whole = all(at.from_start for at in self.hung.placed.values())
        return HungPipeline(
            cause,
            sentence,
            self.group,
            self.ranks,
            tuple(at_fault),
            self.hung.number if whole else None,
            tuple(dict.fromkeys(str(self.program.op(op)) for op in ops)),
            circle,
            waits,
        )

    def _chains(self, goals: set[int] | None, circle: set[int]) -> dict[int, tuple[str, ...]]:
        found = {}
        for rank in range(len(self.ranks)):
            start = self.waiting.begins(rank)
            chain = self.waiting.chain(start, goals if goals is not None else circle) if start is not None else None
            if chain is not None:
                found[rank] = tuple(step.words for step in chain[0])
        return found


def _batches(messages: Sequence[PlacedMessage]) -> list[list[int]]:
    """The ops of each batch: within it they have no order."""
    found: list[list[int]] = []
    last = NEVER
    for message in messages:
        if message.batch == NEVER or message.batch != last:
            found.append([])
        found[-1].append(message.op)
        last = message.batch
    return found
