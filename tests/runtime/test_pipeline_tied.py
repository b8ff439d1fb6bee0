"""Parameters that stages on different ranks share: their gradients, what is refused, and norms that count them once."""

from __future__ import annotations

import copy
import math
import signal
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

import treadle
from tests.runtime.run.test_layers import Case, one_process, one_rank, whole_model
from tests.runtime.run.test_layers_blocks import VOCAB as TOKENS
from tests.runtime.run.test_layers_blocks import Next, Quiet, tokens
from tests.support.behind_host import BehindHost
from tests.support.cases import (
    Grads,
    float_batch,
    hold,
    own_grads,
    pipeline,
    refusal,
    replica_of,
    schedule_of,
    square_loss,
    take_step,
)
from tests.support.faults import Faults
from tests.support.oracle import (
    VOCAB,
    Block,
    Embed,
    Head,
    cut,
    grads_of,
    make_batch,
    make_mesh,
    mean_loss,
    run_whole,
)
from tests.support.patience import PATIENT_S
from tests.support.ranks import check, run_ranks
from treadle.dist.streams import replace_streams
from treadle.ir.ops import OpKind
from treadle.runtime.model.exchange import RankOwned

SIZE, MICROBATCHES = 8, 8
SCHEDULES = ["1f1b", "interleaved-overlap", "dualpipe", "dualpipev", "zb-v"]


