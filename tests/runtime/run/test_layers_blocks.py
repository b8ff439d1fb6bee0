"""Stages of blocks: dense beside MoE layers, an MTP block, segments that are computed again; against one process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import treadle
from tests.support.devices import drawn
from tests.support.fuzz import Life, Runner, off_by, same_bits
from tests.support.fuzz_models import MOST_DIFFERENCE, Config, Grads, make_model, run_whole
from tests.support.oracle import make_mesh
from tests.support.patience import PATIENT_S
from tests.support.ranks import check, run_ranks
from treadle.costs import UNIT_COSTS
from treadle.ir.ops import COMMUNICATION, LaneKind, OpKind
from treadle.lowering.running import lower_weaving
from treadle.runtime.handshake import Handshake, RankStages, _refuse_mixed
from treadle.runtime.model.segments import Segment, compute
from treadle.runtime.model.stage_blocks import blocks_of
from treadle.runtime.pipeline_options import RunOptions
from treadle.runtime.step_plan import shape_of
from treadle.schedules import SCHEDULES

BOTH = "attn+mlp"
BLOCKS = ("1f1b", "interleaved-overlap", "dualpipe", "dualpipev", "zb-v")
COMPUTES = {kind for kind in OpKind if kind.lane is LaneKind.COMPUTE}


def config_of(name: str, *, ep: int = 2, pp: int = 2) -> Config:
    return Config(
        schedule=name,
        kind="layers",
        dtype="float64",
        num_mb=4 if pp == 2 else 8,
        num_classes=16,
        num_layers=2 if name == "1f1b" else 1,
        dropout=True,
        aux="none" if name == "dualpipe" else "own",
        layered=True,
        ep=ep,
        mtp=True,
        dense=True,
        pp=pp,
    )


AGAIN = ("attn", "mlp", BOTH)


def variants(config: Config) -> list[Config]:
    """The same pipeline, with segments that are computed again: some, the next schedule others, and all, offloaded."""
    some = AGAIN[list(SCHEDULES).index(config.schedule) % len(AGAIN)]
    return [config, replace(config, recompute=some), replace(config, recompute=BOTH, kind="offload")]


def test_every_segment_is_computed_again_alone_and_with_the_other() -> None:
    drawn = {config.recompute for name in BLOCKS for config in variants(config_of(name))[1:2]}
    assert drawn == set(AGAIN)


@dataclass(frozen=True)
class Ran:
    loss: float
    grads: Grads
    by_name: dict[str, float]
    lanes: dict[OpKind, set[LaneKind]]
    head_ns: list[int]


def run_all(rank: int, configs: list[Config]) -> list[Ran]:
    return [run_one(rank, config) for config in configs]


def run_one(rank: int, config: Config) -> Ran:
    runner = Runner(Life(0, 0, config, 1, PATIENT_S, stop=False), rank, "thread")
    loss, grads = runner.step(0)
    assert runner.pipe.report is not None
    trace = runner.pipe.gather_trace()
    program, lanes = trace.program, dict[OpKind, set[LaneKind]]()
    for kind, lane in zip(program.kind.tolist(), program.lane_kind[program.lane_of].tolist(), strict=True):
        lanes.setdefault(OpKind(kind), set()).add(LaneKind(lane))
    heads = (trace.end - trace.start)[program.kind == OpKind.HEAD_F].tolist()
    by_name = {name: float(loss) for name, loss in runner.pipe.report.by_name.items()}
    runner.pipe.close()
    return Ran(loss, grads, by_name, lanes, heads)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [*map(config_of, BLOCKS), config_of("interleaved-overlap", ep=1, pp=4), config_of("zb-v", ep=1, pp=4)],
    ids=str,
)
def test_gradients_of_one_process_and_the_same_bits_when_computed_again(config: Config) -> None:
    every = variants(config)
    ranks = check(run_ranks(config.world, run_all, every))
    loss, wanted, sizes = run_whole(config, make_model(config), 0, 0)
    for ran in ranks:
        plain, *others = ran
        assert plain.loss == pytest.approx(loss, rel=1e-10)
        off = {name: off_by(grad, wanted[name], sizes[name]) for name, grad in plain.grads.items()}
        assert max(off.values()) <= MOST_DIFFERENCE["float64"], off
        assert set(plain.by_name) == {"main", "mtp_0", *(["aux_loss"] if config.aux != "none" else [])}
        if config.aux == "none":
            assert plain.loss == pytest.approx(plain.by_name["main"] + 0.3 * plain.by_name["mtp_0"], rel=1e-12)
        for other, its in zip(others, every[1:], strict=True):
            assert other.loss == plain.loss
            assert other.by_name == plain.by_name
            differ = [name for name, grad in other.grads.items() if not same_bits(grad, plain.grads[name])]
            assert differ == [], str(its)
            again = {OpKind.ATTN_R: "attn", OpKind.MLP_R: "mlp"}
            assert {again[kind] for kind in other.lanes if kind in again} == set(its.recompute.split("+"))
            assert {OpKind.MTP_F, OpKind.MTP_B, OpKind.MTP_W, OpKind.HEAD_F, OpKind.EMBED_F} <= set(other.lanes)
        for each in ran:
            assert all(each.lanes[kind] == {LaneKind.COMPUTE} for kind in COMPUTES & set(each.lanes))
            assert len(each.head_ns) == config.num_mb
            assert min(each.head_ns) > 0


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_compute_op_is_on_a_communication_lane(name: str) -> None:
    schedule = treadle.generate(name, pp=2, microbatches=4)
    num = schedule.placement.num_stages
    rows = ("Edt", *("tt" for _ in range(num - 2)), "tmL")
    options = treadle.LoweringOptions(blocks=rows, by_layer=True, offload=True, recompute=("attn", "mlp"), moe=True)
    program = lower_weaving(schedule, UNIT_COSTS, options, reduce=True)
    lanes = program.lane_kind[program.lane_of]
    for kind in map(OpKind, set(program.kind.tolist())):
        found = set(lanes[program.kind == kind].tolist())
        assert found == {kind.lane}
        assert kind not in COMPUTES or not found & set(COMMUNICATION)
    assert {OpKind.HEAD_F, OpKind.MTP_F, OpKind.ATTN_R, OpKind.MLP_R} <= set(map(OpKind, program.kind.tolist()))


# -- without a seed ----------------------------------------------------------------------------------------------------


class Dense(nn.Module):
    """A dense layer that draws in both segments."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.up, self.drop = nn.Linear(6, 6), nn.Linear(6, 6), nn.Dropout(0.4)

    def segments(self) -> list[Segment]:
        return [
            compute("attn", lambda x: x + self.drop(self.mix(x)), reads="x", writes="h"),
            compute("mlp", lambda h: h + self.drop(torch.tanh(self.up(h))), reads="h", writes="x"),
        ]


