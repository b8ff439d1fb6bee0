"""What users do to parameters between two steps holds, as with torch's optimizers, or is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters

import treadle
from tests.support.cases import all_refuse, refusal, schedule_of
from tests.support.devices import drawn
from tests.support.oracle import make_mesh
from tests.support.ranks import check, close_at_end, run_ranks
from treadle.models.views import NamedView
from treadle.train.optim import OptimizerConfig, ShardedOptimizer

STEPS, LR, WORLD = 4, 1e-3, 2
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
OPTIMIZERS = ("adamw", "muon")


def model(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2, bias=False)).to(dtype)


def batch(step: int, replica: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + replica)
    x, y = drawn(torch.randn, 8, 4, generator=generator), drawn(torch.randn, 8, 2, generator=generator)
    return x.to(dtype), y.to(dtype)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).float().square().mean()


class Ours:
    """The model on a pipeline of two replicas with a ShardedOptimizer."""

    def __init__(self, dtype: torch.dtype, name: str) -> None:
        self.dtype, self.module = dtype, model(dtype)
        self.pipe = close_at_end(
            treadle.Pipeline({0: self.module}, schedule_of("1f1b", 1, 2), mesh=make_mesh(1, WORLD), loss_fn=loss_fn)
        )
        views = [NamedView(name, param) for name, param in self.module.named_parameters()]
        self.optimizer = ShardedOptimizer(self.pipe, views, config(name))

    def train(self, step: int, *, clear: bool = True) -> float:
        loss = self.pipe.step(*batch(step, dist.get_rank(), self.dtype))
        self.optimizer.step(LR)
        if clear:
            self.optimizer.zero_grad()
        return float(loss)


def config(name: str) -> OptimizerConfig:
    return OptimizerConfig(name="muon" if name == "muon" else "adamw", weight_decay=0.0, bucket_mb=0.0001)


class Torchs:
    """The same by torch's optimizers in one process."""

    def __init__(self, dtype: torch.dtype, name: str) -> None:
        self.dtype, self.module, c = dtype, model(dtype), config(name)
        params = list(self.module.parameters())
        matrices = [p for p in params if p.dim() == 2] if name == "muon" else []
        rest = [p for p in params if all(p is not m for m in matrices)]
        self.optimizers: list[Any] = [torch.optim.AdamW(rest, lr=LR, betas=c.betas, eps=c.eps, weight_decay=0.0)]
        if matrices:
            self.optimizers.append(
                torch.optim.Muon(
                    matrices,
                    lr=LR,
                    weight_decay=0.0,
                    momentum=c.momentum,
                    nesterov=c.nesterov,
                    ns_steps=c.ns_steps,
                    adjust_lr_fn=c.muon_lr,
                )
            )

    def train(self, step: int) -> float:
        losses = [loss_fn(self.module(x), y) for x, y in (batch(step, replica, self.dtype) for replica in range(WORLD))]
        loss = sum(losses, start=torch.zeros(())) / WORLD
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return float(loss.detach())


@torch.no_grad()
def load(module: nn.Module) -> None:
    module.load_state_dict({name: value + 1 for name, value in module.state_dict().items()})


@torch.no_grad()
def clamp(module: nn.Module) -> None:
    for param in module.parameters():
        param.clamp_(-0.1, 0.1)


def prune_by_data(module: nn.Module) -> None:
    for param in module.parameters():
        param.data[::2] = 0


def new_data(module: nn.Module) -> None:
    for param in module.parameters():
        param.data = param.data * 0.5


def from_vector(module: nn.Module) -> None:
    vector_to_parameters(parameters_to_vector(module.parameters()) * 0.5, module.parameters())


def swap_and_back(module: nn.Module) -> None:
    """An EMA swap for an evaluation, by `.data`, that comes back as copies."""
    kept = [param.data.clone() for param in module.parameters()]
    for param in module.parameters():
        param.data = torch.zeros_like(param)
    for param, before in zip(module.parameters(), kept, strict=True):
        param.data = before


