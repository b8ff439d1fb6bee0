"""Expert parallelism's exchange: the same numbers as one process that has all experts, by every backend."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support import deepep_contract
from tests.support.devices import DEVICE_TYPE, device_of
from tests.support.experts import named_grads
from tests.support.ranks import check, run_ranks
from treadle.dist.groups import Group
from treadle.moe import EXCHANGES, MoELayer, Router, Routing
from treadle.moe.exchanges import AllToAll, DeepEP, ExchangeName
from treadle.moe.exchanges.deepep import Comm, Trip
from treadle.runtime.model.exchange import EpGroupModule, ExchangeError
from treadle.runtime.model.segments import Cut, Plan, Value, compute, drop, exchange, tensors_in

WIDTH, HIDDEN, EXPERTS, TOKENS = 8, 12, 4, 24
ROUTES = ("learned", "one expert", "none to a rank", "sigmoid in groups, with a shared expert")


@dataclass(frozen=True)
class Backend:
    """An exchange, in the precision it has. `contract`: what DeepEP documents instead of DeepEP, which needs GPUs."""

    exchange: ExchangeName
    dtype: torch.dtype
    tolerance: float
    contract: bool = False

    def __str__(self) -> str:
        return f"{self.exchange}{', as documented' if self.contract else ''}"

    @property
    def device(self) -> str:
        return "cuda" if self.exchange == "deepep" and not self.contract else DEVICE_TYPE


BACKENDS = [
    pytest.param(Backend("all_to_all", torch.float64, 1e-10), id="all_to_all"),
    pytest.param(
        Backend("deepep", torch.bfloat16, 0.03),
        id="deepep",
        marks=pytest.mark.skipif(
            find_spec("deep_ep") is None or torch.cuda.device_count() < 4,
            reason="needs the package deep_ep and four GPUs, connected by NVLink",
        ),
    ),
    pytest.param(Backend("deepep", torch.bfloat16, 0.03, contract=True), id="deepep, as documented"),
]


def whole(route: str, dtype: torch.dtype = torch.float64) -> MoELayer:
    """The layer with all experts; its router is bent by a bias-like weight on a feature that is always 1."""
    torch.manual_seed(3)
    layer = MoELayer(WIDTH, HIDDEN, EXPERTS, **options(route)).double()
    with torch.no_grad():
        layer.expert_norm.bias[0] = 5.0
        if route == "one expert":
            layer.router.score.weight[:, 0] = torch.tensor([0.0, 0.0, 100.0, 0.0])
        if route == "none to a rank":
            layer.router.score.weight[:, 0] = torch.tensor([50.0, 50.0, -50.0, -50.0])
    return layer.to(dtype)


def options(route: str) -> dict[str, Any]:
    """What makes the router, and the shared expert if there is one."""
    if not route.startswith("sigmoid"):
        return {"top_k": 1 if route == "one expert" else 2, "balance": 0.1}
    router = Router(WIDTH, EXPERTS, 2, 0.1, scoring="sigmoid", routed_scaling_factor=2.5, n_group=2, topk_group=1)
    return {"router": router, "shared_experts": nn.Linear(WIDTH, WIDTH)}


def part(layer: MoELayer, route: str, ep: int, rank: int, exchange: ExchangeName) -> MoELayer:
    """A rank's part of it: everything but the experts, of which it has its own."""
    own = EXPERTS // ep
    mine = MoELayer(WIDTH, HIDDEN, EXPERTS, ep=ep, ep_rank=rank, exchange=exchange, **options(route))
    wanted = {}
    for name, value in layer.state_dict().items():
        pieces = name.split(".")
        if pieces[0] == "experts":
            number = int(pieces[2]) - rank * own
            if not 0 <= number < own:
                continue
            pieces[2] = str(number)
        wanted[".".join(pieces)] = value
    mine.to(layer.norm.weight.dtype).load_state_dict(wanted)
    return mine


