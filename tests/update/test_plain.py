"""Engines of tensors: what they can be made of. Each element has memory of its own."""

from __future__ import annotations

import pytest
import torch

from treadle.update import Plain, Source
from treadle.update.protocol.catalogue import check_layout, layout_digest
from treadle.update.protocol.update_messages import WeightLayout
from treadle.weights.tensor_boxes import Tensor
from treadle.wire.errors import WireError


def whole() -> torch.Tensor:
    return torch.zeros(10, 6)


@pytest.mark.parametrize(
    ("held", "text"),
    [
        ({"a": whole()[:6], "b": whole()}, None),
        ({"a": torch.zeros(4).expand(3, 4)}, "a of shape .* has elements that share memory, as an expanded"),
        ({"a": torch.arange(12.0).unfold(0, 4, 2)}, "a of shape .* has elements that share memory"),
        ({"a": torch.zeros(4, device="meta")}, "a is on the meta device"),
    ],
)
def test_tensors_without_memory_of_their_own_are_refused(held: dict[str, torch.Tensor], text: str | None) -> None:
    if text is None:
        Plain(held)
    else:
        with pytest.raises(ValueError, match=text):
            Plain(held)


@pytest.mark.parametrize(
    "cut",
    [
        lambda h: (h[:6], h[4:]),
        lambda h: (h, h[9, 5:]),
        lambda h: (h, h.T),
        lambda h: (h[:, :4], h[:, 3:]),
        lambda h: (h[::2], h[4]),
        lambda h: (h.view(torch.int32)[2], h[:3]),
        lambda h: (h, h),
    ],
)
def test_tensors_that_overlap_are_refused_by_name(cut: object) -> None:
    one, other = cut(whole())  # type: ignore[operator]
    with pytest.raises(ValueError, match="share memory, so that one overwrites the other"):
        Plain({"a": one, "between": torch.zeros(3), "b": other})


@pytest.mark.parametrize(
    "cut",
    [
        lambda h: (h[:5], h[5:]),
        lambda h: (h[:, :3], h[:, 3:]),
        lambda h: (h[::2], h[1::2]),
        lambda h: (h.T[:3], h.T[3:]),
        lambda h: tuple(h.view(5, 2, 6).unbind(1)),
        lambda h: (h[:0], h),
        lambda h: (h[3:4].expand(1, 6), h[:3]),
    ],
)
def test_views_that_are_apart_are_loaded_each(cut: object) -> None:
    held = {f"t{at}": view for at, view in enumerate(cut(whole()))}  # type: ignore[operator]
    engine = Plain(held)
    assert engine.layout().tied == ()


def test_a_tied_name_is_told_with_the_tensor_that_is_held() -> None:
    layout = Plain({"embed": whole()}, tied={"head": "embed"}).layout()
    assert layout.tied == (("head", "embed"),)
    assert layout_digest(layout) != layout_digest(Plain({"embed": whole()}).layout())
    for tied in ({"embed": "embed"}, {"head": "body"}):
        with pytest.raises(ValueError, match="tied names tensors that are not held, and of each the one that is"):
            Plain({"embed": whole()}, tied=tied)
        with pytest.raises(WireError, match="is said to be tied to"):
            check_layout(WeightLayout(layout.tensors, layout.pieces, tied=tuple(tied.items())))


def test_names_and_dtypes_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"a tensor's name is text without surrogates, got 'w\\udc80'"):
        Plain({"w\udc80": whole()})
    with pytest.raises(ValueError, match=r"without surrogates, got 'w\\udc80'; rename it"):
        Source.of({"w\udc80": whole()})
    with pytest.raises(ValueError, match=r"tensor w has dtype 'complex128'; known are .*complex64"):
        Plain({"w": torch.zeros(3, dtype=torch.complex128)})
    assert Tensor("wörter", (3,), "uint64").size_bytes == Tensor("w", (3,), "complex64").size_bytes == 24