def unseeded(rank: int) -> list[tuple[float, list[Tensor | None], Tensor]]:
    results = []
    x = drawn(torch.randn, 4, 5, 6, generator=torch.Generator().manual_seed(3))
    for again in ((), ("attn",), ("attn", "mlp")):
        torch.manual_seed(1)
        stage, schedule = nn.Sequential(Dense(), Dense()), treadle.generate("zb-h1", pp=2, microbatches=4)
        pipe = treadle.Pipeline(
            {0: stage},
            schedule,
            mesh=make_mesh(2),
            loss_fn=functional.mse_loss,
            deadline_s=PATIENT_S,
            seed=None,
            recompute=again,
        )
        torch.manual_seed(8)
        loss = float(pipe.step(list(x), list(x)))
        results.append((loss, [p.grad for p in stage.parameters()], torch.get_rng_state()))
        pipe.close()
    return results


@pytest.mark.slow
def test_without_a_seed_the_same_numbers_are_drawn_again() -> None:
    for plain, *others in check(run_ranks(2, unseeded)):
        for loss, grads, state in others:
            assert loss == plain[0]
            assert all(same_bits(a, b) for a, b in zip(grads, plain[1], strict=True))
            assert torch.equal(state, plain[2])


# -- an MTP block on a stage of its own --------------------------------------------------------------------------------

VOCAB = 12


class Next(treadle.runtime.MTPBlock):
    """Predicts the next token but one."""

    def __init__(self) -> None:
        super().__init__(loss_weight=0.25)
        self.table, self.mix, self.out = nn.Embedding(VOCAB, 6), nn.Linear(12, 6), nn.Linear(6, VOCAB)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.mix(torch.cat([x, self.table(target)], -1)))
        return hidden, functional.cross_entropy(self.out(hidden[:-1]), target[1:])


