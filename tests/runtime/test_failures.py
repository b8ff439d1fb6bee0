"""A step, an evaluation or a Pipeline that failed leaves nothing: `.grad` is as it was, the next step is bitwise right.

Errors are put into every kind of call that a rank makes, one after the other. On one rank the same Pipeline goes on
with the next step; where other ranks lose this one, all of them have their gradients back, say who was lost until the
Pipeline is closed, and go on with a new one of the same modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import treadle
from tests.support.cases import nearest, refusal, replica_of, take_step
from tests.support.devices import drawn
from tests.support.grid import pairs
from tests.support.injections import InjectedError, InjectedPipeline, Injections, Tripwire
from tests.support.oracle import chunks_of, make_mesh
from tests.support.patience import PATIENT_S
from tests.support.ranks import check, run_ranks
from treadle.moe import MoELayer
from treadle.runtime import rank_part, step_plan
from treadle.runtime.model.exchange import EpGroupModule
from treadle.runtime.model.weight_grad import SplitForward
from treadle.runtime.norm import share_of_norm
from treadle.runtime.stage_recipe import StageRecipe
from treadle.schedules import SCHEDULES

pytestmark = pytest.mark.slow

WIDTH, SAMPLES = 4, 2
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BEFORE = ("nothing", "a reduced step", "a local step")
"""What there was before the step that fails: what is in `.grad`."""

Bits = dict[str, tuple[torch.Size, bytes] | None]


class Layer(nn.Module):
    """A linear that a schedule may split, a norm that it may not, and randomness."""

    def __init__(self, injections: Injections) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.tripwire, self.dropout = Tripwire(injections), nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.dropout(self.tripwire(self.linear(self.norm(x))))
        return out


@dataclass(frozen=True)
class Model:
    """What a pipeline is made of, the same on all ranks that hold a stage."""

    name: str
    pp: int = 1
    dtype: str = "float32"
    layered: bool = False

    @property
    def schedule(self) -> treadle.Schedule:
        made = nearest(self.name, self.pp, 4)
        assert made is not None
        return made

    def stages(self, injections: Injections) -> list[nn.Module]:
        made: list[nn.Module] = []
        for number in range(self.schedule.placement.num_stages):
            torch.manual_seed(number)
            layers: list[nn.Module] = [Layer(injections), Layer(injections)]
            if self.layered:
                layers = [MoELayer(WIDTH, 6, 2), MoELayer(WIDTH, 6, 2)]
            made.append(nn.Sequential(*layers).to(DTYPES[self.dtype]))
        return made

    @property
    def options(self) -> dict[str, Any]:
        return {"saved": "offload", "recompute": ("mlp",)} if self.layered else {}

    def batch(self, seed: int, replica: int = 0, tokens: int = 3) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(10 * seed + replica)
        x, y = drawn(torch.randn, 2, 4 * SAMPLES, tokens, WIDTH, generator=generator)
        return x.to(DTYPES[self.dtype]), y.to(DTYPES[self.dtype])


def loss_of(injections: Injections, output: Tensor, target: Tensor) -> Tensor:
    injections.reach("loss")
    return (output - target).float().square().mean()


class Place:
    """A rank's part of a model, which pipelines are made of one after the other."""

    def __init__(self, model: Model, mesh: DeviceMesh) -> None:
        self.model, self.mesh, self.injections = model, mesh, Injections()
        self.own = chunks_of(model.schedule, mesh.get_local_rank("pp"), model.stages(self.injections))
        self.params = {f"{c}.{n}": p for c, module in self.own.items() for n, p in module.named_parameters()}

    def pipeline(self) -> treadle.Pipeline:
        loss_fn = partial(loss_of, self.injections)
        options = self.model.options
        pipe = InjectedPipeline(
            self.injections,
            self.own,
            self.model.schedule,
            mesh=self.mesh,
            loss_fn=loss_fn,
            deadline_s=PATIENT_S,
            **options,
        )
        self.injections.watch(pipe.gradients, "begin", "finish", "num_bad")
        self.injections.watch(pipe, "_feed", "_finish", "counted_parameters")
        return pipe

    def batch(self, seed: int, tokens: int = 3) -> tuple[Tensor, Tensor]:
        return self.model.batch(seed, replica_of(self.mesh), tokens)

    def prepare(self, pipe: treadle.Pipeline, before: str) -> None:
        """Goes to where the step that is to fail begins."""
        for param in self.params.values():
            param.grad = None
        pipe.resume_at(0)
        if before != "nothing":
            take_step(pipe, *self.batch(0), reduce=before == "a reduced step")

    def bits(self) -> Bits:
        return {name: None if p.grad is None else bits_of(p.grad) for name, p in self.params.items()}

    def tensors(self) -> list[int]:
        return [id(param.grad) for param in self.params.values()]

    def next_step(self, pipe: treadle.Pipeline) -> tuple[bytes, Bits]:
        loss = pipe.step(*self.batch(2))
        return bits_of(loss)[1], self.bits()


