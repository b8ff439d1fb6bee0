"""Pieces that do not fit their names, pieces wanted twice, tied weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.support.devices import DEVICE_TYPE
from tests.support.ranks import check, run_ranks
from tests.support.update.engines import SMALL
from treadle.update import Plain, Source
from treadle.update.adapters.transformers import named_weights
from treadle.update.rank.shares import Shares
from treadle.update.worker.arrived_boxes import Arrival, Assembly
from treadle.update.worker.staging import assembled
from treadle.update.worker.worker_plan import boxes_by_name, shortfall
from treadle.weights.tensor_boxes import Box, Holding, Piece, Tensor
from treadle.weights.update_plan import plan_update


def test_what_is_held_is_what_is_named() -> None:
    with pytest.raises(ValueError, match="w is held as float16, it is named as bfloat16"):
        Plain({"w": torch.zeros(4, dtype=torch.float16)}, tensors={"w": Tensor("w", (4,), "bfloat16")})


def test_a_source_of_pieces_says_what_does_not_fit() -> None:
    tensors = {name: Tensor(name, (8, 4), "float32") for name in ("w", "v")}
    halves = Piece("w", Box((0, 0), (4, 4))), Piece("w", Box((4, 0), (8, 4)))
    holding = Holding(tensors, ((halves[0],), (halves[1],), halves, ()))
    source = Source.of({"w": torch.zeros(4, 4)}, holding, 1)
    assert list(source.held) == [halves[1]]
    with pytest.raises(ValueError, match=r"gives rank 2 \[0:4, 0:4\] and \[4:8, 0:4\] of w, and the state has one"):
        Source.of({"w": torch.zeros(4, 4)}, holding, 2)
    with pytest.raises(ValueError, match="the state has u, the holding does not know it"):
        Source.of({"w": torch.zeros(4, 4), "u": torch.zeros(3)}, holding, 0)
    with pytest.raises(ValueError, match="the state has w, the holding gives rank 3 nothing of it"):
        Source.of({"w": torch.zeros(4, 4)}, holding, 3)
    assert not Source.of({"w": torch.zeros(0, 4)}, holding, 3).held


def test_what_is_wanted_twice_comes_once() -> None:
    tensor = Tensor("w", (6,), "float32")
    pieces = Piece("w", Box((0,), (4,))), Piece("w", Box((2,), (6,))), Piece("w", Box((0,), (4,)))
    have = Holding({"w": tensor}, ((Piece("w", Box.whole((6,))),),))
    plan = Shares(plan_update(have, Holding({"w": tensor}, (pieces,)), SMALL)).of_worker(0, exports=False)
    assert shortfall(plan, pieces) == []
    assert shortfall(plan, [*pieces, Piece("v", Box((0,), (1,)))]) == ["v"]
    numbers = torch.arange(6.0)
    parts = [
        Arrival("w", take.box, numbers[take.box.slices(Box((0,), (6,)))])
        for share in plan.shares
        for take in share.takes
    ]
    made = assembled(Assembly(), parts, boxes_by_name(pieces))
    assert {str(arrival.box): arrival.tensor.tolist() for arrival in made} == {
        "[0:4]": [0, 1, 2, 3],
        "[2:6]": [2, 3, 4, 5],
    }
    assert len(made) == 2
    with pytest.raises(ValueError, match=r"w \[4:6\] was never wanted"):
        assembled(Assembly(), parts, boxes_by_name(pieces[:1]))


class Tied(nn.Module):
    """Two of three weights are one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle, self.head = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.narrow = nn.Linear(8, 1)
        self.head.weight = self.embed.weight


def sharded_names(rank: int) -> tuple[list[str], list[str]]:
    net = Tied()
    fully_shard(net, mesh=init_device_mesh(DEVICE_TYPE, (2,)))
    with torch.device("meta"):
        meta = Tied()
    return sorted(named_weights(net)), sorted(named_weights(meta))


def test_only_tied_weights_are_one_however_they_are_held() -> None:
    names = ["embed.weight", "middle.weight", "narrow.bias", "narrow.weight"]
    assert sorted(named_weights(Tied())) == names
    for sharded, meta in check(run_ranks(2, sharded_names)):
        assert sharded == names  # of the second rank, those of the narrow one are empty
        assert meta == names
