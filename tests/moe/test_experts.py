"""Experts as one grouped multiplication a projection, against a loop over linears."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.nn import functional

from counted.kernels import CalledKernels
from treadle.moe import Experts, Router
from treadle.moe import router as router_module
from treadle.runtime.model import grouped_mm, weight_grad
from treadle.runtime.model.gradient_bucket import OuterProduct
from treadle.runtime.model.grouped_linear import GroupedLinear
from treadle.runtime.model.grouped_mm import RowGroups
from treadle.runtime.model.weight_grad import WeightGradQueue

WIDTH, HIDDEN, NUM = 16, 24, 4
ARRIVING = {
    "one rank": [[3, 1, 0, 5]],
    "ranks": [[3, 0, 2, 1], [0, 0, 4, 7], [1, 0, 0, 2]],
    "first and last empty": [[0, 2, 3, 0], [0, 1, 0, 0]],
    "one expert": [[0, 0, 6, 0], [0, 0, 5, 0]],
    "no rows": [[0, 0, 0, 0], [0, 0, 0, 0]],
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.02}


class Loop(nn.Module):
    """The same experts, one linear after the other."""

    def __init__(self, width: int, hidden: int, num: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, 2 * hidden, bias=False) for _ in range(num))
        self.down = nn.ModuleList(nn.Linear(hidden, width, bias=False) for _ in range(num))

    def forward(self, rows: Tensor, arriving: list[list[int]]) -> Tensor:
        pieces = list(torch.split(rows, [size for of_rank in arriving for size in of_rank]))
        num, made = len(self.up), list(pieces)
        for expert in range(num):
            for at in range(expert, len(pieces), num):
                gate, value = self.up[expert](pieces[at]).chunk(2, dim=-1)
                made[at] = self.down[expert](functional.silu(gate) * value)
        return torch.cat(made)


def pair(dtype: torch.dtype = torch.float32, width: int = WIDTH, hidden: int = HIDDEN) -> tuple[Experts, Loop]:
    torch.manual_seed(1)
    experts = Experts(width, hidden, NUM).to(dtype)
    torch.manual_seed(1)
    return experts, Loop(width, hidden, NUM).to(dtype)


def rows_for(arriving: list[list[int]], dtype: torch.dtype, width: int = WIDTH) -> Tensor:
    torch.manual_seed(2)
    return torch.randn(sum(map(sum, arriving)), width, dtype=dtype).requires_grad_()


def close(got: Tensor | None, want: Tensor | None, dtype: torch.dtype) -> bool:
    assert got is not None
    assert want is not None
    assert got.dtype is want.dtype
    assert got.shape == want.shape
    if not want.numel():
        return True
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).abs().max()) <= TOLERANCE[dtype] * max(float(want.abs().max()), 1e-9)


def same_as_loop(experts: Experts, loop: Loop, arriving: list[list[int]], dtype: torch.dtype) -> None:
    """Compares a forward and a whole backward."""
    width = experts.up.weight.shape[-1]
    rows, twin = rows_for(arriving, dtype, width), rows_for(arriving, dtype, width)
    made, wanted = experts(rows, arriving), loop(twin, arriving)
    assert close(made, wanted, dtype)
    grad = torch.randn_like(made)
    torch.autograd.backward(made, grad)
    torch.autograd.backward(wanted, grad)
    assert close(rows.grad, twin.grad, dtype)
    same_weight_grads(experts, loop, dtype)


def same_weight_grads(experts: Experts, loop: Loop, dtype: torch.dtype) -> None:
    for name in ("up", "down"):
        mine: GroupedLinear = getattr(experts, name)
        for number, linear in enumerate(getattr(loop, name)):
            assert mine.weight.grad is not None
            assert close(mine.weight.grad[number], linear.weight.grad, dtype), (name, number)


@pytest.mark.parametrize("arriving", ARRIVING.values(), ids=ARRIVING)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_experts_are_the_loop(dtype: torch.dtype, arriving: list[list[int]]) -> None:
    same_as_loop(*pair(dtype), arriving, dtype)


def test_experts_of_sizes_that_torch_does_not_take_are_the_loop() -> None:
    dtype = torch.float32
    same_as_loop(*pair(dtype, width=7, hidden=5), ARRIVING["ranks"], dtype)


def test_experts_without_torchs_kernel_are_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.float32
    monkeypatch.setattr(grouped_mm, "_types", lambda device: ())
    same_as_loop(*pair(dtype), ARRIVING["ranks"], dtype)


@pytest.mark.parametrize("arriving", ARRIVING.values(), ids=ARRIVING)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_weight_gradients_run_apart(dtype: torch.dtype, arriving: list[list[int]]) -> None:
    experts, loop = pair(dtype)
    queue, split = WeightGradQueue(), weight_grad.examine(experts)
    assert (split.possible, split.num_deferred, split.num_params) == (True, 2, 2)
    weight_grad.apply(split.linears, queue)
    rows, twin = rows_for(arriving, dtype), rows_for(arriving, dtype)
    queue.open()
    torch.autograd.backward(experts(rows, arriving).sum())
    halves = queue.close()
    torch.autograd.backward(loop(twin, arriving).sum())
    assert close(rows.grad, twin.grad, dtype)
    assert experts.up.weight.grad is experts.down.weight.grad is None
    assert [(half.x.shape[-1], half.grad.shape[-1]) for half in halves] == [(HIDDEN, WIDTH), (WIDTH, 2 * HIDDEN)]

    def add(param: Tensor, grad: Tensor | OuterProduct) -> None:
        assert isinstance(grad, Tensor)
        param.grad = grad

    for half in halves:
        assert not half.x.requires_grad
        half.run(add)
    same_weight_grads(experts, loop, dtype)
    weight_grad.restore(experts)
    queue.open()
    torch.autograd.backward(experts(rows_for(arriving, dtype), arriving).sum())
    assert queue.close() == []


def test_a_hook_on_a_weight_is_told_in_the_backward() -> None:
    experts, _ = pair()
    queue = WeightGradQueue()
    weight_grad.apply(weight_grad.examine(experts).linears, queue)
    told: list[torch.Size] = []
    experts.up.weight.register_hook(lambda grad: told.append(grad.shape))  # type: ignore[no-untyped-call]
    queue.open()
    torch.autograd.backward(experts(rows_for(ARRIVING["ranks"], torch.float32), ARRIVING["ranks"]).sum())
    assert len(queue.close()) == 1
    assert told == [experts.up.weight.shape]
    assert experts.up not in weight_grad.examine(experts).linears


def test_a_frozen_projection_defers_nothing() -> None:
    experts, _ = pair()
    experts.down.weight.requires_grad_(False)
    queue = WeightGradQueue()
    weight_grad.apply(weight_grad.examine(experts).linears, queue)
    queue.open()
    torch.autograd.backward(experts(rows_for(ARRIVING["ranks"], torch.float32), ARRIVING["ranks"]).sum())
    assert len(queue.close()) == 1


def test_second_derivatives_go_through() -> None:
    linear, groups = GroupedLinear(2, 4, 8).double(), RowGroups([2, 1])
    rows = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x, w: _run(linear, x, w, groups).square(), (rows, linear.weight))


def _run(linear: GroupedLinear, rows: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
    made: Tensor = torch.func.functional_call(linear, {"weight": weight}, (rows, groups))
    return made


@pytest.mark.parametrize("assign", [False, True])
def test_checkpoints_of_the_loop_go_both_ways(assign: bool) -> None:
    experts, loop = pair()
    torch.manual_seed(7)
    other = Loop(WIDTH, HIDDEN, NUM)
    assert list(experts.state_dict()) == list(loop.state_dict())
    assert all(torch.equal(experts.state_dict()[name], value) for name, value in loop.state_dict().items())
    experts.load_state_dict(other.state_dict(), assign=assign)
    loop.load_state_dict(experts.state_dict())
    assert torch.equal(experts.up.weight[2], other.state_dict()["up.2.weight"])
    assert all(torch.equal(a, b) for a, b in zip(loop.parameters(), other.parameters(), strict=True))
    assert experts.up.weight.requires_grad
    assert dict(experts.named_parameters()).keys() == {"up.weight", "down.weight"}


def test_torchs_distributed_checkpoints_find_each_expert() -> None:
    """They follow a name of the state dict through the modules."""
    experts, loop = pair()
    torch.manual_seed(7)
    state: dict[str, Any] = get_model_state_dict(Loop(WIDTH, HIDDEN, NUM))
    set_model_state_dict(experts, state)
    got: dict[str, Any] = get_model_state_dict(experts)
    assert list(got) == list(loop.state_dict())
    assert all(torch.equal(got[name], value) for name, value in state.items())


def test_experts_load_onto_the_meta_device() -> None:
    with torch.device("meta"):
        experts = Experts(WIDTH, HIDDEN, NUM)
    _, loop = pair()
    experts.load_state_dict(loop.state_dict(), assign=True)
    assert torch.equal(experts.down.weight[3], loop.state_dict()["down.3.weight"])


def without(state: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name != key}


def test_checkpoints_that_do_not_fit_are_refused_by_name() -> None:
    experts, loop = pair()
    state: dict[str, Any] = loop.state_dict()
    with pytest.raises(RuntimeError, match=r'Missing key.*"up\.2\.weight"'):
        experts.load_state_dict(without(state, "up.2.weight"))
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"up\.4\.weight"'):
        experts.load_state_dict({**state, "up.4.weight": state["up.0.weight"]})
    with pytest.raises(RuntimeError, match=r"size mismatch for down\.1\.weight: the checkpoint has \(2, 3\)"):
        experts.load_state_dict({**state, "down.1.weight": torch.zeros(2, 3)})
    found = experts.load_state_dict(without(state, "up.2.weight"), strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["up.2.weight"], [])


def test_autocast_lowers_experts_as_it_lowers_linears() -> None:
    experts, loop = pair()
    rows, arriving = rows_for(ARRIVING["ranks"], torch.float32), ARRIVING["ranks"]
    with torch.autocast("cpu", torch.bfloat16):
        made, wanted = experts(rows, arriving), loop(rows, arriving)
    assert close(made, wanted, torch.bfloat16)
    torch.autograd.backward(made.sum())
    assert experts.up.weight.grad is not None
    assert experts.up.weight.grad.dtype is torch.float32


def test_rows_that_do_not_fit_are_refused() -> None:
    linear = GroupedLinear(2, 4, 8)
    with pytest.raises(ValueError, match=r"rows of shape \(3, 4\) do not fit 2 groups of 4 rows in all, for 2 linears"):
        linear(torch.zeros(3, 4), RowGroups([2, 2]))
    with pytest.raises(ValueError, match="0 for no rows"):
        linear(torch.zeros(3, 4), RowGroups([3]))
    with pytest.raises(ValueError, match=r"rows of torch\.float64 do not fit a weight of torch\.float32"):
        linear(torch.zeros(3, 4, dtype=torch.float64), RowGroups([2, 1]))


def test_choices_are_counted_without_bincount(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.bincount` makes the host wait on a GPU."""
    numbers = [random.Random(3).randrange(5) for _ in range(1000)]
    counts = router_module._counted(torch.tensor(numbers), 7)
    assert counts.dtype is torch.int64
    assert counts.tolist() == [numbers.count(expert) for expert in range(7)]
    assert router_module._counted(torch.zeros(0, dtype=torch.int64), 3).tolist() == [0, 0, 0]
    monkeypatch.setattr(torch, "bincount", None)
    _, routing, _ = Router(WIDTH, 6, top_k=2)(torch.randn(10, WIDTH))
    assert int(routing.counts.sum()) == 20


