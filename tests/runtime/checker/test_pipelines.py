"""Every schedule on streams, in real processes: nothing without an order, the gradients of one process, few host waits.

And the other way round: each class of wait and of recorded stream is left out of the log of a run, and the checker
finds it, or the class is one of UNNEEDED, with the reason.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import tests.support.checked as checked
import treadle
from tests.support.checked import check_pipeline, config_of, problems
from tests.support.devices import DEVICE_TYPE
from tests.support.patience import PATIENT_S
from tests.support.ranks import check, run_ranks
from tests.support.sync_classes import BACK_PRESSURE, missed
from treadle.dist import channel
from treadle.moe import Exchange, Experts, MoELayer
from treadle.runtime.checker import CheckReport, FindingKind, check_streams
from treadle.runtime.model import segments
from treadle.runtime.model.segments import Segment, compute, exchange
from treadle.schedules import SCHEDULES

pytestmark = pytest.mark.slow

COUNTED = "treadle/moe/exchanges/all_to_all.py"


KINDS = ["layers", "recomputed", "offload", "dp", "cells"]
EACH = [(schedule, KINDS[(at + more) % len(KINDS)]) for at, schedule in enumerate(SCHEDULES) for more in (0, 2)]
"""Two kinds of each schedule, the next in turn: an order comes from a kind's ops, and schedules put them elsewhere."""


@pytest.mark.parametrize(("schedule", "kind"), EACH)
def test_everything_is_ordered(schedule: str, kind: str) -> None:
    """layers: MoE over two ranks, its loss, embedding and head. DualPipe's copies are reduced in all of them."""
    changes: dict[str, Any] = {"num_layers": 1}
    if kind in ("recomputed", "offload"):
        changes["ep"] = 1
    config = config_of(schedule, "layers" if kind == "recomputed" else kind, **changes)
    ranks = check_pipeline(config, recomputed=kind == "recomputed")
    assert problems(ranks) == []
    for rank in ranks:
        waits = {place: times for place, times in rank.host_waits.items() if not place[2].startswith(BACK_PRESSURE)}
        if kind == "cells":
            assert waits == {}
            continue
        (place, times), *others = waits.items()
        assert others == []
        assert place[:2] == ("an event", "host")
        assert place[2].startswith(COUNTED)
        assert times == config.made.microbatches_per_pipe * config.num_layers * config.made.vpp  # one a layer


@pytest.mark.parametrize(("schedule", "kind"), [("dualpipev", "layers"), ("zb-v", "cells")])
def test_headers_ahead_of_messages_change_no_order(schedule: str, kind: str) -> None:
    assert problems(check_pipeline(config_of(schedule, kind, num_layers=1, unequal=True))) == []


@pytest.mark.parametrize("kind", ["layers", "offload"])
def test_what_is_computed_again_is_ordered(kind: str) -> None:
    """The inputs that wait for it come from other streams: a receive, an exchange, an onload."""
    changes: dict[str, Any] = {"recompute": "attn+mlp", "mtp": True, "dense": True, "ep": 1, "num_layers": 2}
    assert problems(check_pipeline(config_of("interleaved-overlap", kind, **changes))) == []


