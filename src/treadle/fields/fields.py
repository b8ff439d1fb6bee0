"""An object of a file, read field by field; every error names the file, the place, what came and what is allowed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from treadle.fields.kinds import LIST, TABLE, Flag, ListOf, Number, Text, ValueKind, joined, shown
from treadle.fields.nearest import did_you_mean

Object: TypeAlias = dict[str, object]


@dataclass(frozen=True)
class Fields:
    """The object at `where` in the file `source`; `where` is "" for the whole file."""

    source: str
    where: str
    content: Mapping[str, object]

    @classmethod
    def of(cls, value: object, source: str, where: str) -> Fields:
        """Return the fields of an object, or raise if it is none."""
        return cls(source, where, Fields(source, "", {where: value}).get(where, TABLE))

    def __contains__(self, key: str) -> bool:
        return key in self.content

    def place(self, key: str) -> str:
        """Return the source and the place of a field, with which its errors begin."""
        return f"{self.source}: {joined((self.where, key) if self.where else (key,))}"

    def error(self, key: str, allowed: str, value: object) -> ValueError:
        """Return the error of a value that is not allowed."""
        return ValueError(f"{self.place(key)} is {allowed}, got {shown(value)}")

    def expect(self, keys: Collection[str], optional: Collection[str] = ()) -> None:
        """Raise unless there are all of the keys, some of the optional ones, and no others."""
        known = (*keys, *optional)
        for key in self.content:
            if key not in known:
                raise ValueError(f"{self.place(key)} is not known; {did_you_mean(key, known)}")
        for key in keys:
            if key not in self.content:
                raise ValueError(f"{self.place(key)} is missing; it has {', '.join(known)}")

    def get(self, key: str, kind: ValueKind) -> Any:
        """Return a value, or raise unless it is of the kind."""
        value = self.content[key]
        for path, message in kind.wrong(value, (key,)):
            raise ValueError(f"{self.place(joined(path))} {message}")
        return value

    def given(self, key: str, kind: ValueKind, default: Any) -> Any:
        """Return a value, or the default if it is absent or null."""
        return self.get(key, kind) if self.content.get(key) is not None else default

    def whole(self, key: str, low: int = 0, high: int | None = None) -> int:
        """Return a whole number; true and 1.0 are none."""
        number: int = self.get(key, Number(low, high, whole=True))
        return number

    def wholes(self, key: str, low: int = 0, high: int | None = None) -> tuple[int, ...]:
        """Return the items of a list of at least one whole number."""
        return tuple(self.get(key, ListOf(Number(low, high, whole=True), least=1)))

    def text(self, key: str) -> str:
        """Return a text, which may be empty."""
        text: str = self.get(key, Text())
        return text

    def flag(self, key: str) -> bool:
        """Return true or false."""
        flag: bool = self.get(key, Flag())
        return flag

    def listed(self, key: str) -> list[Any]:
        """Return a list of anything."""
        value: list[Any] = self.get(key, LIST)
        return value

    def inner(self, key: str) -> Fields:
        """Return the fields of the object at a key."""
        return Fields.of(self.content[key], self.source, joined((self.where, key) if self.where else (key,)))