class Reuse(nn.Module):
    """A stage in the middle that predicts with the table of the embedding, as an MTP block does."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(VOCAB, SIZE))
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) + torch.tanh(x @ self.table.t()) @ self.table / VOCAB
        return out


def tied_stages(num_stages: int) -> list[nn.Module]:
    """The whole model, whose first and last stage share a table; with four stages or more, one between them too."""
    torch.manual_seed(11)
    embed, head = Embed(SIZE), Head(SIZE)
    middle: list[nn.Module] = [Block(SIZE, SIZE) for _ in range(num_stages - 2)]
    head.linear.weight = embed.table.weight
    if num_stages >= 4:
        middle[-1] = reuse = Reuse()
        reuse.table = cast(nn.Parameter, embed.table.weight)
    return [stage.double() for stage in (embed, *middle, head)]


def tied_names(num_stages: int) -> dict[str, dict[int, str]]:
    between = {-2: "table"} if num_stages >= 4 else {}
    return {"table": {0: "table.weight", **between, -1: "linear.weight"}}


def apart(stages: Sequence[nn.Module]) -> list[nn.Module]:
    """The stages with parameters of their own, as processes that make a stage each have them."""
    return [copy.deepcopy(stage) for stage in stages]


Result = tuple[float, Grads, list[float], list[str], list[int]]
"""Loss, gradients, norms, names of the parameters that the rank counts, and its reductions of ties."""


def step_tied(rank: int, name: str, pp: int, dp: int, reduces: Sequence[bool] = (True,)) -> Result:
    del rank
    schedule, mesh = schedule_of(name, pp, MICROBATCHES), make_mesh(pp, dp)
    num_stages = schedule.placement.num_stages
    stages = apart(tied_stages(num_stages))
    pipe = pipeline(schedule, stages, mesh, tied=tied_names(num_stages), deadline_s=PATIENT_S)
    pp_rank, replica = mesh.get_local_rank("pp"), replica_of(mesh)
    if reduces == (True,):  # the second step has its receives posted ahead
        pipe.step(*make_batch(MICROBATCHES, replica, seed=7))
        for stage in stages:
            stage.zero_grad()
    for seed, reduce in enumerate(reduces):
        loss = float(take_step(pipe, *make_batch(MICROBATCHES, replica, seed=seed), reduce=reduce))
        assert pipe.report is not None
        assert pipe.report.reduced is reduce
    norms = [float(pipe.grad_norm(p)) for p in (2.0, 1.0, math.inf)]
    counted = [f"{stage}.{param}" for stage, param, _ in pipe.counted_parameters()]
    program = pipe.program
    own = (program.kind == OpKind.REDUCE_TIED) & (program.lane_rank[program.lane_of] == pp_rank)
    result = loss, own_grads(schedule, mesh, stages), norms, counted, program.layer[own].tolist()
    pipe.close()
    return result


def step_on_both_meshes(rank: int, name: str) -> list[Result]:
    return [step_tied(rank, name, pp, dp) for pp, dp in ((4, 1), (2, 2))]


def hold_tied(ranks: Sequence[Result], name: str, pp: int, dp: int, num_steps: int = 1) -> None:
    """Gradients, norms and counts are those of one process."""
    placement = schedule_of(name, pp, MICROBATCHES).placement
    stages = tied_stages(placement.num_stages)
    for seed in range(num_steps):
        batches = [make_batch(MICROBATCHES, replica, seed=seed) for replica in range(dp)]
        losses = run_whole(stages, cut(batches, MICROBATCHES), mean_loss)
    hold([ran[:2] for ran in ranks], (sum(losses) / len(losses), grads_of(dict(enumerate(stages)))), note=(name, pp))
    model = nn.Sequential(*stages)
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    for rank, (_, _, norms, _, reductions) in enumerate(ranks):
        assert norms == pytest.approx([float(get_total_norm(grads, p)) for p in (2.0, 1.0, math.inf)], rel=1e-10)
        held = set(placement.stages[rank // dp])
        tied = {stage % placement.num_stages for stage in tied_names(placement.num_stages)["table"]}
        assert reductions == ([0] if held & tied else [])
    counted = [name for ran in ranks for name in ran[3]]
    assert sorted(counted) == sorted(name for name, _ in model.named_parameters())


@pytest.mark.parametrize("name", SCHEDULES)
def test_tied_stages_on_ranks_of_their_own_have_the_gradients_of_one_process(name: str) -> None:
    ranks = check(run_ranks(4, step_on_both_meshes, name))
    hold_tied([both[0] for both in ranks], name, 4, 1)
    hold_tied([both[1] for both in ranks], name, 2, 2)


@pytest.mark.parametrize(
    ("name", "reduces"), [("1f1b", (False, True)), ("dualpipe", (True, True)), ("zb-v", (False, True, True))]
)
def test_steps_over_a_tied_parameter_add_up(name: str, reduces: tuple[bool, ...]) -> None:
    hold_tied(check(run_ranks(2, step_tied, name, 2, 1, reduces)), name, 2, 1, num_steps=len(reduces))


def step_in_a_v(rank: int, dp: int, is_shared: bool) -> tuple[float, Grads]:
    """Rank 0 has all stages of the tie: as one object, or as two of the same values."""
    del rank
    schedule, mesh = schedule_of("zb-v", 2, MICROBATCHES), make_mesh(2, dp)
    stages = ends_tied()
    pipe = pipeline(schedule, stages if is_shared else apart(stages), mesh, tied=tied_names(2), deadline_s=PATIENT_S)
    loss = float(pipe.step(*make_batch(MICROBATCHES, replica_of(mesh))))
    grads = grads_of({schedule.placement.stage(mesh.get_local_rank("pp"), c): m.module for c, m in pipe.stages.items()})
    pipe.close()
    return loss, grads


def ends_tied() -> list[nn.Module]:
    embed, head = tied_stages(2)
    return [embed, Block(SIZE, SIZE).double(), Block(SIZE, SIZE).double(), head]


@pytest.mark.parametrize(("dp", "is_shared"), [(1, False), (1, True), (2, False)])
def test_a_tie_within_one_rank_needs_no_other(dp: int, is_shared: bool) -> None:
    ranks = check(run_ranks(2 * dp, step_in_a_v, dp, is_shared))
    stages = ends_tied()
    losses = run_whole(stages, cut([make_batch(MICROBATCHES, r) for r in range(dp)], MICROBATCHES), mean_loss)
    hold(ranks, (sum(losses) / len(losses), grads_of(dict(enumerate(stages)))))


class Scaled(nn.Module):
    """A stage with many parameters of two types."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6).double()
        self.scales = nn.ParameterList(nn.Parameter(1 + torch.rand(6)) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        for scale in self.scales:
            out = out * scale.double()
        return out


MANY = {
    "weight": dict.fromkeys((0, 1, 2), "linear.weight"),
    "bias": dict.fromkeys((1, 2), "linear.bias"),
    **{f"scale {n}": dict.fromkeys(at, f"scales.{n}") for n, at in enumerate(((0, 3), (0, 1), (2, 3), (1, 2), (0, 3)))},
}
"""Ties of the four stages of two ranks, each of which both have."""


def many_tied() -> list[nn.Module]:
    torch.manual_seed(5)
    stages = [Scaled() for _ in range(4)]
    for names in MANY.values():
        (first, name), *others = names.items()
        for stage, other in others:
            owner, _, leaf = other.rpartition(".")
            setattr(stages[stage].get_submodule(owner), leaf, stages[first].get_parameter(name))
    return list(stages)


def step_many(rank: int) -> tuple[float, Grads, int]:
    del rank
    schedule, mesh, stages = schedule_of("interleaved", 2, 4, 2), make_mesh(2), apart(many_tied())
    pipe = pipeline(schedule, stages, mesh, square_loss, tied=MANY, deadline_s=PATIENT_S)
    loss = float(pipe.step(*float_batch(4)))
    num = int((pipe.program.kind == OpKind.REDUCE_TIED).sum())
    result = loss, own_grads(schedule, mesh, stages), num
    pipe.close()
    return result


def test_ties_of_the_same_ranks_are_reduced_together() -> None:
    stages = many_tied()
    losses = run_whole(stages, cut([float_batch(4)], 4), square_loss)
    ranks = check(run_ranks(2, step_many))
    hold([ran[:2] for ran in ranks], (sum(losses) / 4, grads_of(dict(enumerate(stages)))), most=1e-6)
    assert [ran[2] for ran in ranks] == [2, 2]


def step_with_many_communicators(rank: int) -> tuple[float, list[str]]:
    """Rank 1 has four channels and five ties with others each, as communicators of a device of its own."""
    sets = ((0, 1), (1, 2), (1, 3), (0, 1, 2), (1, 2, 3))
    tied = {f"t{n}": dict.fromkeys(stages, f"scales.{n}") for n, stages in enumerate(sets)}
    torch.manual_seed(5)
    stages = apart([Scaled()] * 4)
    mesh = make_mesh(4)
    with replace_streams("cpu", BehindHost(lambda made, name: made)), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        pipe = pipeline(schedule_of("1f1b", 4, 4), stages, mesh, square_loss, tied=tied, deadline_s=PATIENT_S)
        loss = float(pipe.step(*float_batch(4)))
        pipe.close()
    return loss, [str(each.message) for each in warned if "communicators" in str(each.message)]


def test_a_rank_with_many_communicators_warns_and_steps() -> None:
    ranks = check(run_ranks(4, step_with_many_communicators))
    assert len({loss for loss, _ in ranks}) == 1
    assert [len(warned) for _, warned in ranks] == [0, 1, 0, 0]
    assert ranks[1][1][0].startswith("rank 1 makes 9 communicators on cpu, each with buffers and threads of its own")


# -- precision, training -----------------------------------------------------------------------------------------------


def train_low(rank: int, name: str) -> tuple[list[Tensor], float]:
    """Two clipped steps in bfloat16: the table on this rank behind them, each object of it, and the last norm."""
    del rank
    schedule, mesh = schedule_of(name, 2, MICROBATCHES), make_mesh(2)
    stages = [stage.bfloat16() for stage in apart(tied_stages(2))]
    pipe = pipeline(schedule, stages, mesh, tied=tied_names(2), deadline_s=PATIENT_S)
    params = [param for stage in pipe.stages.values() for param in stage.module.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.5)
    for seed in range(2):
        optimizer.zero_grad()
        pipe.step(*make_batch(MICROBATCHES, seed=seed))
        norm = pipe.grad_norm()
        clip_grads_with_norm_(params, 0.1, norm)
        optimizer.step()
    pipe.close()
    return [param.detach().clone() for param in params if param.shape == (VOCAB, SIZE)], float(norm)


@pytest.mark.parametrize("name", ["1f1b", "dualpipe"])
def test_tied_tables_in_bfloat16_stay_equal_and_near_one_process(name: str) -> None:
    stages = [stage.float() for stage in tied_stages(2)]
    with torch.no_grad():
        for param in nn.Sequential(*stages).parameters():
            param.copy_(param.bfloat16())
    params = list(nn.Sequential(*stages).parameters())
    optimizer = torch.optim.SGD(params, lr=0.5)
    for seed in range(2):
        optimizer.zero_grad()
        run_whole(stages, cut([make_batch(MICROBATCHES, seed=seed)], MICROBATCHES), mean_loss)
        norm = torch.nn.utils.clip_grad_norm_(params, 0.1)
        optimizer.step()
    ranks = check(run_ranks(2, train_low, name))
    tables = [table for ran in ranks for table in ran[0]]
    assert len(tables) == (2 if name == "1f1b" else 4)
    assert all(torch.equal(table, tables[0]) for table in tables)
    assert float((tables[0] - params[0].detach()).abs().max()) < 0.02
    assert ranks[0][1] == ranks[1][1] == pytest.approx(float(norm), rel=0.05)


# -- layers ------------------------------------------------------------------------------------------------------------

ENDS = {"ends": {0: "0.weight", -1: "1.weight"}}
"""The linears before the layers of the first stage, and behind those of the last."""


def tied_model(case: Case) -> list[nn.Sequential]:
    model = whole_model(case)
    model[-1][-1].weight = model[0][0].weight
    return model


def layered_cases(name: str) -> list[Case]:
    """A pipe of four, or two replicas: 1f1b has both, and the others one of them in turn."""
    lanes = {"1f1b": "thread", "zb-v": "serial"}.get(name, "virtual")
    both = [Case(name, pp=4, lanes="virtual", layers=1), Case(name, pp=2, dp=2, lanes=lanes, layers=1)]
    return both if name == "1f1b" else [both[SCHEDULES.index(name) % 2]]


def layered_rank(rank: int, name: str) -> list[tuple[float, dict[tuple[int, str], Tensor], dict[str, Any]]]:
    results = []
    for case in layered_cases(name):
        first = rank < case.dp * case.ep  # what one rank says counts for all
        results.append(one_rank(rank, case, tied_model, ENDS if first else None))
    return results


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_tied_stages_of_moe_layers_have_the_gradients_of_one_process(name: str) -> None:
    ranks = check(run_ranks(8, layered_rank, name))
    for at, case in enumerate(layered_cases(name)):
        loss, stages = one_process(case, tied_model)
        wanted: Grads = {
            f"{stage}.{param}": grad for stage, grads in enumerate(stages) for param, grad in grads.items()
        }
        once = {id(grad): grad for grad in wanted.values() if grad is not None}
        for rank_loss, found, about in (ran[at] for ran in ranks):
            hold([(rank_loss, {f"{stage}.{param}": grad for (stage, param), grad in found.items()})], (loss, wanted))
            assert about["norm"] == pytest.approx(float(get_total_norm(list(once.values()))), rel=1e-10)
            assert "REDUCE_TIED" in about["kinds"]
            assert about["in order"]


def mtp_model() -> list[nn.Sequential]:
    """Embedding, the two ends of an MTP block, and head: one table."""
    torch.manual_seed(6)
    embed, layers, block, head = nn.Embedding(TOKENS, 6), (Quiet(), Quiet()), Next(), nn.Linear(6, TOKENS)
    block.table.weight = block.out.weight = head.weight = embed.weight
    return [nn.Sequential(embed, layers[0]).double(), nn.Sequential(layers[1], block, head).double()]


def mtp_rank(rank: int) -> list[tuple[float, Grads]]:
    del rank
    results, mesh, (x, target) = [], make_mesh(2), tokens()
    for name in ("1f1b", "dualpipe"):
        schedule, stages = schedule_of(name, 2, 4), apart(mtp_model())
        tied = {"table": {0: "0.weight", -1: "2.weight"}}
        more: dict[str, Any] = {"tied": tied, "recompute": ("attn", "mlp"), "deadline_s": PATIENT_S}
        pipe = pipeline(schedule, stages, mesh, nn.functional.cross_entropy, **more)
        results.append((float(pipe.step(list(x), list(target))), own_grads(schedule, mesh, stages)))
        pipe.close()
    return results


def test_an_mtp_block_shares_the_table_of_embedding_and_head() -> None:
    stages, total = mtp_model(), 0.0
    (embed, lower), (upper, block, head) = stages
    for x, target in zip(*tokens(), strict=True):
        h = embed(x)
        for segment in (*cast(Quiet, lower).segments(), *cast(Quiet, upper).segments()):
            h = segment.run(h)
        share = (nn.functional.cross_entropy(head(h), target) + 0.25 * block(h, target)[1]) / 4
        torch.autograd.backward(share)
        total += float(share.detach())
    for ran in check(run_ranks(2, mtp_rank)):
        hold(ran, (total, grads_of(dict(enumerate(stages)))))


# -- what is refused ---------------------------------------------------------------------------------------------------


TABLE = {0: "table.weight", 1: "linear.weight"}

REFUSED: list[tuple[Any, str, str]] = [
    ({"t": {0: "table.weight", 2: "x"}}, "", "the tie 't' names stage 2; stages are 0 to 1, or -1 to -2"),
    (
        {"t": {0: "table.weight", 1: "linear.wait"}},
        "",
        "stage 1 has no parameter linear.wait; did you mean 'line",
    ),
    ({"t": {0: "table.weight"}}, "", "the tie 't' has one stage, 0 (table.weight); a tie joins two stages or more"),
    ({"t": {}}, "", "the tie 't' names no stage"),
    ([{"t": TABLE}, {"t": {0: "linear.weight"}}], "", "the tie 't' has two names in stage 0, "),
    ({"t": TABLE, "u": TABLE}, "", "have one parameter in stage"),
    ({"t": TABLE}, "values", "they are one parameter: make both from one seed, or copy one to the other"),
    ({"t": TABLE}, "frozen", "requires_grad=False, bits "),
    ({"t": TABLE}, "shape", "shape (13, 6), torch.float64"),
    ({"t": {0: "linear.bias", 1: "linear.bias"}}, "expert", "linear.bias of stage 1 is an expert's"),
    ({"t": {0: "linear.bias", 1: "linear.weight"}}, "shared", "stage 1 shares its parameter as norm.bias; name it so"),
]
"""What is tied, by all ranks or by each; a change to the stages; what is said."""


def refused(rank: int) -> list[str]:
    said, mesh = [], make_mesh(2)
    for tied, change, _ in REFUSED:
        embed, head = apart(tied_stages(2))
        if rank == 1:
            head = changed_head(cast(Head, head), change)
        if change == "shared":
            cast(Embed, embed).linear.bias = cast(Head, head).norm.bias
        schedule = schedule_of("dualpipe" if change == "shared" else "1f1b", 2, 4)
        mine = tied[rank] if isinstance(tied, list) else tied
        said.append(refusal(partial(pipeline, schedule, [embed, head], mesh, tied=mine)))
        dist.barrier()
    return said


def changed_head(head: Head, change: str) -> nn.Module:
    if change == "values":
        head.linear.weight.data[3, 2] += 1e-12
    if change == "frozen":
        head.linear.weight.requires_grad_(False)
    if change == "expert":
        head.linear = OwnedLinear(SIZE, VOCAB).double()
    return Head(6).double() if change == "shape" else head


class OwnedLinear(RankOwned, nn.Linear):
    """A linear that belongs to one rank of an expert group."""


def test_ties_that_do_not_fit_are_refused_on_all_ranks() -> None:
    for said in check(run_ranks(2, refused)):
        for found, (_, _, wanted) in zip(said, REFUSED, strict=True):
            assert wanted in found


def ask_for_norm(rank: int) -> tuple[str, str]:
    schedule, mesh = schedule_of("1f1b", 2, 4), make_mesh(2)
    pipe = pipeline(schedule, apart(tied_stages(2)), mesh, tied=tied_names(2))
    take_step(pipe, *make_batch(4), reduce=False)
    of_share = refusal(pipe.grad_norm)
    pipe.step(*make_batch(4))
    return of_share, refusal(lambda: pipe.grad_norm(0))


def test_norms_of_shares_and_of_no_power_are_refused() -> None:
    for of_share, of_nothing in check(run_ranks(2, ask_for_norm)):
        assert "each rank its share (no_sync()); ask after a step that reduces" in of_share
        assert "norm_type is more than 0, math.inf for the largest element, got 0" in of_nothing


def lose_a_rank(rank: int, directory: Path) -> tuple[int, str | None]:
    Faults(directory).kill(rank=3, before="reduce_tied .0", step=1).arm(rank)
    schedule, mesh = schedule_of("1f1b", 2, 4), make_mesh(2, 2)
    pipe = pipeline(schedule, apart(tied_stages(2)), mesh, tied=tied_names(2), deadline_s=PATIENT_S)
    pipe.step(*make_batch(4))
    with pytest.raises(treadle.RankLostError) as lost:
        pipe.step(*make_batch(4))
    return lost.value.rank, lost.value.op


def test_a_rank_lost_in_the_reduction_of_a_tie_is_named_by_all(tmp_path: Path) -> None:
    *others, killed = run_ranks(4, lose_a_rank, tmp_path)  # rank 0 shares neither its pipe nor its replicas with rank 3
    assert killed.exitcode == -signal.SIGKILL
    assert check(others) == [(3, "reduce_tied .0")] * 3
