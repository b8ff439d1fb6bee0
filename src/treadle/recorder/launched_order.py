"""The order in which ranks issued a step, as their dumps show it, and how far each message came."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from treadle.ir.program import NEVER, Bools
from treadle.passes.issue_order import IssueOrder
from treadle.recorder.dump_file import ChannelEnd
from treadle.recorder.placing import MatchedPlan, PlacedMessage, PlacedRank


@dataclass(frozen=True, eq=False)
class HungStep:
    """One step of a run that hangs: what each rank launched of it; ranks that are not in `placed` left no dump."""

    plan: MatchedPlan
    number: int
    placed: Mapping[int, PlacedRank]

    @classmethod
    def of(cls, plan: MatchedPlan, placed: Mapping[int, PlacedRank]) -> HungStep:
        """Return the first step that is not whole on all ranks that left a dump."""
        open_steps = [
            place // len(plan.channels[end]) for rank in placed.values() for end, place in rank.completed.items()
        ]
        return cls(plan, min(open_steps, default=0), placed)

    @cached_property
    def seen(self) -> dict[int, list[PlacedMessage]]:
        """The messages of this step that each rank launched, in order."""
        return {
            number: [message for message in rank.messages if message.step == self.number]
            for number, rank in self.placed.items()
        }

    @cached_property
    def launched(self) -> Bools:
        """The messages that were launched; those of a rank without a dump as far as the other end shows."""
        found = self.completed.copy()
        for messages in self.seen.values():
            found[[message.op for message in messages]] = True
        return found | self._passed("launched")

    @cached_property
    def completed(self) -> Bools:
        """The messages that have ended."""
        found = np.zeros(self.plan.program.num_ops, bool)
        for messages in self.seen.values():
            found[[message.op for message in messages if message.state == "completed"]] = True
        found |= self._passed("completed")
        for end, ops in self.plan.channels.items():
            holder, other = (end.src, end.dst) if end.is_send else (end.dst, end.src)
            if holder not in self.placed and other in self.placed:
                partner = self.plan.channels[ChannelEnd(not end.is_send, end.src, end.dst)]
                ended = [op for op, met in zip(ops, partner, strict=False) if found[met]]
                found[ended] = True
        return found

    @cached_property
    def started(self) -> Bools:
        """The messages that have started, as far as dumps say: torch writes it where timing is enabled."""
        found = self.completed.copy()
        for messages in self.seen.values():
            found[[message.op for message in messages if message.state != "scheduled"]] = True
        return found

    def _passed(self, what: str) -> Bools:
        """Messages that stood before the first entry of a buffer."""
        found = np.zeros(self.plan.program.num_ops, bool)
        for rank in self.placed.values():
            counts = rank.launched if what == "launched" else rank.completed
            shown = {(message.step, message.op) for message in rank.messages}
            for end, count in counts.items():
                ops = self.plan.channels[end]
                within = count - self.number * len(ops)
                gone = [op for op in ops[: max(0, within)] if (self.number, op) not in shown]
                found[gone] = True
        return found

    @cached_property
    def is_open(self) -> bool:
        """True if any rank has launched a message of this step that is not completed, or lacks one of it."""
        return any(len(messages) for messages in self.seen.values()) or bool(self.completed.any())

    def contradicts(self) -> bool:
        """Say whether a rank launched a send before a receive that the send's cell, or one before it, reads."""
        return any(self._contradicts(rank, messages) for rank, messages in self.seen.items())

    def _contradicts(self, rank: int, messages: Sequence[PlacedMessage]) -> bool:
        program, ends = self.plan.program, self.plan.ends
        shown = {message.op for message in messages}
        known = {op for op in self.plan.messages(rank) if self.launched[op] and op not in shown}
        cells = [op for op in self.plan.rows[rank] if op not in ends]
        place = {op: turn for turn, op in enumerate(cells)}
        read = 0
        for message in messages:
            if not ends[message.op].is_send:
                known.add(message.op)
                continue
            until = place[program.deps(message.op)[0]] + 1
            needs = {need for op in cells[read:until] for need in program.deps(op) if need in ends}
            if not needs <= known:
                return True
            read = max(read, until)
        return False

    @cached_property
    def order(self) -> IssueOrder:
        """The order of issue: what was launched, in the order of the dumps; after it the rest, in that of the plan."""
        columns: list[tuple[int, bool, bool]] = []
        ptr = [0]
        for rank, planned in enumerate(self.plan.rows):
            seen = self.seen.get(rank)
            if seen is None or self._as_planned(rank):
                first, last = int(self.plan.order.ptr[rank]), int(self.plan.order.ptr[rank + 1])
                order = self.plan.order
                columns += [(int(order.op[i]), bool(order.joined[i]), bool(order.waits[i])) for i in range(first, last)]
            else:
                columns += [(op, joined, False) for op, joined in self._merged(planned, seen)]
            ptr.append(len(columns))
        table = np.array(columns, np.int32).reshape(-1, 3).T
        return IssueOrder(np.array(ptr, np.int64), table[0].copy(), table[1].astype(bool), table[2].astype(bool))

    def _as_planned(self, rank: int) -> bool:
        """True if the rank launched its messages in the order of the plan, and batches are not to be kept."""
        if any(message.batch != NEVER for message in self.seen[rank]) and not self.plan.schedule.issue:
            return False
        seen = [message.op for message in self.seen[rank]]
        passed = [op for op in self.plan.messages(rank) if op not in set(seen) and self.launched[op]]
        return self.plan.messages(rank)[: len(passed) + len(seen)] == [*passed, *seen]

    def _merged(self, planned: list[int], seen: list[PlacedMessage]) -> Iterator[tuple[int, bool]]:
        """Launched messages with cells as late as their sends allow; then what is left of the plan."""
        program, ends = self.plan.program, self.plan.ends
        shown = {message.op for message in seen}
        passed = [(op, NEVER) for op in planned if op in ends and self.launched[op] and op not in shown]
        cells = [op for op in planned if op not in ends]
        emitted, last = set[int](), NEVER
        for op, batch in [*passed, *((message.op, message.batch) for message in seen)]:
            maker = program.deps(op)[0] if ends[op].is_send else NEVER
            while maker not in emitted and cells and maker != NEVER:
                emitted.add(cells[0])
                last = NEVER
                yield cells.pop(0), False
            yield op, batch != NEVER and batch == last
            emitted.add(op)
            last = batch
        yield from ((op, False) for op in planned if op not in emitted)
