"""A JSON object from outside, taken apart key by key; every error names the file, the place and what is allowed."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeAlias

Object: TypeAlias = dict[str, object]

INT64_MAX = 2**63 - 1


@dataclass(frozen=True)
class Fields:
    """The object at `where` in the file `source`."""

    source: str
    where: str
    content: Object

    @classmethod
    def of(cls, value: object, source: str, where: str) -> Fields:
        """The object that should be there."""
        if not isinstance(value, dict):
            raise ValueError(f"{source}: {where} is an object, got {shown(value)}")
        return cls(source, where, value)

    def error(self, key: str, allowed: str, value: object) -> ValueError:
        """Say which values a key allows, and which one came."""
        return ValueError(f"{self.source}: {self.where}.{key} is {allowed}, got {shown(value)}")

    def expect(self, keys: Collection[str], optional: Collection[str] = ()) -> None:
        """All of the keys, some of the optional ones, and no others."""
        known = (*keys, *optional)
        for key in self.content:
            if key not in known:
                close = difflib.get_close_matches(key, known, 1)
                hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
                raise ValueError(f"{self.source}: {self.where} has no key {shown(key)}; {hint}")
        for key in keys:
            if key not in self.content:
                raise ValueError(f"{self.source}: {self.where}.{key} is missing; it has {', '.join(known)}")

    def whole(self, key: str, low: int = 0, high: int = INT64_MAX) -> int:
        """A whole number; true and 1.0 are none."""
        return self._whole(self.content[key], key, low, high)

    def wholes(self, key: str, low: int = 0, high: int = INT64_MAX) -> tuple[int, ...]:
        """A list of at least one whole number."""
        values = self.listed(key)
        if not values:
            raise self.error(key, "a list of at least one whole number", values)
        return tuple(self._whole(value, f"{key}[{place}]", low, high) for place, value in enumerate(values))

    def _whole(self, value: object, key: str, low: int, high: int) -> int:
        if type(value) is not int or not low <= value <= high:  # bool is an int too
            raise self.error(key, f"a whole number from {low}" + (f" to {high}" if high < INT64_MAX else ""), value)
        return value

    def share(self, key: str) -> float:
        """A number from 0 to 1."""
        value = self.content[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise self.error(key, "a number from 0 to 1", value)
        return float(value)

    def factors(self, key: str) -> tuple[float, ...]:
        """A list of numbers above 0."""
        values = self.listed(key)
        for place, value in enumerate(values):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
                raise self.error(f"{key}[{place}]", "a number above 0", value)
        return tuple(float(value) for value in values if isinstance(value, int | float))

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of texts."""
        listed = Fields(self.source, self.where, {f"{key}[{n}]": value for n, value in enumerate(self.listed(key))})
        return tuple(listed.text(name) for name in listed.content)

    def text(self, key: str) -> str:
        """A text, which may be empty."""
        value = self.content[key]
        if not isinstance(value, str):
            raise self.error(key, "a text", value)
        return value

    def one_of(self, key: str, allowed: Collection[str], what: str) -> str:
        """One of some names."""
        value = self.content.get(key)
        if not isinstance(value, str) or value not in allowed:
            raise self.error(key, f"{what} ({', '.join(allowed)})", value)
        return value

    def flag(self, key: str) -> bool:
        """True or false."""
        value = self.content[key]
        if not isinstance(value, bool):
            raise self.error(key, "true or false", value)
        return value

    def listed(self, key: str) -> list[object]:
        """A list of anything."""
        value = self.content[key]
        if not isinstance(value, list):
            raise self.error(key, "a list", value)
        return value

    def inner(self, key: str) -> Fields:
        """The object at a key."""
        return Fields.of(self.content[key], self.source, f"{self.where}.{key}")


def shown(value: object) -> str:
    """Show a value, short enough for an error's line."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else f"a list of {len(value)}"
    if isinstance(value, int) and abs(value) >= 10**40:
        return "a number of more than 40 digits"  # repr would itself refuse those of more than 4300
    text = repr(value) if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def parse_json(text: bytes) -> object:
    """Parse strict JSON: no key twice in an object, no NaN."""
    return json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)


def _once(pairs: list[tuple[str, object]]) -> Object:
    content = dict(pairs)
    if len(content) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"{shown(twice)} is given twice in one object")
    return content


def _no_number(text: str) -> object:
    raise ValueError(f"{text} is no number of JSON")
