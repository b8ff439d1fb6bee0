"""Expert parallelism's exchange: the same numbers as one process that has all experts."""

from __future__ import annotations

import copy
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ranks import check, run_ranks
from weft.moe import MoELayer
from weft.runtime.groups import Circle
from weft.runtime.segments import Cut, Plan, Value, compute, drop, exchange

WIDTH, HIDDEN, EXPERTS, TOKENS = 8, 12, 4, 24
ROUTES = ("learned", "one expert", "none to a rank")


def whole(route: str) -> MoELayer:
    """The layer with all experts; its router is bent by a bias-like weight on a feature that is always 1."""
    torch.manual_seed(3)
    layer = MoELayer(WIDTH, HIDDEN, EXPERTS, top_k=1 if route == "one expert" else 2, balance=0.1).double()
    with torch.no_grad():
        layer.expert_norm.bias[0] = 5.0
        if route == "one expert":
            layer.router.score.weight[:, 0] = torch.tensor([0.0, 0.0, 100.0, 0.0])
        if route == "none to a rank":
            layer.router.score.weight[:, 0] = torch.tensor([50.0, 50.0, -50.0, -50.0])
    return layer


def part(layer: MoELayer, ep: int, rank: int) -> MoELayer:
    """A rank's part of it: everything but the experts, of which it has its own."""
    own = EXPERTS // ep
    mine = MoELayer(WIDTH, HIDDEN, EXPERTS, top_k=layer.router.top_k, ep=ep, ep_rank=rank, balance=0.1).double()
    wanted = {}
    for name, value in layer.state_dict().items():
        pieces = name.split(".")
        if pieces[0] == "experts":
            number = int(pieces[2]) - rank * own
            if not 0 <= number < own:
                continue
            pieces[2] = str(number)
        wanted[".".join(pieces)] = value
    mine.load_state_dict(wanted)
    return mine


def batch(rank: int) -> Tensor:
    torch.manual_seed(100 + rank)
    return torch.randn(TOKENS, WIDTH, dtype=torch.float64)


def by_segments(layer: MoELayer, x: Tensor) -> tuple[Tensor, Tensor]:
    """Forward segment by segment, then backward the other way round; the output and the input's gradient."""
    plan = Plan.of(layer, "the layer")
    values = {"x": Value(x, True)}
    first, cuts = values["x"], {}
    for name, segment in plan.segments.items():
        cuts[name] = Cut.forward(segment, values)
        if "aux_loss" in segment.writes:
            values["aux_loss"].grad = torch.ones((), dtype=torch.float64)
        drop(values, plan.dead[name])
    out = values.pop("x")
    made: Tensor = out.thing
    out.grad = 2 * made / made.numel()  # of the mean square
    for name in ("combine", "mlp", "dispatch", "host", "counts", "attn"):
        cuts[name].backward()
    assert first.grad is not None
    return made, first.grad


def one_rank(rank: int, route: str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    world = dist.get_world_size()
    layer = part(whole(route), world, rank)
    wait = timedelta(seconds=30)
    layer.exchange.party = Circle("experts", list(range(world)), rank, wait, lambda work: work.wait(wait))
    made, grad = by_segments(layer, batch(rank))
    return made, grad, {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("ep", [2, 4])
def test_as_in_one_process(route: str, ep: int) -> None:
    results = check(run_ranks(ep, one_rank, route))
    layer = whole(route)
    batches = [batch(rank).requires_grad_() for rank in range(ep)]
    for rank, x in enumerate(batches):  # each rank's own batch, through the layer with all experts
        h, tokens, gates, routing, aux = layer.attn(x)
        routing = layer.wait(layer.count(routing))
        made = layer.combine(layer.mlp(layer.dispatch(tokens, routing), routing), h, gates, routing)
        torch.autograd.backward(made.square().mean() + aux)
        assert torch.allclose(results[rank][0], made, rtol=1e-12, atol=1e-12)
        assert x.grad is not None
        assert torch.allclose(results[rank][1], x.grad, rtol=1e-10, atol=1e-12)
    own = EXPERTS // ep
    for name, param in layer.named_parameters():
        pieces = name.split(".")
        if pieces[0] == "experts":
            rank, pieces[2] = divmod(int(pieces[2]), own)[0], str(int(pieces[2]) % own)
            got = results[rank][2][".".join(pieces)]
        else:
            got = torch.stack([grads[name] for _, _, grads in results]).sum(0)
        assert param.grad is not None
        assert torch.allclose(got, param.grad, rtol=1e-10, atol=1e-12), name


def test_segments_are_the_layer() -> None:
    layer = whole("learned")
    twin = copy.deepcopy(layer)
    x = batch(0)
    made, _ = by_segments(layer, x)
    assert torch.equal(made, twin(x))


def test_nothing_outlives_its_last_reader() -> None:
    plan = Plan.of(whole("learned"), "the layer")
    assert set(plan.dead["attn"]) == {"x", "aux_loss"}
    assert set(plan.dead["dispatch"]) == {"tokens"}
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
            Wrong(compute("attn", keep, reads="x", writes="x"), compute("mlp", keep, reads="y", writes="x")),
            "segment mlp reads 'y', which nothing before it writes",
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
