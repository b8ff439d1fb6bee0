"""Kinds made from types: a dataclass or TypedDict is checked, and has a JSON schema, without a second description."""

from __future__ import annotations

import types
from dataclasses import MISSING, fields, is_dataclass
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from treadle.fields.kinds import (
    Constant,
    Field,
    Flag,
    ListOf,
    Number,
    ObjectOf,
    OneOf,
    OrNull,
    RowOf,
    TableOf,
    Text,
    ValueKind,
)

_PLAIN: dict[object, ValueKind] = {int: Number(whole=True), float: Number(), str: Text(), bool: Flag()}


def kind_of(annotation: Any) -> ValueKind:
    """Return the kind of a type: a number, text, bool, Literal, list, tuple, dict, TypedDict, dataclass, or None too.

    `Annotated[type, kind]` is that kind; `Annotated[type, "words"]` describes a field of a TypedDict.

    Example:
        >>> kind_of(list[int] | None).schema()
        {'type': ['array', 'null'], 'items': {'type': 'integer'}}

    """
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        given = [each for each in inner[1:] if isinstance(each, ValueKind)]
        return given[-1] if given else kind_of(inner[0])
    if origin in (Union, types.UnionType):
        (some,) = [each for each in inner if each is not type(None)]
        return OrNull(kind_of(some))
    if origin is Literal:
        return OneOf(inner)
    if origin is tuple and inner[1:] != (...,):
        return RowOf(tuple(kind_of(each) for each in inner))
    if origin in (list, tuple):
        return ListOf(kind_of(inner[0]))
    if origin is dict:
        keys = next(iter(_about(inner[0], Text)), Text())
        return TableOf(kind_of(inner[1]), keys.pattern, key_form=f"not {keys.form}")
    if is_typeddict(annotation) or is_dataclass(annotation):
        return _object(annotation)
    return _PLAIN[annotation]


def versioned(name: str, version: int, annotation: Any) -> ObjectOf:
    """Return the kind of a printed object: its first key names it and its version, the others are those of a type."""
    key = Field(Constant(version, ", the version that is read here"), "The kind of this object, and its version.")
    described = kind_of(annotation)
    assert isinstance(described, ObjectOf)
    fields = {f"treadle-{name}": key, **described.fields}
    return ObjectOf(fields, f"an object with {', '.join(fields)}")


T = TypeVar("T")


def _about(annotation: Any, of: type[T]) -> list[T]:
    """Return what `Annotated` adds to a type, of one class."""
    added = get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()
    return [each for each in added if isinstance(each, of)]


def _object(cls: Any) -> ObjectOf:
    optional = {each.name for each in fields(cls) if _has_default(each)} if is_dataclass(cls) else set()
    made = {}
    for key, annotation in get_type_hints(cls, include_extras=True).items():
        left_out = get_origin(annotation) is NotRequired
        plain = get_args(annotation)[0] if left_out else annotation
        about = _about(plain, str)
        made[key] = Field(kind_of(plain), about[-1] if about else "", not left_out and key not in optional)
    return ObjectOf(made)


def _has_default(field: Any) -> bool:
    return field.default is not MISSING or field.default_factory is not MISSING