WRITES: dict[str, Callable[[nn.Module], None]] = {
    write.__name__: write for write in (load, clamp, prune_by_data, new_data, from_vector, swap_and_back)
}


def flat(module: nn.Module) -> Tensor:
    return parameters_to_vector(module.parameters()).detach().double()


def write_between(rank: int, cases: list[tuple[str, torch.dtype, str]]) -> list[dict[str, Any]]:
    del rank
    found = []
    for write, dtype, name in cases:
        ours, losses = Ours(dtype, name), []
        for step in range(STEPS):
            if step == 2:
                ours.pipe.gather_parameters()
                WRITES[write](ours.module)
                written = flat(ours.module)
            losses.append(ours.train(step))
            if step == 2:
                ours.pipe.gather_parameters()
                moved = float((flat(ours.module) - written).abs().max())
        ours.pipe.gather_parameters()
        found.append({"losses": losses, "moved": moved, "values": flat(ours.module)})
        ours.pipe.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_to_parameters_holds(write: str) -> None:
    cases = [(write, dtype, name) for dtype in DTYPES for name in OPTIMIZERS]
    ranks = check(run_ranks(WORLD, write_between, cases))
    for number, (_, dtype, name) in enumerate(cases):
        one, other = (of_rank[number] for of_rank in ranks)
        assert torch.equal(one["values"], other["values"]), (dtype, name)
        assert one["moved"] < 0.02, "an update moves an element by about the learning rate"
        torchs, losses = Torchs(dtype, name), []
        for step in range(STEPS):
            if step == 2:
                WRITES[write](torchs.module)
            losses.append(torchs.train(step))
        if dtype is not torch.bfloat16:  # whose masters torch's optimizers lack
            assert one["losses"] == pytest.approx(losses, rel=1e-5), (dtype, name)
            assert float((flat(torchs.module) - one["values"]).abs().max()) < (1e-5 if name == "adamw" else 2e-2)
        else:
            assert one["losses"] == pytest.approx(losses, rel=0.05), (dtype, name)


def swap_around_an_evaluation(rank: int) -> tuple[float, float, Tensor, Tensor]:
    """An EMA swap that shows parameters of before the gather once it is undone."""
    del rank
    ours, alike = Ours(torch.float32, "adamw"), Ours(torch.float32, "adamw")
    for each in (ours, alike):
        each.train(0)
    kept = [param.data for param in ours.module.parameters()]
    for param in ours.module.parameters():
        param.data = torch.zeros_like(param)
    zero = float(ours.pipe.evaluate(*batch(1, dist.get_rank(), torch.float32)))
    for param, before in zip(ours.module.parameters(), kept, strict=True):
        param.data = before
    loss = ours.train(1)
    alike.train(1)
    for each in (ours, alike):
        each.pipe.gather_parameters()
    return zero, loss, flat(ours.module), flat(alike.module)


def test_an_evaluation_of_swapped_parameters_leaves_training_alone() -> None:
    for zero, loss, ours, alike in check(run_ranks(WORLD, swap_around_an_evaluation)):
        assert zero != pytest.approx(loss, rel=1e-3)
        assert torch.equal(ours, alike)


def pruned(rank: int) -> Callable[[], object]:
    del rank
    ours = Ours(torch.float32, "adamw")
    prune.random_unstructured(ours.module[0], "weight", 0.5)  # type: ignore[no-untyped-call]
    return lambda: ours.train(0)


def stale_state(rank: int) -> Callable[[], object]:
    del rank
    ours = Ours(torch.float32, "adamw")
    ours.train(0)
    assert copy.deepcopy(ours.module).state_dict(), "a copy is the user's"
    return ours.module[0].state_dict


def second_pipeline(rank: int) -> Callable[[], object]:
    del rank
    ours = Ours(torch.float32, "adamw")
    schedule = schedule_of("1f1b", 1, 2)
    second = treadle.Pipeline({0: ours.module}, schedule, mesh=make_mesh(1, WORLD), loss_fn=loss_fn)
    close_at_end(second)
    ours.train(0)
    return lambda: second.evaluate(*batch(1, 0, torch.float32))