class ExpertChoice(nn.Module):
    """Each expert takes as many tokens as any other, those that score best: nothing is counted."""

    def __init__(self, ep_rank: int) -> None:
        super().__init__()
        self.score, self.exchange = nn.Linear(WIDTH, EXPERTS), Exchange()
        self.experts = Experts(WIDTH, WIDTH, EXPERTS // EP, first=ep_rank)

    def segments(self) -> list[Segment]:
        return [
            compute("attn", self.attn, reads="x", writes="h slots gates token"),
            exchange("dispatch", self.swap, reads="slots", writes="rows"),
            compute("mlp", lambda rows: self.experts(rows, [[TAKEN]] * EP), reads="rows", writes="made"),
            exchange("combine", self.combine, reads="made h gates token", writes="x"),
        ]

    def attn(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        gates, token = self.score(x).softmax(-1).topk(TAKEN, dim=0)
        token = token.t().reshape(-1)
        return x, x[token], gates.t().reshape(-1, 1), token

    def swap(self, slots: Tensor) -> Tensor:
        return self.exchange.swap(slots, [TAKEN] * EP, [TAKEN] * EP)

    def combine(self, made: Tensor, h: Tensor, gates: Tensor, token: Tensor) -> Tensor:
        return h.index_add(0, token, self.swap(made) * gates)


WIDTH, EXPERTS, EP, TAKEN = 8, 2, 2, 3


class ResidualReadTwice(ExpertChoice):
    """An ExpertChoice whose mlp and combine, on two streams, read h: a gradient of h comes from each."""

    def segments(self) -> list[Segment]:
        attn, dispatch, _, _ = super().segments()
        mlp = compute("mlp", self.mlp, reads="rows h", writes="made own")
        return [attn, dispatch, mlp, exchange("combine", self.add_own, reads="made h gates token own", writes="x")]

    def mlp(self, rows: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return self.experts(rows, [[TAKEN]] * EP), h.tanh()

    def add_own(self, made: Tensor, h: Tensor, gates: Tensor, token: Tensor, own: Tensor) -> Tensor:
        return self.combine(made, h, gates, token) + own / 2  # own has a gradient of its own memory


class LossesOnTwoLanes(ExpertChoice):
    """An ExpertChoice with a further loss on each lane: the scale of one is not the other lane's to read."""

    def segments(self) -> list[Segment]:
        attn, dispatch, _, _ = super().segments()
        mlp = compute("mlp", self.mlp, reads="rows", writes="made aux_loss")
        return [
            attn,
            dispatch,
            mlp,
            exchange("combine", self.combined, reads="made h gates token", writes="x aux_loss"),
        ]

    def combined(self, made: Tensor, h: Tensor, gates: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        x = self.combine(made, h, gates, token)
        return x, x.square().mean()

    def mlp(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        made = self.experts(rows, [[TAKEN]] * EP)
        return made, made.square().mean()


def run_padded(rank: int, layer: type[ExpertChoice]) -> CheckReport:
    mesh = init_device_mesh(DEVICE_TYPE, (2, 1, EP), mesh_dim_names=("pp", "dp", "ep"))
    schedule = treadle.generate("interleaved-overlap", pp=2, microbatches=4)
    torch.manual_seed(rank // EP)
    stages = {chunk: nn.Sequential(layer(rank % EP)) for chunk in range(schedule.vpp)}
    batch = torch.randn(4 * 6, WIDTH)
    with check_streams() as checker:
        pipe = treadle.Pipeline(stages, schedule, mesh=mesh, loss_fn=functional.mse_loss, deadline_s=PATIENT_S)
        for _ in range(2):
            checker.forget()
            pipe.step(batch, batch)
        report = checker.report()
        pipe.close()
    return report


@pytest.mark.parametrize("layer", [ExpertChoice, ResidualReadTwice, LossesOnTwoLanes])
def test_a_layer_of_ones_own_without_counts_never_waits(layer: type[ExpertChoice]) -> None:
    for report in check(run_ranks(2 * EP, run_padded, layer)):
        assert report.clean, report
        assert not [where for _, where in report.host_waits if not where.line.startswith(BACK_PRESSURE)], report


def count_streams(rank: int) -> tuple[list[str], list[str]]:
    """The streams after a step, and after steps of three kinds."""
    mesh = init_device_mesh(DEVICE_TYPE, (1, 2), mesh_dim_names=("pp", "dp"))
    schedule = treadle.generate("interleaved-overlap", pp=1, microbatches=2)
    torch.manual_seed(0)
    stages = {chunk: nn.Sequential(MoELayer(WIDTH, WIDTH, num_experts=EXPERTS)) for chunk in range(schedule.vpp)}
    batch = torch.randn(2 * 6, WIDTH)
    with check_streams() as checker:
        pipe = treadle.Pipeline(stages, schedule, mesh=mesh, loss_fn=functional.mse_loss, deadline_s=PATIENT_S)
        pipe.step(batch, batch)
        first = list(checker.streams)
        pipe.clear_gradients()
        with pipe.no_sync():
            pipe.step(batch, batch)
        pipe.evaluate(batch, batch)
        pipe.step(batch, batch)
        pipe.close()
    return first, checker.streams


def test_all_kinds_of_steps_share_the_streams_of_lanes() -> None:
    """The allocator caches blocks by stream: those of another set of streams would not be used again."""
    for first, streams in check(run_ranks(2, count_streams)):
        assert {"ep", "dp"} <= set(first), first
        assert streams == first


def run_without(rank: int, config: Any, module: str) -> list[FindingKind]:
    """A run in which one module keeps nothing, as if it had forgotten that streams have allocators."""
    for place in (segments, channel):
        if place.__name__.endswith(module):
            place.keep = lambda tensor: None  # type: ignore[attr-defined]
    return [finding.kind for finding in checked.run_checked(rank, config, recomputed=False, with_log=False).findings]


@pytest.mark.parametrize("module", ["segments"])
def test_a_module_that_keeps_nothing_is_found(module: str) -> None:
    config = config_of("interleaved-overlap", "layers", num_layers=1)
    kinds = {kind for rank in check(run_ranks(config.world, run_without, config, module)) for kind in rank}
    assert kinds
    assert kinds <= {FindingKind.NOT_KEPT, FindingKind.REUSED}


UNNEEDED = {
    "reduce_grad: record_stream at treadle/runtime/model/gradient_bucket.py": "a bucket outlives its reduction, "
    "unless the step fails",
    "combine_b: record_stream at treadle/runtime/model/segments.py": "the residual's gradient is the same memory, and "
    "attn_b, which is behind combine_b, lets go of it",
    "counts: record_stream at treadle/runtime/model/segments.py": "dispatch and combine, on the same stream, read the "
    "routing after it and keep it",
    "dispatch_f: wait_event for host": "the wait for the counts launches nothing: the host itself has waited",
    "embed_b: record_stream at treadle/runtime/model/segments.py": "made and read on the compute stream",
    "embed_f: record_stream at treadle/runtime/model/segments.py": "made and read on the compute stream",
    "head_b: record_stream at treadle/runtime/model/saved/saved_store.py": "made and read on the compute stream",
    "head_b: record_stream at treadle/runtime/model/segments.py": "made and read on the compute stream",
    "host: record_stream at treadle/runtime/model/segments.py": "the wait for the counts launches nothing",
    "host: wait_event for counts": "the wait for the counts launches nothing: the host waits for their copy",
    "onload: wait_event for attn_w": "it bounds how much is back at once",
    "onload: wait_event for embed_b": "it bounds how much is back at once",
    "onload: wait_event for head_w": "it bounds how much is back at once",
    "onload: wait_event for mlp_f": "it bounds how much is back at once",
    "receive B: wait_event for attn_f": "the ring of receives: it bounds how many are posted",
    "receive B: wait_event for combine_b": "the ring of receives: it bounds how many are posted",
    "receive B: wait_event for combine_f": "in a first step: the host asks the forward for the shape, no stream does",
    "receive F: wait_event for attn_f": "the ring of receives: it bounds how many are posted",
    "receive F: wait_event for combine_b": "the ring of receives: it bounds how many are posted",
    "reduce_grad: Work.wait for send B": "at the end of a step: the communicator keeps what it sends, and lanes keep "
    "their streams, on which the next step's sends come after",
    "reduce_grad: Work.wait for send F": "as of send B",
    "send B: record_stream at treadle/dist/channel.py": "the communicator records its own stream, which is behind",
    "send F: record_stream at treadle/dist/channel.py": "the communicator records its own stream, which is behind",
}
"""The classes without which these runs show nothing wrong."""


def test_each_class_of_order_is_needed_or_says_why_not() -> None:
    every: set[str] = set()
    found: set[str] = set()
    overlapped = "interleaved-overlap"
    for schedule, kind in ((overlapped, "layers"), (overlapped, "offload"), ("dualpipe", "offload")):
        ranks = check_pipeline(config_of(schedule, kind, num_layers=1, num_mb=6), with_log=True)
        for rank in (ranks[0], ranks[-1]):  # those between are like these
            unseen, classes = missed(rank.log, rank.streams)
            every |= classes
            found |= classes - unseen
    assert every - found == set(UNNEEDED)
    assert len(found) >= 39
