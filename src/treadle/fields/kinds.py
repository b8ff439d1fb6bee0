"""Kinds of values: what a value may be, in words, as a check and as a JSON schema.

Checks list what is wrong, with its path; nothing is converted. `treadle.fields.typed` makes kinds from types.
"""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, NamedTuple, TypeAlias

from treadle.fields.nearest import did_you_mean, hint

FieldPath: TypeAlias = tuple[str, ...]
"""Keys from the outermost object inwards; the item of a list is `[3]`."""
Wrong: TypeAlias = tuple[FieldPath, str]
"""Where something is wrong, and the rest of the sentence: `is a whole number from 1, got 'x'`."""

INT64_MAX = 2**63 - 1
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def shown(value: object) -> str:
    """Return a value as an error's line shows it, at most 60 characters."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        few = 0 < len(value) <= 8 and not any(isinstance(item, Mapping | list | tuple) for item in value)
        text = f"[{', '.join(map(shown, value))}]" if few else ""
        return text if 0 < len(text) <= 60 else f"a list of {len(value)}"
    if isinstance(value, int) and abs(value) >= 10**40:
        return "a number of more than 40 digits"  # repr would itself refuse those of more than 4300
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def sentence(source: str, wrong: Wrong) -> str:
    """Return what is wrong in a file as a sentence: `mine.json: rows[1] is a list, got 3`."""
    path, message = wrong
    return f"{source}: {joined(path)} {message}" if path else f"{source} {message}"


def joined(path: FieldPath) -> str:
    """Return a path as text.

    Example:
        >>> joined(("lanes", "[3]", "peer"))
        'lanes[3].peer'

    """
    return "".join(part if part.startswith("[") or not at else f".{part}" for at, part in enumerate(path))


class ValueKind(ABC):
    """What a value may be."""

    @property
    @abstractmethod
    def words(self) -> str:
        """What a value is, for `{field} is {words}, got {value}`."""

    @abstractmethod
    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of a value."""

    @abstractmethod
    def wrong(self, value: object, path: FieldPath = ()) -> Iterator[Wrong]:
        """Yield what is wrong with a value."""

    def fits(self, value: object) -> bool:
        """Return whether nothing is wrong with a value."""
        return next(self.wrong(value), None) is None

    def check(self, value: object, name: str, way_out: str = "") -> None:
        """Raise ValueError unless a value of this name is of this kind; `way_out` ends the message."""
        if not self.fits(value):
            path, message = next(self.wrong(value, (name,)))
            raise ValueError(f"{joined(path)} {message}{f'; {way_out}' if way_out else ''}")


class Scalar(ValueKind):
    """A value without parts."""

    @abstractmethod
    def allows(self, value: object) -> bool:
        """Return whether a value is one of these."""

    def wrong(self, value: object, path: FieldPath = ()) -> Iterator[Wrong]:
        """Yield the value and what it should be, unless it is."""
        if not self.allows(value):
            yield path, f"is {self.words}, got {shown(value)}"

    def fits(self, value: object) -> bool:
        """Return whether a value is one of these."""
        return self.allows(value)


class Number(Scalar):
    """A number between two bounds, which are allowed themselves unless `above` or `below` is set. No bool, no NaN.

    Example:
        >>> Number(0, 1e6, above=True).words, Number(1, whole=True).fits(1.0)
        ('a number above 0, up to 1e+06', False)

    """

    def __init__(
        self,
        low: float | None = None,
        high: float | None = None,
        *,
        above: bool = False,
        below: bool = False,
        whole: bool = False,
    ) -> None:
        self.low, self.high, self.above, self.below, self.whole = low, high, above, below, whole

    @property
    def words(self) -> str:
        """The number and its bounds."""
        text = "a whole number" if self.whole else "a number"
        if self.low is not None:
            text += f" {'above' if self.above else 'from'} {self._bound(self.low)}"
        if self.high is not None:
            between = ", below" if self.below else ", up to" if self.above or self.low is None else " to"
            text += f"{between} {self._bound(self.high)}"
        return text

    def _bound(self, bound: float) -> str:
        return str(bound) if self.whole else f"{bound:g}"

    def allows(self, value: object) -> bool:
        """Return whether a value is such a number; true is none, and 1.0 is no whole one."""
        if isinstance(value, bool) or not isinstance(value, int if self.whole else (int, float)):
            return False
        if isinstance(value, float) and not math.isfinite(value):
            return False
        over = self.low is None or (value > self.low if self.above else value >= self.low)
        most = self.high if self.high is not None else INT64_MAX if self.whole else None
        return over and (most is None or (value < most if self.below else value <= most))

    def schema(self) -> dict[str, Any]:
        """Return the schema of a number with these bounds."""
        made: dict[str, Any] = {"type": "integer" if self.whole else "number"}
        if self.low is not None:
            made["exclusiveMinimum" if self.above else "minimum"] = self.low
        if self.high is not None:
            made["exclusiveMaximum" if self.below else "maximum"] = self.high
        return made

    def read(self, text: str) -> int | float | None:
        """Return the number that a text is; None if it is none of these."""
        try:
            value = int(text) if re.fullmatch(r"[+-]?[0-9]{1,18}", text) else math.nan if self.whole else float(text)
        except ValueError:
            return None
        return value if self.allows(value) else None


