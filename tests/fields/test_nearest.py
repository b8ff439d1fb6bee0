"""The nearest known name."""

from __future__ import annotations

import pytest

from treadle.fields.nearest import did_you_mean, hint, nearest

GPUS = ["a100", "h100", "h800", "b300"]


@pytest.mark.parametrize(
    ("name", "known", "found"),
    [
        ("h1000", GPUS, "h100"),
        ("H100", GPUS, "h100"),
        ("mi300x", GPUS, None),
        ("pp_size", ["ep", "pp"], "pp"),
        ("step", ["model", "step_s"], "step_s"),
        ("layers.0.norm", ["layers.0.form", "model.layers.0.norm"], "model.layers.0.norm"),
        ("model.layers.0.norm", ["layers.0.norm"], "layers.0.norm"),
        ("x", [], None),
    ],
)
def test_the_nearest_name(name: str, known: list[str], found: str | None) -> None:
    assert nearest(name, known) == found
    assert hint(name, known) == (f"; did you mean {found!r}?" if found else "")


def test_without_a_near_name_the_known_ones_are_listed() -> None:
    assert did_you_mean("x", GPUS) == "known are a100, h100, h800, b300"
    assert did_you_mean("x", GPUS, most=2) == "known are a100, h100 and 2 more"
    assert did_you_mean("x", []) == "there is none"


def test_many_names_are_compared_in_a_bounded_number() -> None:
    known = [f"model.layers.{layer}.weight" for layer in range(140_000)]
    assert nearest("model.layers.139999.wait", known) is not None