def pipeline_of_stale_parameters(rank: int) -> Callable[[], object]:
    del rank
    ours = Ours(torch.float32, "adamw")
    ours.train(0)
    schedule, mesh = schedule_of("1f1b", 1, 2), make_mesh(1, WORLD)
    return lambda: treadle.Pipeline({0: ours.module}, schedule, mesh=mesh, loss_fn=loss_fn)


def second_optimizer(rank: int) -> Callable[[], object]:
    del rank
    ours = Ours(torch.float32, "adamw")
    views = [NamedView(name, param) for name, param in ours.module.named_parameters()]
    return lambda: ShardedOptimizer(ours.pipe, views)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (pruned, "added, replaced or removed after the Pipeline was made"),
        (stale_state, "call pipe.gather_parameters()"),
        (second_pipeline, "call pipe.gather_parameters()"),
        (pipeline_of_stale_parameters, "call pipe.gather_parameters()"),
        (second_optimizer, "close() this Pipeline"),
    ],
)
def test_what_cannot_hold_is_refused(make: Callable[[int], Callable[[], object]], match: str) -> None:
    for said, _ in check(run_ranks(WORLD, all_refuse, make)):
        assert match in said, said


def clear_each(params: Iterable[nn.Parameter]) -> None:
    for param in params:
        param.grad = None


CLEARS: dict[str, Callable[[Ours], Any]] = {
    "optimizer": lambda ours: ours.optimizer.zero_grad(),
    "module": lambda ours: ours.module.zero_grad(),
    "module to zero": lambda ours: ours.module.zero_grad(set_to_none=False),
    "grad": lambda ours: clear_each(ours.module.parameters()),
    "torch's": lambda ours: torch.optim.SGD(ours.module.parameters()).zero_grad(),
    "nothing": lambda ours: None,
}


def steps_with_clearing(rank: int, clear: str, dtype: torch.dtype, name: str) -> tuple[list[float], str]:
    """Norms of steps on one batch with an update of nothing between them, and what a step said after a clear."""
    del rank
    ours, norms = Ours(dtype, name), []
    for _ in range(3):
        ours.pipe.step(*batch(0, dist.get_rank(), dtype))
        norms.append(float(ours.optimizer.clip(1e9)))
        ours.optimizer.step(0.0)
        CLEARS[clear](ours)
        said = refusal(lambda: ours.pipe.step(*batch(0, dist.get_rank(), dtype))) if clear != "optimizer" else ""
        ours.optimizer.zero_grad()
    return norms, said


@pytest.mark.parametrize("clear", CLEARS)
@pytest.mark.parametrize(("dtype", "name"), [(torch.float32, "adamw"), (torch.bfloat16, "muon")], ids=str)
def test_gradients_are_cleared_as_by_torch_or_refused(clear: str, dtype: torch.dtype, name: str) -> None:
    torchs = Torchs(dtype, name)
    losses = [loss_fn(torchs.module(x), y) for x, y in (batch(0, replica, dtype) for replica in range(WORLD))]
    (sum(losses, start=torch.zeros(())) / WORLD).backward()  # type: ignore[no-untyped-call]
    norm = float(nn.utils.clip_grad_norm_(torchs.module.parameters(), 1e9))
    for norms, said in check(run_ranks(WORLD, steps_with_clearing, clear, dtype, name)):
        assert norms == pytest.approx([norm] * 3, rel=1e-5 if dtype is torch.float32 else 0.02)
        assert (clear == "optimizer") == (said == "")
        assert clear == "optimizer" or "call optimizer.zero_grad() of the ShardedOptimizer" in said


def clipped(rank: int, norm_type: str) -> tuple[str, float, float, float]:
    """What `pipe.grad_norm()` says, and norms before and after the optimizer's own clip."""
    del rank, norm_type
    ours = Ours(torch.float32, "adamw")
    ours.pipe.step(*batch(0, dist.get_rank(), torch.float32))
    said = refusal(ours.pipe.grad_norm)
    norms = [float(ours.optimizer.clip(limit)) for limit in (float("inf"), 1e-3, float("inf"))]
    return said, norms[0], norms[1], norms[2]