class Text(Scalar):
    """A text, of a form where there is a pattern, which `form` says in words."""

    def __init__(self, pattern: str | None = None, form: str = "a text") -> None:
        self.pattern, self.form = pattern, form

    @property
    def words(self) -> str:
        """The form."""
        return self.form

    def allows(self, value: object) -> bool:
        """Return whether a value is such a text."""
        return isinstance(value, str) and (self.pattern is None or re.fullmatch(self.pattern, value) is not None)

    def schema(self) -> dict[str, Any]:
        """Return the schema of a text."""
        return {"type": "string"} | ({"pattern": self.pattern} if self.pattern is not None else {})


class Flag(Scalar):
    """True or false."""

    @property
    def words(self) -> str:
        """The two."""
        return "true or false"

    def allows(self, value: object) -> bool:
        """Return whether a value is a bool."""
        return isinstance(value, bool)

    def schema(self) -> dict[str, Any]:
        """Return the schema of a bool."""
        return {"type": "boolean"}


class OneOf(Scalar):
    """One of some names."""

    def __init__(self, names: tuple[str, ...], what: str = "one of") -> None:
        self.names, self.what = names, what

    @property
    def words(self) -> str:
        """The names."""
        return f"{self.what} {', '.join(self.names)}"

    def allows(self, value: object) -> bool:
        """Return whether a value is one of the names."""
        return isinstance(value, str) and value in self.names

    def wrong(self, value: object, path: FieldPath = ()) -> Iterator[Wrong]:
        """Yield the value, the names and the nearest of them, unless it is one."""
        if not self.allows(value):
            near = hint(value, self.names) if isinstance(value, str) else ""
            yield path, f"is {self.words}, got {shown(value)}{near}"

    def schema(self) -> dict[str, Any]:
        """Return the schema of one of the names."""
        return {"type": "string", "enum": list(self.names)}


class Constant(Scalar):
    """One number, such as the version of a form."""

    def __init__(self, value: int, form: str = "") -> None:
        self.value, self.form = value, form

    @property
    def words(self) -> str:
        """The number."""
        return f"{self.value}{self.form}"

    def allows(self, value: object) -> bool:
        """Return whether a value is the number; true and 1.0 are not 1."""
        return type(value) is int and value == self.value

    def schema(self) -> dict[str, Any]:
        """Return the schema of the number."""
        return {"const": self.value}


class OrNull(ValueKind):
    """A value or null."""

    def __init__(self, kind: ValueKind) -> None:
        self.kind = kind

    @property
    def words(self) -> str:
        """The value, or null."""
        return f"{self.kind.words}, or null"

    def wrong(self, value: object, path: FieldPath = ()) -> Iterator[Wrong]:
        """Yield what is wrong with a value that is not null."""
        if value is not None:
            yield from self.kind.wrong(value, path)

    def schema(self) -> dict[str, Any]:
        """Return the schema with null among its types."""
        made = self.kind.schema()
        names = {"enum": [*made["enum"], None]} if "enum" in made else {}
        return {**made, **names, "type": [made["type"], "null"]}


class ListOf(ValueKind):
    """A list of values of one kind, of at least so many."""

    def __init__(self, item: ValueKind, least: int = 0, form: str = "") -> None:
        self.item, self.least, self.form = item, least, form

    @property
    def words(self) -> str:
        """The form, or a list and what its items are."""
        return self.form or f"a list{f' of at least {self.least}' if self.least else ''}, each item {self.item.words}"

    def wrong(self, value: object, path: FieldPath = ()) -> Iterator[Wrong]:
        """Yield what is wrong with the list, or with its items."""
        if not isinstance(value, list | tuple) or len(value) < self.least:
            yield path, f"is {self.words}, got {shown(value)}"
            return
        for place, item in enumerate(value):
            yield from self.item.wrong(item, (*path, f"[{place}]"))

    def schema(self) -> dict[str, Any]:
        """Return the schema of the list."""
        return {"type": "array", "items": self.item.schema()} | ({"minItems": self.least} if self.least else {})


