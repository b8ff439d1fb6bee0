"""What is noted of an engine's reads of the tensors that it is given."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from treadle.update.adapters.vllm.weight_reads import WeightReads, box_around
from treadle.weights.tensor_boxes import Box

SHAPE = (6, 4, 5)


def reads(whole: torch.Tensor, filled: Box | None = None) -> WeightReads:
    noted = WeightReads()
    noted.give("w", whole, filled if filled is not None else Box.whole(tuple(whole.shape)))
    return noted


def test_loaders_that_cut_are_seen_to_read_their_part() -> None:
    whole, param = torch.randn(8, 6), torch.zeros(2, 6)
    noted = reads(whole)
    with noted:
        assert whole.shape == (8, 6)
        assert not noted.boxes  # a shape is no element, and a view reads none
        param.copy_(whole.narrow(0, 4, 2))
    assert noted.boxes == {"w": Box((4, 0), (6, 6))}
    with noted:
        param.t()[:, 0].copy_(whole[7])  # a second read: a box around both
    assert noted.boxes == {"w": Box((4, 0), (8, 6))}


USES: dict[str, tuple[Callable[[torch.Tensor], object], Box | None]] = {
    "a sum": (lambda whole: whole.sum(), Box((0, 0), (8, 6))),
    "a cast": (lambda whole: whole[1:3].to(torch.float64), Box((1, 0), (3, 6))),
    "a number": (lambda whole: whole[3, 2].item(), Box((3, 2), (4, 3))),
    "a list": (lambda whole: torch.stack([whole[3], whole[5]]), Box((3, 0), (6, 6))),
    "a branch": (lambda whole: bool(whole[0, 0] > 0), Box((0, 0), (1, 1))),
    "a view": (lambda whole: whole[3, 2], None),
    "no elements": (lambda whole: whole[3:3].clone(), None),
}


@pytest.mark.parametrize("name", USES)
def test_whatever_is_done_with_elements_reads_them(name: str) -> None:
    use, box = USES[name]
    whole = torch.randn(8, 6)
    noted = reads(whole)
    with noted:
        use(whole)
    assert noted.boxes == ({"w": box} if box is not None else {})


@pytest.mark.parametrize("seed", range(300))
def test_boxes_around_views(seed: int) -> None:
    """By brute force: no element that the view has is outside, and a cut of a tensor is exactly its box."""
    chance = random.Random(seed)
    numbers = torch.arange(6 * 4 * 5).view(SHAPE)
    view, is_cut = numbers, True
    for _ in range(chance.randrange(1, 5)):
        how = chance.choice(("narrow", "narrow", "select", "transpose", "flat", "step", "expand"))
        if how == "narrow" and view.dim():
            dim = chance.randrange(view.dim())
            start = chance.randrange(view.shape[dim])
            view = view.narrow(dim, start, chance.randrange(1, view.shape[dim] - start + 1))
        elif how == "select" and view.dim():
            dim = chance.randrange(view.dim())
            view = view.select(dim, chance.randrange(view.shape[dim]))
        elif how == "transpose" and view.dim() > 1:
            view = view.transpose(*chance.sample(range(view.dim()), 2))
        elif how == "flat" and view.is_contiguous():
            view, is_cut = view.view(-1), False
        elif how == "step" and view.dim():
            view, is_cut = view[:: chance.randrange(1, 4)], False
        elif how == "expand":
            view = view.unsqueeze(0).expand(3, *view.shape)
    box = box_around(view, SHAPE)
    inside = numbers[box.slices(Box.whole(SHAPE))]
    assert set(view.flatten().tolist()) <= set(inside.flatten().tolist())
    if is_cut:
        assert set(view.flatten().tolist()) == set(inside.flatten().tolist())


def test_a_read_outside_of_what_came_is_told() -> None:
    whole = torch.zeros(8, 6)
    noted = reads(whole, Box((4, 0), (6, 6)))
    with noted:
        whole.narrow(0, 4, 2).clone()
    assert noted.boxes == {"w": Box((4, 0), (6, 6))}
    assert noted.outside == ""
    with noted:
        whole.narrow(0, 3, 2).clone()
    assert noted.outside == "w [3:5, 0:6], of which [4:6, 0:6] came"
    assert noted.boxes == {"w": Box((3, 0), (6, 6))}  # asked for next time
    noted.begin()
    assert not noted.outside


def test_a_tensor_that_is_kept_counts_as_read_whole() -> None:
    kept, dropped = torch.zeros(8, 6), torch.zeros(8, 6)
    noted = reads(kept)
    noted.give("dropped", dropped, Box.whole((8, 6)))
    del dropped
    noted.keep_whole()
    assert noted.boxes == {"w": Box((0, 0), (8, 6))}


def test_memory_that_is_used_again_is_another_tensor() -> None:
    noted = WeightReads()
    for _ in range(100):
        noted.give("w", torch.zeros(1 << 16), Box.whole((1 << 16,)))
        other = torch.zeros(1 << 16)
        with noted:
            other.sum()
        assert not noted.boxes
