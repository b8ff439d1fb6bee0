"""Micro-batches of different lengths: the gradients of one process, and headers only in steps that have such."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import treadle
from tests.support import fuzz
from tests.support.behind_host import BehindHost
from tests.support.cases import Grads, ended_soon, hold, own_grads, pipeline, refusals, replica_of, schedule_of
from tests.support.oracle import VOCAB, grads_of, make_mesh, make_stages, mean_loss, run_whole, sum_loss
from tests.support.patience import PATIENT_S
from tests.support.ranks import check, run_ranks
from treadle.dist.channel import Channel
from treadle.dist.streams import replace_streams
from treadle.ir.ops import OpKind
from treadle.schedules import SCHEDULES

LENGTHS = (5, 2, 9, 1, 4)
OTHERS = (3, 8, 1, 2, 6)
STEPS: tuple[tuple[int, ...], ...] = (LENGTHS, OTHERS, (4,), (4,))
"""The lengths of each step's micro-batches, over and over. The last step has the shapes of the one before."""

Pairs = list[tuple[Tensor, Tensor]]


def num_mb_of(name: str) -> int:
    """Five, or as few more as the schedule takes."""
    return 5 if name in ("gpipe", "1f1b", "zb-h1") else 8


def pairs_of(lengths: Sequence[int], num_mb: int, replica: int = 0, times: int = 1) -> Pairs:
    """Tokens and the tokens after them. Replicas have the same lengths at other micro-batches."""
    generator = torch.Generator("cpu").manual_seed(replica)
    pairs = []
    for mb in range(num_mb):
        length = lengths[(mb + 2 * replica) % len(lengths)] * times
        tokens = torch.randint(0, VOCAB, (2, length + 1), generator=generator, device="cpu")
        tokens = tokens.to(torch.get_default_device())
        pairs.append((tokens[:, :-1], tokens[:, 1:]))
    return pairs


class Case(NamedTuple):
    """What ranks run: all schedules of `names`, `times` longer, on a device that `runs_behind` the host or the CPU."""

    names: tuple[str, ...]
    pp: int
    dp: int = 1
    times: int = 1
    runs_behind: bool = False


class Ran(NamedTuple):
    """A step of a rank: its loss, gradients, and how many headers the rank sent."""

    loss: float
    grads: Grads
    headers: int


@contextmanager
def counted_headers() -> Iterator[list[Tensor]]:
    """The headers that this process sends."""
    sent: list[Tensor] = []
    send = Channel.send_header

    def noted(channel: Channel, header: Tensor) -> None:
        sent.append(header)
        send(channel, header)

    with mock.patch.object(Channel, "send_header", noted):
        yield sent