def test_a_step_under_autocast_converts_weights_once_and_follows_their_updates() -> None:
    experts, queue, groups = Experts(WIDTH, HIDDEN, NUM), WeightGradQueue(), RowGroups([3, 1, 0, 5])
    linear = experts.up
    linear.defer_to(queue)

    def run() -> tuple[Tensor, Tensor]:
        rows = rows_for([[3, 1, 0, 5]], torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16):
            made = linear(rows, groups)
        queue.open()
        (dx,) = torch.autograd.grad(made, rows, torch.ones_like(made))
        queue.close()
        return made.detach(), dx

    with CalledKernels() as called:
        first = run()
        run()
    assert called.kernels["_to_copy"] == 1
    with torch.no_grad():
        linear.weight.mul_(2)
    for got, want in zip(run(), first, strict=True):
        assert torch.equal(got, 2 * want)
    linear.weight.data = linear.weight.data / 2
    linear.forget_lower()
    for got, want in zip(run(), first, strict=True):
        assert torch.equal(got, want)
    linear.defer_to(None)


def under_one_seed(first: int) -> tuple[Experts, Tensor]:
    """The experts of a rank, and what its next parameter begins with."""
    torch.manual_seed(0)
    return Experts(WIDTH, HIDDEN, NUM, first=first), torch.rand(3)


def test_experts_of_different_ranks_differ_under_one_seed() -> None:
    made = [under_one_seed(first) for first in (0, NUM, 2 * NUM, NUM)]
    assert len({tuple(after.tolist()) for _, after in made}) == 1, "other parameters are the same on all ranks"
    for name in ("up", "down"):
        weights = [getattr(experts, name).weight for experts, _ in made]
        different = torch.cat(weights[:3]).detach().flatten(1)
        assert len({tuple(each.tolist()) for each in different}) == 3 * NUM
        assert torch.equal(weights[1], weights[3])
        assert different.std(1).max() < 1.1 * different.std(1).min()


def test_experts_follow_the_seed_on_every_rank() -> None:
    drawn = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        drawn.append(Experts(WIDTH, HIDDEN, NUM, first=NUM).up.weight)
    assert not torch.equal(*drawn)