def bits_of(tensor: Tensor) -> tuple[torch.Size, bytes]:
    return tensor.shape, tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def undisturbed(model: Model, mesh: DeviceMesh, before: str) -> tuple[bytes, Bits]:
    """The step behind `before`, where nothing fails."""
    place = Place(model, mesh)
    pipe = place.pipeline()
    place.prepare(pipe, before)
    made = place.next_step(pipe)
    pipe.close()
    return made


def sites_of(turns: Mapping[str, int]) -> list[tuple[str, int]]:
    """Each site with one of its turns, not the first where there are more."""
    return [(site, num // 2) for site, num in sorted(turns.items())]


# -- one rank: the same Pipeline goes on -------------------------------------------------------------------------------


def fail_everywhere(rank: int, model: Model, before: str, every: int = 1) -> tuple[list[str], list[str]]:
    """The sites that were tried, and what was wrong behind some of them."""
    mesh, wrong, tried = make_mesh(1), list[str](), list[str]()
    wanted = undisturbed(model, mesh, before)
    place = Place(model, mesh)
    pipe = place.pipeline()
    calls: dict[str, Callable[..., object]] = {"step": pipe.step, "evaluate": pipe.evaluate}
    for what, call in calls.items():
        place.prepare(pipe, "nothing")
        place.injections.turns.clear()
        call(*place.batch(1))
        for site, turn in sites_of(place.injections.turns)[:: every if what == "step" else 4 * every]:
            tried.append(f"{what}: {site}")
            place.prepare(pipe, before)
            was, tensors = place.bits(), place.tensors()
            place.injections.arm(site, turn)
            if not raises(InjectedError, partial(call, *place.batch(1))):
                wrong.append(f"{what}: {site} did not raise")
            if place.bits() != was or place.tensors() != tensors:
                wrong.append(f"{what}: .grad is another after {site}")
            if place.next_step(pipe) != wanted:
                wrong.append(f"{what}: the step after {site} is another")
    pipe.close()
    return tried, wrong


def raises(error: type[BaseException], call: Callable[[], object]) -> bool:
    try:
        call()
    except error:
        return True
    return False


ALONE = [name for name in SCHEDULES if nearest(name, 1, 4) is not None]


@pytest.mark.parametrize(("name", "dtype", "before"), pairs(ALONE, DTYPES, BEFORE[:2]))
def test_one_rank_goes_on_after_an_error_anywhere(name: str, dtype: str, before: str) -> None:
    [(tried, wrong)] = check(run_ranks(1, fail_everywhere, Model(name, dtype=dtype), before))
    assert not wrong
    assert {"step: F launch", "step: loss", "step: module backward", "step: num_bad", "evaluate: F launch"} <= {*tried}


LANES = [("1f1b", "bfloat16", BEFORE[1]), ("dualpipev", "float32", BEFORE[1])]
AT_NIGHT = [case for case in product(ALONE, DTYPES, BEFORE[:2]) if case not in LANES]


@pytest.mark.parametrize(
    ("name", "dtype", "before", "every"),
    [*((*case, 3) for case in LANES), *(pytest.param(*case, 1, marks=pytest.mark.nightly) for case in AT_NIGHT)],
)
def test_one_rank_goes_on_after_an_error_in_any_lane(name: str, dtype: str, before: str, every: int) -> None:
    """Of the sites, which are before and after each call in the order of their names, every third is tried by day."""
    [(tried, wrong)] = check(run_ranks(1, fail_everywhere, Model(name, dtype=dtype, layered=True), before, every))
    assert not wrong
    assert every > 1 or {"step: ATTN_F launch", "step: DISPATCH_B launch", "step: MLP_R launch"} <= {*tried}
    assert {site.split(" ")[1].partition("_")[0] for site in tried} >= {"ATTN", "MLP", "DISPATCH", "COMBINE"}


def fail_first(rank: int, name: str) -> list[bool]:
    """Whether the first step is right behind one that failed on a batch of another shape, for each way to fail."""
    del rank
    model, mesh, right = Model(name), make_mesh(1), []
    wanted = undisturbed(model, mesh, "nothing")
    for site in ("loss", "module backward", "num_bad"):
        place = Place(model, mesh)
        pipe = place.pipeline()
        place.injections.arm(site)
        assert raises(InjectedError, partial(pipe.step, *place.batch(1, tokens=5)))
        right.append(place.next_step(pipe) == wanted)
        pipe.close()
    return right


@pytest.mark.parametrize("name", ["interleaved", "zb-v"])
def test_a_step_that_failed_has_taught_no_shapes(name: str) -> None:
    assert check(run_ranks(1, fail_first, name)) == [[True] * 3]


def draw_without_seed(rank: int) -> list[bool]:
    """Whether torch's generator is where it was, with stages that draw from it."""
    del rank
    place, kept = Place(Model("1f1b"), make_mesh(1)), []
    schedule, loss_fn = place.model.schedule, partial(loss_of, place.injections)
    pipe = InjectedPipeline(place.injections, place.own, schedule, mesh=place.mesh, loss_fn=loss_fn, seed=None)
    for site in ("loss", "B launch after"):
        before = torch.get_rng_state()
        place.injections.arm(site, 1)
        assert raises(InjectedError, partial(pipe.step, *place.batch(1)))
        kept.append(torch.equal(torch.get_rng_state(), before))
    pipe.close()
    return kept


def test_a_step_that_failed_has_drawn_no_random_numbers() -> None:
    assert check(run_ranks(1, draw_without_seed)) == [[True, True]]


# -- several ranks: all have their gradients back, and a new Pipeline goes on ------------------------------------------


ENDS = (
    "launch",
    "prepare",
    "finish after",
    "loss",
    "module backward",
    "_feed",
    "begin after",
    "num_bad",
    "_parameters",
)


def lose_everywhere(
    rank: int, model: Model, dp: int, before: str, victim: int, every: int
) -> tuple[list[str], list[str]]:
    """The sites at which the victim failed, and what was wrong on this rank after some of them."""
    mesh, wrong = make_mesh(model.pp, dp), list[str]()
    is_local = before == BEFORE[2]
    wanted = undisturbed(model, mesh, "nothing" if is_local else before)  # a new Pipeline cannot go on with shares
    place = Place(model, mesh)
    pipe = place.pipeline()
    calls: dict[str, Callable[[treadle.Pipeline], object]] = {
        "step": lambda pipe: pipe.step(*place.batch(1)),
        "local step": lambda pipe: take_step(pipe, *place.batch(1), reduce=False),
        "evaluate": lambda pipe: pipe.evaluate(*place.batch(1)),
        "grad_norm": lambda pipe: pipe.grad_norm(),
    }
    calls.pop("local step" if before == BEFORE[1] else "grad_norm")
    tried: list[str] = []
    for what, call in calls.items():
        place.prepare(pipe, before)
        place.injections.turns.clear()
        call(pipe)
        sites = sites_of(place.injections.turns)
        told = [[(s, n) for s, n in sites if s.endswith(ENDS) and s != "_finish after"]]  # then the others have ended
        dist.broadcast_object_list(told, victim)
        for site, turn in told[0][victim % every :: every] if what == "step" else told[0][:: len(told[0]) // 2 + 1]:
            tried.append(f"{what}: {site}")
            place.prepare(pipe, before)
            was, tensors = place.bits(), place.tensors()
            if rank == victim:
                place.injections.arm(site, turn)
            error = raised_by(partial(call, pipe))
            if not (isinstance(error, InjectedError) if rank == victim else is_loss_of(victim, error)):
                wrong.append(f"{what}: {site} came to {error!r}")
            if place.bits() != was or place.tensors() != tensors:
                wrong.append(f"{what}: .grad is another after {site}")
            error = raised_by(partial(pipe.step, *place.batch(2)))
            if not is_loss_of(victim, error):
                wrong.append(f"{what}: the step after {site} came to {error!r}")
            if place.bits() != was:
                wrong.append(f"{what}: .grad is another after a refusal")
            pipe.close()
            del error
            pipe = place.pipeline()
            pipe.resume_at(1 if before == BEFORE[1] else 0)
            if is_local:
                place.prepare(pipe, "nothing")
            if place.next_step(pipe) != wanted:
                wrong.append(f"{what}: the step of a new Pipeline after {site} is another")
    pipe.close()
    return tried, wrong


def raised_by(call: Callable[[], object]) -> BaseException | None:
    try:
        call()
    except Exception as error:
        return error.with_traceback(None)
    return None


def is_loss_of(rank: int, error: BaseException | None) -> bool:
    return isinstance(error, treadle.RankLostError) and error.rank == rank and error.kind == "raised"


SIZES = [(2, 1), (2, 2)]


BY_DAY = [
    (name, SIZES[number % 2], [*DTYPES][number // 2 % 2], BEFORE[number % 3]) for number, name in enumerate(SCHEDULES)
]
"""Each schedule once: sizes, dtypes and what was before take turns."""


@pytest.mark.parametrize(
    ("name", "size", "dtype", "before", "every"),
    [
        *((*case, 4) for case in BY_DAY),
        *(pytest.param(*case, 1, marks=pytest.mark.nightly) for case in product(SCHEDULES, SIZES, DTYPES, BEFORE)),
    ],
)
def test_all_ranks_have_their_gradients_back_after_an_error_of_one(
    name: str, size: tuple[int, int], dtype: str, before: str, every: int
) -> None:
    """Of the sites of a step, every fourth is tried by day."""
    pp, dp = size
    victim = sum(map(ord, name)) % (pp * dp)
    ranks = check(run_ranks(pp * dp, lose_everywhere, Model(name, pp, dtype), dp, before, victim, every))
    assert not [wrong for _, wrong in ranks if wrong]
    assert every > 1 or {"step: F launch", "step: loss", "step: num_bad"} <= {*ranks[victim][0], "step: loss"}
    assert len(ranks[victim][0]) >= 5


def differ_in_tokens(rank: int, model: Model, dp: int) -> list[str]:
    """What is wrong behind steps and evaluations whose ranks gave different counts."""
    mesh, wrong = make_mesh(model.pp, dp), list[str]()
    place = Place(model, mesh)
    pipe = place.pipeline()
    for before in BEFORE:
        wanted = undisturbed(model, mesh, before)
        for what in ("step", "evaluate"):
            place.prepare(pipe, before)
            was, tensors = place.bits(), place.tensors()
            said = refusal(partial(getattr(pipe, what), *place.batch(1), num_tokens=8 + rank % 2))
            if "different num_tokens" not in said:
                wrong.append(said)
            if place.bits() != was or place.tensors() != tensors:
                wrong.append(f"{what} after {before}: .grad is another")
            if place.next_step(pipe) != wanted:
                wrong.append(f"{what} after {before}: the next step is another")
    pipe.close()
    return wrong


@pytest.mark.parametrize(("name", "dtype"), [("1f1b", "float32"), ("zb-v", "bfloat16"), ("dualpipe", "bfloat16")])
def test_a_refusal_of_all_ranks_leaves_nothing(name: str, dtype: str) -> None:
    assert check(run_ranks(4, differ_in_tokens, Model(name, 2, dtype), 2)) == [[]] * 4


def wrong_tokens(rank: int) -> list[str]:
    del rank
    place = Place(Model("1f1b"), make_mesh(1))
    pipe = place.pipeline()
    said = [refusal(partial(pipe.step, *place.batch(0), num_tokens=n)) for n in (0, float("nan"), float("inf"))]
    assert not any(place.bits().values())
    pipe.close()
    return said


def test_a_number_of_tokens_that_divides_to_nothing_is_refused_before_the_step() -> None:
    [said] = check(run_ranks(1, wrong_tokens))
    assert all("more than 0 and finite, got" in text for text in said)


# -- a Pipeline that could not be made ---------------------------------------------------------------------------------


MAKING: tuple[tuple[object, str], ...] = (
    (rank_part, "check_arguments"),
    (rank_part, "check_modules"),
    (rank_part, "examine"),
    (rank_part, "joined_names"),
    (rank_part, "ties_of"),
    (rank_part, "claims_of_copies"),
    (step_plan, "plan"),
    (rank_part, "bind"),
    (rank_part, "make_store"),
    (StageRecipe, "build"),
)
"""What the making of a Pipeline calls, in this order."""

AGREED = ("joined_names",)
"""Those whose ValueError all ranks raise, as all of them see the same."""


def fail_to_make(rank: int, model: Model) -> list[str]:
    """What is wrong behind pipelines whose making failed on one rank, each time at another call."""
    mesh, wrong = make_mesh(2), list[str]()
    wanted = undisturbed(model, mesh, "nothing")
    place = Place(model, mesh)
    for number, (owner, name) in enumerate(MAKING):
        for error in (InjectedError("no"), *([] if name in AGREED else [ValueError("no")])):
            real, victim = getattr(owner, name), number % 2
            fails = partial(raise_after, error, real, name not in ("check_arguments", "check_modules", "examine"))
            made: list[treadle.Pipeline] = []
            with mock.patch.object(owner, name, in_place_of(real, fails if rank == victim else real)):
                got = raised_by(lambda made=made: made.append(place.pipeline()))  # type: ignore[misc]
            for pipe in made:  # where nobody waits for the victim any more
                pipe.close()
            if rank == victim and (got is None or "no" not in str(got)):
                wrong.append(f"{name} came to {got!r}")
            wrong += [f"{name} left {what}" for what in left_on(place.own)]
            del got
            pipe = place.pipeline()
            place.prepare(pipe, "nothing")
            if place.next_step(pipe) != wanted:
                wrong.append(f"the step after {name} is another")
            pipe.close()
    return wrong


def in_place_of(real: Callable[..., object], other: Callable[..., object]) -> Callable[..., object]:
    """A function, so that a class binds it as a method."""

    @wraps(real)
    def call(*args: Any, **kwargs: Any) -> object:
        return other(*args, **kwargs)

    return call


def raise_after(error: Exception, real: Callable[..., object], calls: bool, *args: Any, **kwargs: Any) -> None:
    if calls:
        real(*args, **kwargs)
    raise error.with_traceback(None)


def left_on(modules: Mapping[int, nn.Module]) -> Iterator[str]:
    for module in modules.values():
        for name, param in module.named_parameters():
            if param._post_accumulate_grad_hooks:
                yield f"a hook on {name}"
        for name, part in module.named_modules():
            if isinstance(part.__dict__.get("forward"), SplitForward):
                yield f"a forward of {name}"
            if isinstance(part, EpGroupModule) and part.ep_group is not None:
                yield f"a group of {name}"


@pytest.mark.parametrize(("name", "dtype", "layered"), [("zb-h1", "bfloat16", False), ("zb-v", "bfloat16", True)])
def test_a_pipeline_that_could_not_be_made_leaves_the_modules_as_they_were(
    name: str, dtype: str, layered: bool
) -> None:
    assert check(run_ranks(2, fail_to_make, Model(name, 2, dtype, layered))) == [[], []]


def make_apart(rank: int) -> tuple[str, bool]:
    """Replicas that start apart are refused; made alike, they train as others do."""
    model, mesh = Model("1f1b", 1, "bfloat16"), make_mesh(1, 2)
    wanted = undisturbed(model, mesh, "nothing")
    place = Place(model, mesh)
    values = {name: param.detach().clone() for name, param in place.params.items()}
    with torch.no_grad():
        next(iter(place.params.values())).add_(rank)
    said = refusal(place.pipeline)
    for name, param in place.params.items():
        param.data = values[name]
    pipe = place.pipeline()
    right = place.next_step(pipe) == wanted
    pipe.close()
    return said, right


def test_replicas_that_were_refused_train_once_they_are_alike() -> None:
    for said, right in check(run_ranks(2, make_apart)):
        assert "different parameters" in said
        assert right


def make_twice(rank: int) -> list[bool]:
    """A second Pipeline of the modules of one that is open on a rank, once that is closed, and once one is dropped."""
    model, mesh = Model("1f1b", 2, "bfloat16"), make_mesh(2)
    wanted = undisturbed(model, mesh, "nothing")
    place, other = Place(model, mesh), Place(model, mesh)
    first = (place if rank == 0 else other).pipeline()
    second = place.pipeline()
    made = [place.next_step(second) == wanted]
    first.close()
    place.prepare(second, "nothing")
    del first, second
    third = place.pipeline()
    made.append(place.next_step(third) == wanted)
    third.close()
    return made


def test_a_second_pipeline_of_the_same_modules_has_all_gradients() -> None:
    assert check(run_ranks(2, make_twice)) == [[True, True]] * 2


# -- `.grad` as torch's users know it ----------------------------------------------------------------------------------


def write_between(rank: int, dtype: str) -> list[bool]:
    """Whether a gradient of a local step that was written by `.data` counts as one that was written in place."""
    del rank
    mesh, same = make_mesh(1, 2), []
    place = Place(Model("1f1b", dtype=dtype), mesh)
    pipe = place.pipeline()
    for way in WRITTEN:
        ended = []
        for by_data in (False, True):
            place.prepare(pipe, "a local step")
            for param in place.params.values():
                assert param.grad is not None
                WRITTEN[way](param.grad.data if by_data else param.grad)
            ended.append(place.next_step(pipe))
        same.append(ended[0] == ended[1])
    pipe.close()
    return same


WRITTEN: dict[str, Callable[[Tensor], Tensor]] = {
    "zeroed": lambda grad: grad.zero_(),
    "halved": lambda grad: grad.mul_(0.5),
    "negated": lambda grad: grad.neg_(),
}


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_written_by_data_between_steps_count(dtype: str) -> None:
    assert check(run_ranks(2, write_between, dtype)) == [[True] * len(WRITTEN)] * 2


def keep_tensors(rank: int, dtype: str) -> list[bool]:
    """Whether steps that add to `.grad` leave it the tensor that it was, as torch's own backward does."""
    del rank
    mesh, kept = make_mesh(1, 2), []
    place = Place(Model("1f1b", dtype=dtype), mesh)
    pipe = place.pipeline()
    for before in BEFORE[1:]:
        place.prepare(pipe, before)
        tensors = place.tensors()
        pipe.step(*place.batch(2))
        kept.append(place.tensors() == tensors)
    pipe.close()
    return kept


@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_add_to_the_tensors_that_are_there(dtype: str) -> None:
    assert check(run_ranks(2, keep_tensors, dtype)) == [[True, True]] * 2


def test_the_norm_of_two_byte_gradients_keeps_no_copy_of_them() -> None:
    torch.manual_seed(0)
    grads = [torch.randn(1 << 16, dtype=torch.bfloat16) for _ in range(4)]
    with torch.profiler.profile(profile_memory=True) as profiled:
        share = share_of_norm(grads, 2.0, torch.device("cpu"))
    took = [event.cpu_memory_usage for event in profiled.events() if event.cpu_parent is None]  # kept after each call
    assert took
    assert max(took) < grads[0].nbytes // 8
    in_float32 = share_of_norm([grad.float() for grad in grads], 2.0, torch.device("cpu"))
    assert share.item() == pytest.approx(in_float32.item(), rel=1e-6)