def run_steps(rank: int, case: Case) -> list[tuple[list[Ran], float, int]]:
    """For each schedule its steps, the loss of an evaluation, and how many messages forward a step of the rank has."""
    mesh, ran = make_mesh(case.pp, case.dp), []
    replica = replica_of(mesh)
    behind = replace_streams("cpu", BehindHost(lambda made, name: made)) if case.runs_behind else nullcontext()
    with behind, counted_headers() as sent:
        for name in case.names:
            num_mb = num_mb_of(name)
            schedule = schedule_of(name, case.pp, num_mb)
            stages = make_stages(schedule.placement.num_stages)
            pipe = pipeline(schedule, stages, mesh, sum_loss, shapes="each", deadline_s=PATIENT_S)
            steps = []
            for lengths in STEPS:
                for stage in stages:
                    stage.zero_grad()
                sent.clear()
                inputs, targets = split(pairs_of(lengths, num_mb, replica, case.times))
                at_first = 0 in schedule.placement.stages[rank // case.dp]
                loss = float(pipe.step(inputs if at_first else None, targets, num_tokens=100.0))
                steps.append(Ran(loss, own_grads(schedule, mesh, stages), len(sent)))
            loss = float(pipe.evaluate(*split(pairs_of(OTHERS, num_mb, replica, case.times)), num_tokens=100.0))
            program, pp_rank = pipe.program, rank // case.dp
            own = program.lane_rank[program.lane_of] == pp_rank
            ran.append((steps, loss, int((own & (program.kind == OpKind.SEND_F)).sum())))
            pipe.close()
    return ran


def split(pairs: Pairs) -> tuple[list[Tensor], list[Tensor]]:
    return [x for x, _ in pairs], [y for _, y in pairs]


def wanted(case: Case, name: str, lengths: Sequence[int]) -> tuple[float, Grads]:
    """Of one process, over the micro-batches of all replicas."""
    num_mb = num_mb_of(name)
    stages = make_stages(schedule_of(name, case.pp, num_mb).placement.num_stages)
    pairs = [pair for replica in range(case.dp) for pair in pairs_of(lengths, num_mb, replica, case.times)]
    losses = run_whole(stages, pairs, sum_loss, num_tokens=100.0)
    return sum(losses) / 100.0, grads_of(dict(enumerate(stages)))


FIVE = ("1f1b", "interleaved-overlap", "dualpipe", "dualpipev", "zb-v")
CASES = [
    pytest.param(Case(tuple(SCHEDULES), pp=2), id="pp2"),
    pytest.param(Case(FIVE, pp=4), id="pp4"),
    pytest.param(Case(("1f1b", "dualpipe"), pp=2, dp=2), id="dp2", marks=pytest.mark.slow),
    pytest.param(Case(("interleaved-overlap", "zb-v"), pp=2, times=300), id="large", marks=pytest.mark.slow),
    pytest.param(Case(("1f1b", "dualpipe", "zb-v"), pp=2, runs_behind=True), id="device"),
]
"""Where messages are large, a send waits for the receives of those before."""


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_lengths_of_their_own_come_to_the_gradients_of_one_process(case: Case) -> None:
    ranks = check(run_ranks(case.pp * case.dp, run_steps, case))
    for place, name in enumerate(case.names):
        want = [wanted(case, name, lengths) for lengths in STEPS]
        for step in range(len(STEPS)):
            hold([ran[place][0][step][:2] for ran in ranks], want[step], note=(name, step))
        for steps, evaluated, num_sends in (ran[place] for ran in ranks):
            assert evaluated == pytest.approx(want[STEPS.index(OTHERS)][0], rel=1e-10)
            assert steps[0].headers >= num_sends  # and which gradients come
            assert [ran.headers for ran in steps[1:]] == [num_sends, num_sends, 0], name


def same_then_same(rank: int, shapes: str) -> list[int]:
    schedule, mesh = schedule_of("1f1b", 2, 5), make_mesh(2)
    pipe = pipeline(schedule, make_stages(2), mesh, shapes=shapes, deadline_s=PATIENT_S)
    nums = []
    with counted_headers() as sent:
        for _ in range(3):
            sent.clear()
            pipe.step(*split(pairs_of((4,), 5)))
            nums.append(len(sent))
    return nums


@pytest.mark.parametrize("shapes", ["same", "each"])
def test_one_length_needs_one_header_and_later_none(shapes: str) -> None:
    assert check(run_ranks(2, same_then_same, shapes)) == [[1, 0, 0], [1, 0, 0]]  # shapes forward, flags back


@pytest.mark.slow
def test_lengths_of_their_own_under_injected_delays(capfd: pytest.CaptureFixture[str]) -> None:
    asked = ["--draws", "8", "--steps", "2", "--jobs", "1", "--seed", "3", "--deadline", "300"]
    said = fuzz.fuzz(fuzz.parser().parse_args([*asked, "--only", "unequal=True,dtype=float64"]))
    assert said["failures"] == 0, capfd.readouterr().err


# -- what else may differ ----------------------------------------------------------------------------------------------


class Chosen(nn.Module):
    """A first stage that drops tokens: its output is as long as there are even ones."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.stage(tokens.flatten()[tokens.flatten() % 2 == 0][None])
        return out


def even_ones(pairs: Pairs) -> list[Tensor]:
    return [y.flatten()[x.flatten() % 2 == 0][None] for x, y in pairs]


def drop_tokens(rank: int, shapes: str) -> tuple[float, Grads]:
    schedule, mesh = schedule_of("zb-h1", 2, 5), make_mesh(2)
    first, last = make_stages(2)
    stages = [Chosen(first), last]
    pipe = pipeline(schedule, stages, mesh, shapes=shapes, deadline_s=PATIENT_S)
    pairs = pairs_of((9,), 5)
    loss = float(pipe.step(split(pairs)[0], even_ones(pairs)))
    return loss, own_grads(schedule, mesh, stages)


def test_outputs_may_differ_where_inputs_do_not() -> None:
    pairs = pairs_of((9,), 5)
    assert len({len(y[0]) for y in even_ones(pairs)}) > 1
    first, last = make_stages(2)
    stages = [Chosen(first), last]
    losses = run_whole(stages, list(zip(split(pairs)[0], even_ones(pairs), strict=True)), mean_loss)
    hold(check(run_ranks(2, drop_tokens, "any")), (sum(losses) / 5, grads_of(dict(enumerate(stages)))))


def test_outputs_that_differ_unannounced_are_refused() -> None:
    ended_soon(run_ranks(2, drop_tokens, "each"), 0, "shapes='any' where inputs of one shape come to outputs of")


class Casts(nn.Module):
    """Returns another dtype for micro-batches of one token."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.stage(tokens)
        return out.float() if tokens.shape[1] == 1 else out


def cast_some(rank: int) -> None:
    first, last = make_stages(2)
    pipe = pipeline(schedule_of("1f1b", 2, 5), [Casts(first), last], make_mesh(2), shapes="each", deadline_s=PATIENT_S)
    pipe.step(*split(pairs_of(LENGTHS, 5)))


def test_only_shapes_may_differ() -> None:
    ended_soon(run_ranks(2, cast_some), 0, "(2, 1, 8) float32 for micro-batch 3, but (2, 9, 8) float64 before; micro-")


def bad_on_one(rank: int) -> None:
    """Rank 0 refuses its batch while rank 1 waits for what it says about shapes."""
    pipe = pipeline(schedule_of("1f1b", 2, 5), make_stages(2), make_mesh(2), shapes="each", deadline_s=PATIENT_S)
    inputs, targets = split(pairs_of(LENGTHS, 5))
    pipe.step(inputs[:4] if rank == 0 else None, targets)


@pytest.mark.slow
def test_a_rank_that_waits_for_shapes_hears_of_a_refusal() -> None:
    ended_soon(run_ranks(2, bad_on_one), 0, "the schedule has 5 micro-batches, got 4")


def two_minds(rank: int) -> Callable[[], object]:
    return lambda: _make("each" if rank else "same")


def no_value(rank: int) -> Callable[[], object]:
    return lambda: _make("some")


def _make(shapes: Any) -> treadle.Pipeline:
    return pipeline(schedule_of("1f1b", 2, 5), make_stages(2), make_mesh(2), shapes=shapes, deadline_s=PATIENT_S)


def test_all_ranks_have_the_same_shapes_option() -> None:
    assert all("differ in shapes ('same' and 'each')" in said for said in refusals(2, two_minds))
    assert all("shapes is same, each or any, got 'some'" in said for said in refusals(2, no_value))