def test_clipping_by_grad_norm_is_refused_and_clip_clips() -> None:
    for said, before, again, after in check(run_ranks(WORLD, clipped, "2")):
        assert "optimizer.clip(max_norm) clips and returns the norm" in said
        assert before == again > 0.01
        assert after == pytest.approx(1e-3, rel=1e-2)


def gathered_state(rank: int) -> list[float]:
    """The largest difference of state dicts from a run that stays whole, after each way to gather."""
    del rank
    ours, found = Ours(torch.float32, "adamw"), []
    whole = Torchs(torch.float32, "adamw")
    for step in range(2):
        ours.train(step)
        whole.train(step)
        assert "gather_parameters" in refusal(ours.module.state_dict)
        ours.pipe.gather_parameters()
        state = ours.module.state_dict()
        found.append(max(float((state[name] - value).abs().max()) for name, value in whole.module.state_dict().items()))
    return found


def test_a_state_dict_is_whole_or_refused() -> None:
    for differences in check(run_ranks(WORLD, gathered_state)):
        assert max(differences) < 1e-6


class Scaled(nn.Module):
    """A loss with a temperature that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return loss_fn(output * self.scale, target)


class ByName(nn.Module):
    """A stage whose micro-batches are dicts, with a number and perhaps nothing beside the tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model(torch.float32)

    def forward(self, given: dict[str, Any]) -> Tensor:
        out: Tensor = self.inner(given["x"]) * given["factor"]
        return out if given["more"] is None else out + given["more"]


def step_on_dicts(rank: int) -> list[tuple[float, float]]:
    """The losses of a step and of an evaluation on dicts, and on tuples."""
    module, found = ByName(), []
    x, y = batch(0, rank, torch.float32)
    dicts = [{"x": part, "factor": 2, "more": None} for part in x.chunk(2)]
    for given in (dicts, [(each,) for each in dicts]):
        pipe = treadle.Pipeline({0: module}, schedule_of("1f1b", 1, 2), mesh=make_mesh(1), loss_fn=loss_fn)
        found.append((float(pipe.evaluate(given, y)), float(pipe.step(given, y))))
        pipe.close()
    return found


def test_a_step_takes_the_inputs_that_an_evaluation_takes() -> None:
    for evaluated, stepped in check(run_ranks(1, step_on_dicts))[0]:
        assert evaluated == stepped


def with_loss(rank: int) -> list[str]:
    """What steps with loss functions that reach parameters are answered with."""
    del rank
    scaled, frozen, raw = Scaled(), Scaled().requires_grad_(False), torch.ones(1, requires_grad=True)
    module = model(torch.float32)
    own = next(module[2].parameters())
    losses: list[Any] = [
        scaled,
        lambda out, target: scaled(out, target),
        lambda out, target: loss_fn(out * raw, target),
        frozen,
        lambda out, target: loss_fn(out, target) + own.square().sum(),
    ]
    answers = []
    for loss in losses:
        pipe = treadle.Pipeline({0: module}, schedule_of("1f1b", 1, 2), mesh=make_mesh(1, WORLD), loss_fn=loss)
        answers.append(refusal(lambda pipe=pipe: pipe.step(*batch(0, 0, torch.float32))))  # type: ignore[misc]
        pipe.close()
    return answers


def test_a_loss_function_that_trains_is_refused() -> None:
    for named, hidden, raw, frozen, own in check(run_ranks(WORLD, with_loss)):
        assert named.startswith("loss_fn trains scale of shape [1], which is in no stage")
        assert hidden.startswith("loss_fn trains a tensor of shape [1], which is in no stage")
        assert raw == hidden
        assert frozen == own == "not refused", "both are right: a frozen loss, and a penalty of the stage's own weight"