class RowOf(ValueKind):
    """A list with a kind for each place."""

    def __init__(self, items: tuple[ValueKind, ...]) -> None:
        self.items = items

    @property
    def words(self) -> str:
        """The items."""
        return f"a list of {', '.join(item.words for item in self.items)}"

    def wrong(self, value: object, path: FieldPath = ()) -> Iterator[Wrong]:
        """Yield what is wrong with the list, or with its items."""
        if not isinstance(value, list | tuple) or len(value) != len(self.items):
            yield path, f"is {self.words}, got {shown(value)}"
            return
        for place, (kind, item) in enumerate(zip(self.items, value, strict=True)):
            yield from kind.wrong(item, (*path, f"[{place}]"))

    def schema(self) -> dict[str, Any]:
        """Return the schema of the list."""
        items = [item.schema() for item in self.items]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


class TableOf(ValueKind):
    """An object with values of one kind, under any key or under keys of a pattern."""

    def __init__(
        self, value: ValueKind, keys: str | None = None, form: str = "an object", key_form: str = "no key of it"
    ) -> None:
        self.value, self.keys, self.form, self.key_form = value, keys, form, key_form

    @property
    def words(self) -> str:
        """The object."""
        return self.form

    def wrong(self, value: object, path: FieldPath = ()) -> Iterator[Wrong]:
        """Yield what is wrong with the object, its keys or its values."""
        if not isinstance(value, Mapping):
            yield path, f"is {self.words}, got {shown(value)}"
            return
        for key, inner in value.items():
            if self.keys is not None and re.fullmatch(self.keys, key) is None:
                yield (*path, key), f"is {self.key_form}"
            else:
                yield from self.value.wrong(inner, (*path, key))

    def schema(self) -> dict[str, Any]:
        """Return the schema of the object."""
        made: dict[str, Any] = {"type": "object"}
        if self.keys is not None:
            made["propertyNames"] = {"pattern": self.keys}
        return {**made, "additionalProperties": self.value.schema()}


class Field(NamedTuple):
    """A field of a record: its kind, what it is about, and whether it may be left out."""

    kind: ValueKind
    about: str = ""
    required: bool = True


class ObjectOf(ValueKind):
    """An object with fields of their own kinds and no others. `form` is what it is in words."""

    def __init__(self, fields: Mapping[str, Field], form: str = "an object", names: tuple[str, ...] = ()) -> None:
        self.fields, self.form, self.names = fields, form, names

    @property
    def words(self) -> str:
        """The form."""
        return self.form

    def wrong(self, value: object, path: FieldPath = ()) -> Iterator[Wrong]:
        """Yield fields that are missing or not known, and what is wrong with the others."""
        if not isinstance(value, Mapping):
            yield path, f"is {self.words}, got {shown(value)}"
            return
        for key, field in self.fields.items():
            if field.required and key not in value:
                yield path, f"lacks {key}: {field.about}" if field.about else f"lacks {key}"
        for key, inner in value.items():
            if key not in self.fields:
                yield (*path, key), f"is not known; {self._way_out(key)}"
            else:
                yield from self.fields[key].kind.wrong(inner, (*path, key))

    def _way_out(self, key: str) -> str:
        found = did_you_mean(key, self.fields)
        return found if found.startswith("did") or not self.names else f"known are {', '.join(self.names)}"

    def schema(self) -> dict[str, Any]:
        """Return the schema of the object; each field has its description."""
        properties = {
            key: {**field.kind.schema()} | ({"description": field.about} if field.about else {})
            for key, field in self.fields.items()
        }
        required = [key for key, field in self.fields.items() if field.required]
        made: dict[str, Any] = {"type": "object", "additionalProperties": False, "properties": properties}
        return made | ({"required": required} if required else {})


class Anything(Scalar):
    """Any value."""

    @property
    def words(self) -> str:
        """Any value."""
        return "anything"

    def allows(self, value: object) -> bool:
        """Return True."""
        return True

    def schema(self) -> dict[str, Any]:
        """Return the schema of any value."""
        return {}


LIST = ListOf(Anything(), form="a list")
TABLE = TableOf(Anything())
COUNT = Number(0, whole=True)
FROM_1 = Number(1, whole=True)
AMOUNT = Number(0)
SHARE = Number(0, 1)

Count: TypeAlias = Annotated[int, COUNT]
"""A whole number from 0, in the type of a printed object."""
CountFrom1: TypeAlias = Annotated[int, FROM_1]
Amount: TypeAlias = Annotated[float, AMOUNT]
"""A number from 0."""
Positive: TypeAlias = Annotated[float, Number(0, above=True)]
Share: TypeAlias = Annotated[float, SHARE]
"""A number from 0 to 1."""
