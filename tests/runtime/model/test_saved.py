"""What autograd saves: counted, offloaded layer by layer, and the same gradients to the last bit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import treadle
from tests.support.devices import DEVICE_TYPE
from tests.support.patience import PATIENT_S
from tests.support.ranks import check, run_ranks
from treadle.dist.streams import Accelerator
from treadle.moe import MoELayer
from treadle.runtime.checker import check_streams
from treadle.runtime.model.saved import FilePool, LiveBytes, PinnedPool, SavedReport, SavedTensors
from treadle.runtime.model.saved.pool import size_class
from treadle.runtime.model.weight_grad import WeightGrad

WIDTH, HIDDEN, EXPERTS, TOKENS, MB = 16, 24, 4, 32, 4
KEY = (0, 0, 0)


# ---- one process: the store ------------------------------------------------------------------------------------------


def saved_in(store: SavedTensors, module: nn.Module, x: Tensor) -> Tensor:
    store.begin([x])
    with store.saving(KEY, "attn"):
        out: Tensor = module(x.detach().requires_grad_())
    return out


def test_leaves_and_comes_back_bit_for_bit(tmp_path: Path) -> None:
    module, x = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8), nn.Sigmoid()), torch.randn(16, 8)
    torch.autograd.backward(module(x).sum())
    wanted = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    store = SavedTensors([module], FilePool(tmp_path))
    out = saved_in(store, module, x)
    held = store.live.live_bytes
    store.offload(KEY)
    assert held > 0
    assert store.live.live_bytes == 0
    store.onload(KEY)
    assert store.live.live_bytes == held
    torch.autograd.backward(out.sum())
    del out
    assert store.live.live_bytes == 0
    assert all(torch.equal(a, cast(Tensor, p.grad)) for a, p in zip(wanted, module.parameters(), strict=True))
    assert store.report().moved == held
    assert list(tmp_path.iterdir()) == []  # the file has no name


def test_parameters_buffers_and_the_batch_stay_where_they_are(tmp_path: Path) -> None:
    module, x = nn.Linear(8, 8, bias=False), torch.randn(1000, 8)[:4]
    store = SavedTensors([module], FilePool(tmp_path))
    out = saved_in(store, module, x)
    assert store.live.live_bytes == 0
    store.offload(KEY)
    assert store.report().moved == 0
    torch.autograd.backward(out.sum())


def test_views_of_one_storage_count_once() -> None:
    store = SavedTensors([], None)
    store.begin()
    x = torch.randn(4, 8).requires_grad_()
    with store.saving(KEY, "attn"):
        h = x * 2
        a, b = h.chunk(2, dim=1)
        out = (a * b).sum() + (h * h).sum()
    assert store.live.live_bytes == h.nbytes
    torch.autograd.backward(out)


def test_what_weight_halves_hold_counts() -> None:
    store, x = SavedTensors([], None), torch.randn(4, 8)
    store.begin()
    half = WeightGrad(x, torch.randn(4, 8), lambda x, grad, add: None, nn.Linear(8, 8), (0, 0))
    store.hold_halves(KEY, "attn", [half, half._replace(grad=torch.randn(4, 8))])
    assert store.live.live_bytes == 3 * x.nbytes
    store.drop_halves(KEY, "attn")
    assert store.live.live_bytes == 0


def test_a_change_in_place_is_refused() -> None:
    store = SavedTensors([], None)
    store.begin()
    x = torch.randn(4).requires_grad_()
    with store.saving(KEY, "attn"):
        h = x * 1
        out = (h * h).sum()
    with torch.no_grad():
        h.add_(1)
    with pytest.raises(RuntimeError, match=r"changed in place after it was saved \(shape \(4,\)"):
        torch.autograd.backward(out)


def test_what_comes_back_knows_when_it_is_written_to() -> None:
    """A deferred weight gradient asks, which holds it from its backward on."""
    store, x = SavedTensors([], None), torch.randn(4, 8)
    store.begin()
    back = store.keeping(KEY, "attn")(x[1:]).tensor()
    assert torch.equal(back, x[1:])
    version = back._version
    x.zero_()
    assert back._version != version


def test_a_buffer_that_is_written_again_is_refused() -> None:
    """Buffers stay where they are, and autograd does not check what it has given away."""
    module = nn.Module()
    module.register_buffer("place", torch.zeros(2, 4))
    store = SavedTensors([module], None)
    store.begin()
    x = torch.randn(2, 4).requires_grad_()
    with store.saving(KEY, "attn"):
        place = module.get_buffer("place").detach().copy_(x)
        out = (place * place).sum()
    module.get_buffer("place").zero_()
    with pytest.raises(RuntimeError, match=r"changed in place after it was saved \(shape \(2, 4\)"):
        torch.autograd.backward(out)


def test_a_step_that_failed_gives_its_pieces_back(tmp_path: Path) -> None:
    module, x = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)), torch.randn(16, 8)
    store = SavedTensors([module], FilePool(tmp_path))
    sizes = []
    for _ in range(50):
        out = saved_in(store, module, x)
        store.offload(KEY)
        assert store.pool is not None
        sizes.append(store.pool.size_bytes)
        del out
    assert sizes[0] == sizes[-1]


@given(st.integers(1, 1 << 40))
def test_pieces_are_at_most_an_eighth_too_large(size: int) -> None:
    assert size <= size_class(size) <= max(4096, size * 1.125)
    assert size_class(size_class(size)) == size_class(size)


def test_a_pool_uses_its_pieces_again(tmp_path: Path) -> None:
    pool = FilePool(tmp_path)
    first = pool.take(100_000)
    first.fill_(7)
    pool.give_back(first)
    again = pool.take(99_000)
    assert again.data_ptr() == first.data_ptr()
    other = pool.take(200 << 20)
    assert len(other) >= 200 << 20
    assert pool.size_bytes == (64 << 20) + len(other)


def test_pinned_memory_is_counted_as_torch_rounds_it() -> None:
    """In powers of two, by the most that is taken at once of each."""
    with check_streams() as checker:
        pool = PinnedPool(checker.recorder)
        first, second = pool.take(100_000), pool.take(120_000)
        assert (len(first), len(second)) == (100_000, 120_000)
        pool.give_back(first)
        pool.give_back(second)
        pool.take(70_000)
        assert pool.size_bytes == 2 << 17
        pool.take(200_000)
        assert pool.size_bytes == (2 << 17) + (1 << 18)


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="pinned memory needs an accelerator")
def test_pinned_memory_is_pinned() -> None:
    assert PinnedPool(Accelerator()).take(100_000).is_pinned()


# ---- real processes --------------------------------------------------------------------------------------------------


class Checkpointed(MoELayer):
    """Attention and experts are computed again in backward; exchanges are not."""

    def route(self, x: Tensor, *side: Any) -> Any:
        return checkpoint(super().route, x, *side, use_reentrant=False)

    def feed(self, *values: Any) -> Any:
        return checkpoint(super().feed, *values, use_reentrant=False)


@dataclass(frozen=True)
class Case:
    name: str
    pp: int = 2
    ep: int = 2
    microbatches: int = MB
    layers: int = 1
    checkpointed: bool = False
    steps: int = 2


def make(rank: int, case: Case, saved: Any) -> tuple[treadle.Pipeline, Tensor]:
    mesh = init_device_mesh(DEVICE_TYPE, (case.pp, 1, case.ep), mesh_dim_names=("pp", "dp", "ep"))
    schedule = treadle.generate(case.name, pp=case.pp, microbatches=case.microbatches)
    kind = Checkpointed if case.checkpointed else MoELayer
    stages = {}
    for chunk in range(schedule.vpp):
        torch.manual_seed(schedule.placement.stage(rank // case.ep, chunk))
        layers = [
            kind(WIDTH, HIDDEN, EXPERTS, ep=case.ep, ep_rank=rank % case.ep, balance=0.1) for _ in range(case.layers)
        ]
        stages[chunk] = nn.Sequential(*layers)
    torch.manual_seed(rank % case.ep)
    x = torch.randn(case.microbatches * TOKENS, WIDTH)
    loss_fn = nn.functional.mse_loss
    return treadle.Pipeline(stages, schedule, mesh=mesh, loss_fn=loss_fn, deadline_s=PATIENT_S, saved=saved), x


def gradients(rank: int, case: Case) -> tuple[bool, SavedReport, SavedReport]:
    """Are they the same to the last bit, with and without."""
    found: list[list[Tensor]] = []
    reports: list[SavedReport | None] = []
    for saved in ("leave", "count", "offload"):
        pipe, x = make(rank, case, saved)
        for _ in range(case.steps):
            pipe.step(x, x)
        found.append([cast(Tensor, p.grad) for stage in pipe.stages.values() for p in stage.module.parameters()])
        assert pipe.report is not None
        reports.append(pipe.report.saved)
        pipe.close()
    left, counted, offloaded = found
    same = all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(left, counted, offloaded, strict=True))
    nothing, of_counted, of_offloaded = reports
    assert nothing is None
    assert of_counted is not None
    assert of_offloaded is not None
    return same, of_counted, of_offloaded


CASES = [
    Case("interleaved-overlap", layers=2),
    Case("interleaved-overlap", checkpointed=True),
    Case("1f1b", pp=4, ep=1, microbatches=5),
    Case("dualpipe"),
    Case("dualpipev", checkpointed=True),
    Case("zb-h1", pp=4, ep=1, microbatches=6, layers=2),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_same_gradients_to_the_last_bit(case: Case) -> None:
    results = check(run_ranks(case.pp * case.ep, gradients, case))
    assert all(same for same, _, _ in results)
    assert max(out.moved for _, _, out in results) > 0
    assert all(counted.moved == 0 for _, counted, _ in results)


def moved(rank: int, checkpointed: bool) -> int:
    """The bytes that a step offloads."""
    pipe, x = make(rank, Case("interleaved-overlap", ep=1, checkpointed=checkpointed), "offload")
    pipe.step(x, x)
    assert pipe.report is not None
    assert pipe.report.saved is not None
    pipe.close()
    return pipe.report.saved.moved


@pytest.mark.slow
def test_checkpointing_leaves_less_to_offload() -> None:
    plain, again = (check(run_ranks(2, moved, checkpointed)) for checkpointed in (False, True))
    assert again[0] < plain[0] / 2


def counted(rank: int, saved: Any) -> tuple[int, int]:
    """(the most bytes saved at once, the simulator's), two layers a chunk.

    On lanes whose clock only counts: how it comes out does not depend on what else the machine does. With lanes that
    take their time it is measured by benchmarks/offload.py.
    """
    unit = treadle.load_costs("deepseek-v3-h800")
    schedule = treadle.generate("interleaved-overlap", pp=4, vpp=2, microbatches=8)
    mesh = init_device_mesh(DEVICE_TYPE, (4,), mesh_dim_names=("pp",))
    torch.manual_seed(0)
    stages = {c: nn.Sequential(*[MoELayer(64, 64, 2) for _ in range(2)]) for c in range(2)}
    loss_fn, x = nn.functional.mse_loss, torch.randn(8 * 64, 64)
    pipe = treadle.Pipeline(
        stages, schedule, mesh=mesh, loss_fn=loss_fn, lanes="virtual", costs=unit, saved=saved, deadline_s=120
    )
    pipe.step(x, x)
    pipe.step(x, x)
    assert pipe.report is not None
    assert pipe.report.saved is not None
    program = replace(
        pipe.program, layout=replace(pipe.program.layout, saved=pipe.report.saved.by_kind, saved_unit="bytes")
    )
    predicted = int(treadle.measure(treadle.simulate(program, unit)).peaks[rank])
    pipe.close()
    return pipe.report.saved.peak, predicted


@pytest.mark.slow
def test_the_peak_is_the_simulators() -> None:
    """interleaved-overlap, PP4, two chunks, 8 micro-batches, two layers a chunk."""
    left = check(run_ranks(4, counted, "count"))
    out = check(run_ranks(4, counted, "offload"))
    peak, predicted = max(peak for peak, _ in out), max(predicted for _, predicted in out)
    assert peak == pytest.approx(predicted, rel=0.10)
    assert peak <= 0.4 * max(peak for peak, _ in left)


def anonymous_kb() -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1])


class Watchful(LiveBytes):
    """Sees to it that what is released is still alive: its address is nobody else's."""

    def release(self, address: int, size_bytes: int) -> None:
        others = [torch.empty(size_bytes, dtype=torch.uint8) for _ in range(4)]
        assert all(other.untyped_storage()._cdata != address for other in others)
        super().release(address, size_bytes)


def many_steps(rank: int, num_steps: int) -> tuple[list[int], set[int], int]:
    """What each step but the first quarter of them leaves: memory of the process, the pool, and bytes at the end."""
    pipe, x = make(rank, Case("interleaved-overlap", ep=1), "offload")
    memory, pools = [], set()
    assert pipe._part.recipe.store is not None
    pipe._part.recipe.store.live = Watchful()
    for step in range(num_steps):
        pipe.step(x, x)
        if step >= num_steps // 4:
            memory.append(anonymous_kb())
            assert pipe.report is not None
            assert pipe.report.saved is not None
            pools.add(pipe.report.saved.pool)
    live = pipe._part.recipe.store.live.live_bytes
    pipe.close()
    return memory, pools, live


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [60, pytest.param(200, marks=pytest.mark.nightly)])
def test_nothing_grows_over_steps(num_steps: int) -> None:
    part = num_steps // 4
    for memory, pools, live in check(run_ranks(2, many_steps, num_steps, new=True)):
        assert live == 0
        assert len(pools) == 1
        assert max(memory[-part:]) - max(memory[:part]) < 512


def refused(rank: int, saved: list[Any], plain: bool) -> str:
    mesh = init_device_mesh(DEVICE_TYPE, (2,), mesh_dim_names=("pp",))
    module: nn.Module = nn.Linear(8, 8) if plain else MoELayer(8, 8, 2)
    schedule = treadle.generate("1f1b", pp=2, microbatches=4)
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the test reads it
        treadle.Pipeline({0: module}, schedule, mesh=mesh, loss_fn=nn.functional.mse_loss, saved=saved[rank])
    return str(error.value)


@pytest.mark.parametrize(
    ("saved", "plain", "message"),
    [
        (["offload"] * 2, True, "works layer by layer, and the stages' layers do not name their segments"),
        (["disk"] * 2, False, "saved is leave, count or offload, got 'disk'"),
        (["offload", "leave"], False, "differ in saved ('offload' and 'leave'); these must be the same on all ranks"),
    ],
)
def test_refused_by_name(saved: list[str], plain: bool, message: str) -> None:
    for said in check(run_ranks(2, refused, saved, plain)):
        assert message in said
