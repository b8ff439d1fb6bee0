"""The load phase on one update rank: a bucket loop with this attempt's buffers, source, group and comparison."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

from treadle.dist.streams import streams_of
from treadle.update.errors import failure
from treadle.update.memory.ipc_buffers import Buffer
from treadle.update.protocol.control import Layouts, Sample
from treadle.update.rank.bucket_loop import BucketLoop, Fill, exporting
from treadle.update.rank.bucket_packing import Packer
from treadle.update.rank.comparing import SourceComparison, TieComparison, comparison, shared_samples
from treadle.update.rank.context import RankContext
from treadle.update.rank.delta_packing import DeltaPacker, NotedPacker
from treadle.update.rank.shares import Shares
from treadle.update.rank.source import WeightSource
from treadle.update.rank.targeted_loop import TargetedLoop


class Loading:
    """Moves the buckets of one attempt: whole, or with `delta` their changed elements.

    Making it joins the process group, which all ranks do together.
    """

    def __init__(
        self,
        context: RankContext,
        shares: Shares,
        layouts: Layouts,
        source: WeightSource | None,
        epoch: int,
        ties: TieComparison | None,
        *,
        delta: bool = False,
        noted: bool = False,
    ) -> None:
        self.context, self.shares, self.layouts, self.source, self.epoch = context, shares, layouts, source, epoch
        self._delta, self._noted = delta, noted
        self._deltas: DeltaPacker | None = None
        self.moved_bytes = sum(bucket.size_bytes * bucket.times for bucket in shares.plan.buckets)
        group = context.broadcasts.group_of(layouts.group, context.inbox)
        self._comparison = self._compare()
        looking = [comparing for comparing in (self._comparison, ties) if comparing is not None]
        looks = [comparing.look for comparing in looking if not delta]
        assert context.broadcasts.waiter is not None
        kind = TargetedLoop if shares.plan.is_targeted else BucketLoop
        self.loop = kind(
            shares,
            context.rank,
            epoch,
            context.device,
            ipc=context.buffers.ipc,
            h2d=context.buffers.h2d[: shares.plan.num_h2d],
            worker=context.own_worker,
            group=group.communicator,
            place=group.ranks.index,
            wait=context.broadcasts.waiter.wait,
            deadline_s=context.options.deadline_s,
            checked=context.options.checked,
            stream=context.buffers.stream,
            compare=_all_of(looks) if looks else None,
        )
        if isinstance(self.loop, TargetedLoop):
            self.loop.ahead = context.rank not in layouts.holds  # a worker that exports is asked from one thread

    def run(self, *, loads: bool) -> tuple[Sample, ...]:
        """Move all buckets; `loads`: this rank's worker takes some. Raises UpdateError where sources differ.

        Return digests of the pieces that this rank shares with others, where no rank sees another's elements.
        """
        total, done = self.loop.size_bytes, 0

        def progress(size_bytes: int) -> None:
            nonlocal done
            done += size_bytes
            self.context.progress(done, total)

        fill = self._fill()
        with ThreadPoolExecutor(1, "treadle samples") as beside, self._deltas or nullcontext():
            over = threading.Event()
            samples = beside.submit(self._samples, over)
            try:
                self.loop.run(fill, loads, progress)
                if self._delta:
                    self.moved_bytes = self.loop.total_bytes()
            except BaseException:
                over.set()
                raise
        different = self._comparison.refusal(self.layouts.version) if self._comparison is not None else None
        if different is not None:
            raise failure(self.epoch, different[0], "load", different[1])
        return samples.result()

    def _samples(self, over: threading.Event) -> tuple[Sample, ...]:
        if self.source is None or self.layouts.holds or not (self._delta or self.shares.plan.is_targeted):
            return ()
        context = self.context
        how = context.options.compare_sources
        return shared_samples(self.shares.plan, self.source, context.rank, how, self.epoch, over.is_set)

    def _fill(self) -> Fill:
        """Buckets come from workers that hold the version, in a recovery, or from this rank's source."""
        context, checked = self.context, self.context.options.checked
        if context.rank in self.layouts.holds:
            deadline_s, name = context.options.deadline_s, self.shares.name(context.rank, exports=True)
            return exporting(context.worker, name, self.epoch, context.buffers.all, deadline_s, checked)
        if self.source is None:  # then no bucket is this rank's
            self.loop.delta_bytes = _no_bytes if self._delta else None
            return _nothing
        sums = streams_of(context.device) is not None
        packer = Packer(self.shares, self.source, checked=checked, sums=sums)
        if not self._noted:
            return packer.fill
        noted = NotedPacker(self.shares, packer, context.share)
        if not self._delta:
            return noted.fill
        self._deltas = DeltaPacker(noted, self.loop.own, context.options.deadline_s)
        self.loop.delta_bytes = self._deltas.size_bytes
        return self._deltas.fill

    def _compare(self) -> SourceComparison | None:
        """A comparison with this rank's own weights. Workers that export all hold one committed version: none."""
        context = self.context
        context.compare_turn = context.compare_turn + 1 if context.compare_turn is not None else self.epoch
        sees = not self.layouts.holds and not self.shares.plan.is_targeted and not self._delta
        source = self.source if sees else None
        how = context.options.compare_sources
        return comparison(self.shares.plan, source, context.rank, how, context.compare_turn)


def _all_of(looks: Sequence[Callable[[Buffer, int], None]]) -> Callable[[Buffer, int], None]:
    """Return a function that makes all comparisons. It does not hold the phase, which holds the loop."""

    def compare(buffer: Buffer, number: int) -> None:
        for look in looks:
            look(buffer, number)

    return compare


def _no_bytes(number: int) -> int:
    return 0


def _nothing(buffer: Buffer, number: int) -> None:
    raise AssertionError(f"bucket {number} is to come from a rank without a source")