def batch(rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
    torch.manual_seed(100 + rank)
    return torch.randn(TOKENS, WIDTH, dtype=torch.float64).to(dtype)


def by_segments(layer: MoELayer, *batches: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Forward segment by segment, then backward the other way round; of each batch the output and its own gradient."""
    plan = Plan.of(layer, "the layer")
    values = [{"x": Value(x, True)} for x in batches]
    firsts = [of["x"] for of in values]
    cuts: list[dict[str, Cut]] = [{} for _ in batches]
    for name, segment in plan.segments.items():
        for x, of, cut in zip(batches, values, cuts, strict=True):
            cut[name] = Cut.forward(segment, of)
            if "aux_loss" in segment.writes:
                of["aux_loss"].grad = torch.ones((), dtype=x.dtype, device=x.device)
            drop(of, plan.dead[name])
    outs = [of.pop("x") for of in values]
    for out in outs:
        out.grad = 2 * out.thing / out.thing.numel()  # of the mean square
    for name in reversed(plan.segments):
        for cut in cuts:
            cut[name].backward()
    return [(out.thing, cast(Tensor, first.grad)) for out, first in zip(outs, firsts, strict=True)]


def ep_group(rank: int) -> Group:
    wait = timedelta(seconds=30)
    device = torch.get_default_device()
    return Group("experts", list(range(dist.get_world_size())), rank, wait, lambda work: work.wait(wait), device)


def own_part(rank: int, backend: Backend, route: str) -> tuple[MoELayer, torch.device]:
    """A rank's part of the layer, in its group."""
    if backend.contract:
        deepep_contract.install()
    layer = part(whole(route, backend.dtype), route, dist.get_world_size(), rank, backend.exchange)
    device = torch.device("cuda", rank) if backend.device == "cuda" else device_of(rank)
    assert isinstance(layer.exchange, EpGroupModule)
    layer.exchange.join(ep_group(rank), {})
    return layer.to(device), device


def one_rank(rank: int, backend: Backend, route: str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    layer, device = own_part(rank, backend, route)
    ((made, grad),) = by_segments(layer, batch(rank, backend.dtype).to(device))
    return made.cpu(), grad.cpu(), {name: g.cpu() for name, g in named_grads(layer) if g is not None}


def alike(got: Tensor, want: Tensor, tolerance: float) -> bool:
    got, want = got.detach(), want.detach()
    return float((got - want).abs().max()) <= tolerance * max(float(want.abs().max()), 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("ep", [2, 4])
def test_as_in_one_process(backend: Backend, route: str, ep: int) -> None:
    results = check(run_ranks(ep, one_rank, backend, route))
    layer = whole(route, backend.dtype)
    batches = [batch(rank, backend.dtype).requires_grad_() for rank in range(ep)]
    for rank, x in enumerate(batches):  # each rank's own batch, through the layer with all experts
        made, aux = layer.with_loss(x)
        torch.autograd.backward(made.square().mean() + aux)
        assert alike(results[rank][0], made, backend.tolerance)
        assert x.grad is not None
        assert alike(results[rank][1], x.grad, backend.tolerance)
    own = EXPERTS // ep
    for name, want in named_grads(layer):
        pieces = name.split(".")
        if pieces[0] == "experts":
            rank, pieces[2] = divmod(int(pieces[2]), own)[0], str(int(pieces[2]) % own)
            got = results[rank][2][".".join(pieces)]
        else:
            got = torch.stack([grads[name] for _, _, grads in results]).sum(0)
        assert want is not None
        assert alike(got, want, backend.tolerance), name


def several_under_way(rank: int, backend: Backend) -> bool:
    """Are micro-batches of several sizes, the next dispatched before the last is combined, as each alone."""
    layer, device = own_part(rank, backend, "learned")
    batches = [batch(rank + 10 * at, backend.dtype)[:size].to(device) for at, size in enumerate((TOKENS, 7, 13))]
    alone = [by_segments(layer, x)[0] for x in batches]
    together = by_segments(layer, *batches)
    return all(
        torch.equal(a, b) for one, two in zip(alone, together, strict=True) for a, b in zip(one, two, strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_number_may_be_under_way(backend: Backend) -> None:
    assert all(check(run_ranks(2, several_under_way, backend)))


def refused_precision(rank: int) -> str:
    deepep_contract.install()
    layer, _ = own_part(rank, Backend("deepep", torch.float32, 0.0, contract=True), "learned")
    with pytest.raises(ValueError, match="DeepEP") as error:
        by_segments(layer, batch(rank, torch.float32))
    return str(error.value)


def test_deepep_refuses_other_precisions() -> None:
    assert all("moves bfloat16, got torch.float32" in said for said in check(run_ranks(2, refused_precision)))


@pytest.mark.skipif(find_spec("deep_ep") is not None, reason="DeepEP is installed")
def test_deepep_is_refused_where_it_is_not_installed() -> None:
    with pytest.raises(ValueError, match=r"needs the package deep_ep .* install it, or use exchange='all_to_all'"):
        MoELayer(WIDTH, HIDDEN, EXPERTS, exchange="deepep")
    with pytest.raises(ValueError, match="one of all_to_all, deepep, got 'nvshmem'"):
        MoELayer(WIDTH, HIDDEN, EXPERTS, exchange="nvshmem")  # type: ignore[arg-type]


def gates_and_timeout(rank: int) -> tuple[torch.dtype, str]:
    """The precision of dispatched gates, and the error of a dispatch whose peers do not come in time."""
    layer, _ = own_part(rank, Backend("deepep", torch.bfloat16, 0.0, contract=True), "learned")
    chosen = torch.zeros(3, 1, dtype=torch.int64)
    gates, rows = torch.ones(3, 1, dtype=torch.bfloat16), torch.zeros(3, WIDTH, dtype=torch.bfloat16)
    dispatched = layer.exchange.dispatch(rows, gates, Routing.of(chosen, EXPERTS))[1]

    def late(self: Any, *given: Any, **named: Any) -> Any:
        raise RuntimeError("DeepEP error: CPU recv timeout")

    deepep_contract.Buffer.dispatch = late  # type: ignore[method-assign]
    with pytest.raises(ExchangeError) as error:
        layer.exchange.dispatch(rows, gates, Routing.of(chosen, EXPERTS))
    return dispatched.dtype, str(error.value)


def test_deepep_keeps_the_gates_precision_and_blames_its_peers_for_a_timeout() -> None:
    for dtype, said in check(run_ranks(2, gates_and_timeout)):
        assert (dtype, said) == (torch.bfloat16, "DeepEP error: CPU recv timeout")


def left(rank: int, clean: bool) -> list[bool]:
    """Whether a rank's buffer is destroyed once its layer has left; of two ranks the second leaves where both do."""
    layer, _ = own_part(rank, Backend("deepep", torch.bfloat16, 0.0, contract=True), "learned")
    by_segments(layer, batch(rank, torch.bfloat16))
    assert isinstance(layer.exchange, EpGroupModule)
    buffers = list(layer.exchange.shared.values())
    if clean or rank == 0:
        layer.exchange.leave(clean=clean)
    return [buffer.is_destroyed for buffer in buffers]


@pytest.mark.parametrize("clean", [True, False])
def test_a_buffer_is_destroyed_by_all_of_its_ranks_or_by_none(clean: bool) -> None:
    assert check(run_ranks(2, left, clean)) == [[clean]] * 2


def refused_size(rank: int) -> str:
    with pytest.raises(ValueError, match="DeepEP") as error:
        own_part(rank, Backend("deepep", torch.bfloat16, 0.0, contract=True), "learned")
    return str(error.value)


def test_a_size_that_deepep_has_no_kernels_for_is_refused_when_it_is_joined() -> None:
    for said in check(run_ranks(1, refused_size)):
        assert "DeepEP has no kernels for 1 ranks" in said


def gathered(rank: int) -> list[list[Any]]:
    comm = Comm(ep_group(rank), device_of(rank))
    things = [rank, None, bytearray(rank * b"\x00\xff'") if rank else None, ("host", rank, [True, -1.5])]
    return [[comm.Get_rank(), comm.Get_size()], *(comm.allgather(thing) for thing in things)]


def test_what_a_buffer_meets_by() -> None:
    for rank, (place, numbers, nothing, handles, tuples) in enumerate(check(run_ranks(3, gathered))):
        assert place == [rank, 3]
        assert numbers == [0, 1, 2]
        assert nothing == [None] * 3
        assert handles == [None, bytearray(b"\x00\xff'"), bytearray(b"\x00\xff'" * 2)]
        assert isinstance(handles[1], bytearray)
        assert tuples == [("host", r, [True, -1.5]) for r in range(3)]


def test_tensors_that_travel_in_a_routing_are_found() -> None:
    a, b, c, d, e = (torch.zeros(1) for _ in range(5))
    trip = Trip(object(), 4, handle=(c, (d, None)), experts=e)
    assert [id(t) for t in tensors_in(Routing(a, b, b, b, trip=trip))] == [id(t) for t in (a, b, b, b, c, d, e)]


def test_backends_say_whether_counts_go_ahead() -> None:
    assert list(EXCHANGES) == ["all_to_all", "deepep"]
    assert [segment.name for segment in AllToAll(EXPERTS).counting] == ["counts", "host"]
    assert not DeepEP.counting


def test_a_state_dict_has_the_names_that_it_is_loaded_by() -> None:
    """Those of earlier versions: a file of `torch.save(layer.state_dict())` has to load."""
    dense = {f"{name}.{kind}" for name in ("norm", "mixer", "expert_norm") for kind in ("weight", "bias")}
    experts = {f"experts.{name}.{number}.weight" for name in ("up", "down") for number in range(EXPERTS)}
    assert set(whole("learned").state_dict()) == dense | experts | {"router.score.weight"}


def test_a_layer_without_balance_writes_no_loss() -> None:
    layer = MoELayer(WIDTH, HIDDEN, EXPERTS)
    assert all("aux_loss" not in segment.writes for segment in layer.segments())
    assert float(layer.with_loss(torch.zeros(3, WIDTH))[1]) == 0


def test_another_scoring_is_refused() -> None:
    with pytest.raises(ValueError, match="scoring is softmax or sigmoid, got 'tanh'"):
        Router(WIDTH, EXPERTS, 2, scoring="tanh")  # type: ignore[arg-type]


def test_segments_are_the_layer() -> None:
    layer = whole("learned")
    twin = copy.deepcopy(layer)
    x = batch(0)
    assert torch.equal(by_segments(layer, x)[0][0], twin(x))


def test_nothing_outlives_its_last_reader() -> None:
    plan = Plan.of(whole("learned"), "the layer")
    assert set(plan.dead["attn"]) == {"x", "aux_loss"}
    assert set(plan.dead["dispatch"]) == {"leaving"}
    assert set(plan.dead["mlp"]) == {"rows"}
    assert set(plan.dead["combine"]) == {"made", "h", "gates", "routing"}


class Wrong:
    def __init__(self, *segments: object) -> None:
        self._segments = segments

    def segments(self) -> list[object]:
        return list(self._segments)


def keep(*values: object) -> object:
    return values if len(values) != 1 else values[0]


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (Wrong(compute("attn", keep, reads="x", writes="x")), "they are, in this order: attn, counts, host, dispatch"),
        (
            Wrong(compute("attn", keep, reads="y", writes="x"), compute("mlp", keep, reads="x", writes="x y")),
            "segment attn reads 'y', which nothing before it writes",
        ),
        (
            Wrong(compute("attn", keep, reads="x", writes="x"), compute("mlp", keep, reads="x", writes="y")),
            "the last segment writes x",
        ),
        (
            Wrong(
                compute("attn", keep, reads="x", writes="x"),
                exchange("dispatch", keep, reads="x", writes="x"),
                compute("mlp", keep, reads="x", writes="x"),
            ),
            "dispatch goes with combine",
        ),
    ],
)
def test_segments_that_do_not_fit_are_refused(layer: Wrong, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Plan.of(layer, "stage 0, layer 0")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one of attn, mlp, got 'dispatch'"):
        compute("dispatch", keep, reads="x", writes="x")


def test_a_segment_that_returns_too_much_is_refused() -> None:
    segment = compute("attn", lambda x: (x, x), reads="x", writes="h")
    with pytest.raises(ValueError, match="writes h, but returned 2 values"):
        Cut.forward(segment, {"x": Value(torch.zeros(1), False)})