class Quiet(Dense):
    """Draws nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.drop.p = 0.0


def apart() -> list[nn.Sequential]:
    torch.manual_seed(6)
    stages: list[list[nn.Module]] = [
        [nn.Embedding(VOCAB, 6), Quiet()],
        [Next(), Next()],
        [nn.LayerNorm(6), nn.Linear(6, VOCAB)],
    ]
    return [nn.Sequential(*stage).double() for stage in stages]


def tokens() -> tuple[Tensor, Tensor]:
    made = drawn(torch.randint, VOCAB, (2, 4, 5), generator=torch.Generator().manual_seed(2))
    return made[0], made[1]


def apart_rank(rank: int) -> Any:
    stage, schedule = apart()[rank], treadle.generate("1f1b", pp=3, microbatches=4)
    loss_fn = functional.cross_entropy
    pipe = treadle.Pipeline({0: stage}, schedule, mesh=make_mesh(3), loss_fn=loss_fn, deadline_s=PATIENT_S)
    x, target = tokens()
    losses = [float(pipe.step(list(x), list(target))), float(pipe.evaluate(list(x), list(target)))]
    assert pipe.report is not None
    by_name = {name: float(loss) for name, loss in pipe.report.by_name.items()}
    said = ""
    try:
        pipe.step(list(x), list(target) if rank != 1 else None)
    except (ValueError, treadle.RankLostError) as error:
        said = str(error)
    pipe.close()
    return losses, by_name, [p.grad for p in stage.parameters()], pipe.program.layout.blocks, said


def test_two_mtp_blocks_on_a_stage_of_their_own() -> None:
    stages, (x, target) = apart(), tokens()
    first, (one, two), head = stages
    sums = {"main": 0.0, "mtp_0": 0.0, "mtp_1": 0.0}
    total = 0.0
    for tokens_in, wanted in zip(x, target, strict=True):
        h = first[0](tokens_in)
        for segment in first[1].segments():  # type: ignore[operator]
            h = segment.run(h)
        hidden, early = one(h, wanted)
        _, late = two(hidden, wanted)
        main = functional.cross_entropy(head(h), wanted)
        share = (main + 0.25 * early + 0.25 * late) / 4
        torch.autograd.backward(share)
        total += float(share.detach())
        for name, loss in zip(sums, (main, early, late), strict=True):
            sums[name] += float(loss.detach()) / 4
    for rank, (losses, by_name, grads, blocks, said) in enumerate(check(run_ranks(3, apart_rank))):
        assert losses == pytest.approx([total, total], rel=1e-12)
        assert by_name == pytest.approx(sums, rel=1e-12)
        assert blocks == ("Et", "mm", "L")
        for grad, param in zip(grads, stages[rank].parameters(), strict=True):
            assert param.grad is not None
            assert torch.allclose(grad, param.grad, rtol=1e-10, atol=1e-14)
        assert "stage 1 has an MTP block (Next), which predicts from targets, got NoneType" in said


# -- further losses of plain stages ------------------------------------------------------------------------------------


class Sparse(nn.Linear):
    """A plain stage with a further loss."""

    def forward(self, x: Tensor) -> treadle.StageOutput:  # type: ignore[override]
        out = torch.tanh(super().forward(x))
        return treadle.StageOutput(out, further=(treadle.runtime.FurtherLoss("l1", out.abs().mean(), 0.1),))


def two_losses(out: treadle.StageOutput | Tensor, target: Tensor) -> treadle.StageOutput:
    assert isinstance(out, Tensor)
    more = treadle.runtime.FurtherLoss("z", out.logsumexp(-1).square().mean(), 0.01)
    return treadle.StageOutput(functional.mse_loss(out, target), further=(more,))


def plain_rank(rank: int) -> Any:
    torch.manual_seed(rank)
    stage, schedule = Sparse(6, 6).double(), treadle.generate("1f1b", pp=2, microbatches=2)
    pipe = treadle.Pipeline({0: stage}, schedule, mesh=make_mesh(2), loss_fn=two_losses, deadline_s=PATIENT_S)
    x = drawn(torch.randn, 2, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    loss = float(pipe.step(list(x), list(x)))
    assert pipe.report is not None
    told = {name: float(loss) for name, loss in pipe.report.by_name.items()}
    grads = [p.grad for p in stage.parameters()]
    evaluated = float(pipe.evaluate(list(x), list(x)))
    again = {name: float(loss) for name, loss in pipe.report.by_name.items()}
    pipe.close()
    assert again == told
    assert evaluated == loss
    return loss, told, grads


def test_plain_stages_and_loss_fn_have_further_losses() -> None:
    stages = []
    for rank in range(2):
        torch.manual_seed(rank)
        stages.append(Sparse(6, 6).double())
    x = drawn(torch.randn, 2, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    total, sums = 0.0, dict.fromkeys(("l1", "main", "z"), 0.0)
    for part in x:
        h, l1 = part, torch.zeros((), dtype=torch.float64)
        for stage in stages:
            made = stage(h)
            h, l1 = made.output, l1 + made.further[0].loss
        main, _, (z,) = two_losses(h, part)
        share = (main + 0.1 * l1 + 0.01 * z.loss) / 2
        torch.autograd.backward(share)
        total += float(share.detach())
        for name, loss in (("l1", l1), ("main", main), ("z", z.loss)):
            sums[name] += float(loss.detach()) / 2
    for stage, (loss, told, grads) in zip(stages, check(run_ranks(2, plain_rank)), strict=True):
        assert loss == pytest.approx(total, rel=1e-12)
        assert told == pytest.approx(sums, rel=1e-12)
        for grad, param in zip(grads, stage.parameters(), strict=True):
            assert param.grad is not None
            assert torch.allclose(grad, param.grad, rtol=1e-10, atol=1e-14)


# -- what is refused, in one process -----------------------------------------------------------------------------------


def test_the_letters_of_a_stage() -> None:
    layer, moe, plain = Dense(), treadle.moe.MoELayer(6, 6, 2), nn.Linear(6, 6)
    assert blocks_of(nn.Sequential(plain, layer, moe), 0, 2) == "Edt"
    assert blocks_of(nn.Sequential(moe, Next(), Next(), plain), 3, 4) == "tmmL"
    assert blocks_of(Next(), 1, 3) == "m"
    assert blocks_of(plain, 0, 2) == "E"
    assert blocks_of(plain, 1, 2) == "L"
    assert blocks_of(layer, 1, 2) == "dL"
    with pytest.raises(ValueError, match="stage 1 has Next, an MTP block, before its last layer"):
        blocks_of(nn.Sequential(Next(), layer), 1, 2)
    with pytest.raises(ValueError, match=r"plain modules \(Linear\) between layers .* or between these and its MTP"):
        blocks_of(nn.Sequential(layer, plain, Next()), 1, 2)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (["t", "mt", "mL"], "stages 1, 2 have MTP blocks; all of a model's stand on one stage"),
        (["tm", "t", "L"], "stage 0 has MTP blocks, and stage 1 after it has layers"),
        (["t", "", "tL"], "stage 1 has none; only the first stage"),
    ],
)
def test_blocks_that_are_no_model_are_refused(rows: list[str], said: str) -> None:
    ranks = [RankStages([True], [1], [bool(set(row) & {*"dtm"})], [row], [], []) for row in rows]
    schedule = treadle.generate("1f1b", pp=3, microbatches=3)
    with pytest.raises(ValueError, match=said):
        _refuse_mixed(ranks, schedule.placement)


@pytest.mark.parametrize("given", [("attn", "attn"), ("dispatch",), "attn"])
def test_what_cannot_be_computed_again_is_refused(given: Any) -> None:
    schedule = treadle.generate("1f1b", pp=2, microbatches=2)
    met = Handshake({}, {}, {}, layered=True, segments=(), side=frozenset())
    with pytest.raises(ValueError, match="recompute is a tuple of some of attn and mlp"):
        shape_of(met, schedule, RunOptions(recompute=given))
    with pytest.raises(ValueError, match=r"recompute=\('attn',\) works layer by layer"):
        shape_of(replace(met, layered=False), schedule, RunOptions(recompute=("attn",)))
