"""Kinds of values: words, checks and schemas say the same, and a type is enough to have all three."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.fields.kinds import (
    INT64_MAX,
    Amount,
    Count,
    Number,
    OneOf,
    Text,
    ValueKind,
    joined,
    sentence,
    shown,
)
from treadle.fields.typed import kind_of, versioned


class Inner(TypedDict):
    name: Annotated[str, "What it is called."]
    share: Annotated[float, Number(0, 1), "A share."]


class Outer(TypedDict):
    mode: Annotated[Literal["slow", "fast"], "How."]
    count: Annotated[Count | None, "How many."]
    rows: Annotated[list[Inner], "One after the other."]
    by_rank: Annotated[dict[Annotated[str, Text("^[0-9]+$", "a rank")], Amount], "A number for each rank."]
    ops: Annotated[list[tuple[str, float]], "Name and start."]
    note: NotRequired[Annotated[str | None, "Anything."]]


GOOD: dict[str, Any] = {
    "treadle-test": 3,
    "mode": "slow",
    "count": None,
    "rows": [{"name": "a", "share": 1}],
    "by_rank": {"0": 1.5},
    "ops": [["F", 0.0]],
}
KIND = versioned("test", 3, Outer)

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"treadle-test": 2}, "f: treadle-test is 3, the version that is read here, got 2"),
    ({"mode": "fats"}, "f: mode is one of slow, fast, got 'fats'; did you mean 'fast'?"),
    ({"count": -1}, "f: count is a whole number from 0, got -1"),
    ({"count": True}, "f: count is a whole number from 0, got true"),
    ({"count": 1.5}, "f: count is a whole number from 0, got 1.5"),
    ({"rows": {}}, "f: rows is a list, each item an object, got an object"),
    ({"rows": [{"name": "a", "share": 2}]}, "f: rows[0].share is a number from 0 to 1, got 2"),
    ({"rows": [{"name": "a"}]}, "f: rows[0] lacks share: A share."),
    ({"rows": [{"name": "a", "share": 0, "shape": 1}]}, "f: rows[0].shape is not known; did you mean 'share'?"),
    ({"by_rank": {"zero": 1}}, "f: by_rank.zero is not a rank"),
    ({"by_rank": {"0": "1"}}, "f: by_rank.0 is a number from 0, got '1'"),
    ({"ops": [["F"]]}, "f: ops[0] is a list of a text, a number, got ['F']"),
    ({"note": 3}, "f: note is a text, got 3"),
    ({"modes": 3}, "f: modes is not known; did you mean 'mode'?"),
]


def test_what_fits_a_type_fits_its_schema() -> None:
    assert list(KIND.wrong(GOOD)) == []
    jsonschema.Draft202012Validator.check_schema(KIND.schema())
    assert jsonschema.Draft202012Validator(KIND.schema()).is_valid(GOOD)


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_what_is_wrong_has_its_place_and_does_not_fit_the_schema(change: dict[str, Any], message: str) -> None:
    changed = {**GOOD, **change}
    assert [sentence("f", wrong) for wrong in KIND.wrong(changed)] == [message]
    assert not jsonschema.Draft202012Validator(KIND.schema()).is_valid(changed)


@pytest.mark.parametrize("key", GOOD)
def test_a_field_that_is_missing_is_named(key: str) -> None:
    left = {name: value for name, value in GOOD.items() if name != key}
    assert [message.partition(":")[0] for _, message in KIND.wrong(left)] == [f"lacks {key}"]
    assert not jsonschema.Draft202012Validator(KIND.schema()).is_valid(left)


def test_all_that_is_wrong_is_listed() -> None:
    assert len(list(KIND.wrong({**GOOD, "count": -1, "mode": 3, "by_rank": {"0": -1, "1": -2}}))) == 4


NUMBERS: list[ValueKind] = [
    Number(0),
    Number(0, 1),
    Number(0, above=True),
    Number(0, 5, above=True, below=True),
    Number(1, 9, whole=True),
    Number(-3, whole=True),
    Number(high=4),
]


@given(
    st.sampled_from(NUMBERS), st.one_of(st.integers(-10, 10), st.floats(-10, 10), st.booleans(), st.text(max_size=2))
)
def test_numbers_fit_as_their_schemas_say(kind: ValueKind, value: object) -> None:
    same = jsonschema.Draft202012Validator(kind.schema()).is_valid(value)
    if isinstance(value, float) and value.is_integer() and kind.schema()["type"] == "integer":
        same = False  # JSON Schema takes 1.0 for an integer; files that say 1.0 are refused
    assert kind.fits(value) == same


@pytest.mark.parametrize("value", [float("nan"), float("inf"), INT64_MAX + 1, 10**400])
def test_numbers_past_all_numbers_are_refused(value: float) -> None:
    assert not Number(0, whole=True).fits(value)
    assert not Number(0, 1e12).fits(value)


@given(st.integers(0, 10**15), st.floats(0.001, 1e9))
def test_numbers_are_read_from_text(whole: int, number: float) -> None:
    assert Number(0, whole=True).read(str(whole)) == whole
    assert Number(0).read(repr(number)) == number


@pytest.mark.parametrize("text", ["", "x", "1.5", "1e3", "-1", "nan", "1_000", " 1", "1" * 40])
def test_texts_that_are_no_whole_number_from_0(text: str) -> None:
    assert Number(0, whole=True).read(text) is None


@dataclass(frozen=True)
class Group:
    sizes: tuple[int, ...] = ()
    kind: Literal["a", "b"] = "a"


@dataclass(frozen=True)
class Config:
    name: str
    group: Group = field(default_factory=Group)


def test_fields_of_a_dataclass_with_defaults_may_be_left_out() -> None:
    kind = kind_of(Config)
    assert kind.fits({"name": "x"})
    assert kind.fits({"name": "x", "group": {"sizes": [1, 2]}})
    assert [(joined(path), message) for path, message in kind.wrong({"group": {"sizes": [1, "2"], "kind": "c"}})] == [
        ("", "lacks name"),
        ("group.sizes[1]", "is a whole number, got '2'"),
        ("group.kind", "is one of a, b, got 'c'"),
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (None, "null"),
        ("x" * 100, "'" + "x" * 56 + "..."),
        ([1, "a"], "[1, 'a']"),
        ([], "a list of 0"),
        ([[1]], "a list of 1"),
        (list(range(9)), "a list of 9"),
        ({"a": 1}, "an object"),
        (10**50, "a number of more than 40 digits"),
    ],
)
def test_values_are_shown_in_a_line(value: object, text: str) -> None:
    assert shown(value) == text


def test_a_number_that_repr_refuses_is_shown() -> None:
    assert shown(10**5000) == "a number of more than 40 digits"


def test_a_pattern_is_of_the_whole_text() -> None:
    assert not Text("^a$").fits("a\n")
    assert OneOf(("a",)).schema() == {"type": "string", "enum": ["a"]}
