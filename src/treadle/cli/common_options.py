"""Options that commands share: a command takes a dataclass of them as one parameter, a user gives its fields.

@dataclass(frozen=True)
class Size:
    pp: Annotated[int, typer.Option("--pp")] = 1

@spread_options
def show(size: Size, rows: bool = False) -> None: ...      # treadle show --pp 4 --rows
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from fractions import Fraction
from typing import Annotated, Any, get_type_hints

import typer

Json = Annotated[bool, typer.Option("--json", help="JSON for programs to read.")]


def spread_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the fields of its dataclass parameters as parameters of its own."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            parameters += _parameters(groups[name])
        else:
            parameters.append(parameter.replace(annotation=hints[name]))

    @functools.wraps(command)
    def spread(**given: Any) -> None:
        whole = {
            name: kind(**{field.name: given.pop(field.name) for field in fields(kind)}) for name, kind in groups.items()
        }
        command(**whole, **given)

    keyword = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    spread.__signature__ = inspect.Signature(keyword)  # type: ignore[attr-defined]  # typer reads the parameters here
    spread.__annotations__ = {p.name: p.annotation for p in parameters}
    return spread


def _parameters(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=_default(field), annotation=hints[field.name]
        )
        for field in fields(group)
    ]


def _default(field: Field[Any]) -> Any:
    return inspect.Parameter.empty if field.default is MISSING else field.default


_UNITS = {"": 1, "B": 1} | {f"{p}{s}": b**n for n, p in enumerate("KMGT", 1) for s, b in (("B", 1000), ("iB", 1024))}


_MEANT = {unit.lower(): unit for unit in _UNITS} | {prefix.lower(): f"{prefix}iB" for prefix in "KMGT"}
"""Units by what is written for them by mistake: g, gb, gib."""


def parse_bytes(text: str) -> int:
    """`80GB`, `512MiB`, `4e9`."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?(?:e[0-9]{1,2})?)\s*([A-Za-z]*)", text)
    if match is None or match[2] not in _UNITS:
        meant = _MEANT.get(match[2].lower()) if match is not None else None
        written = f"{match[1]}{meant}" if match is not None and meant is not None else "80GB, 512MiB or 4e9"
        raise ValueError(f"{text!r} is not a number of bytes; write {written}")
    return int(float(match[1]) * _UNITS[match[2]])


def parse_count(text: str) -> int:
    """Return a count: `4194304`, `4,194,304`, `4M` for 4,000,000, `4Mi` for 4,194,304."""
    match = re.fullmatch(r"([0-9]+(?:[,_][0-9]{3})*(?:\.[0-9]+)?)([KMGT]i?|)", text)
    if match is None:
        raise ValueError(f"{text!r} is not a count; write 4194304, 4M (4,000,000) or 4Mi (4,194,304)")
    count = Fraction(re.sub("[,_]", "", match[1])) * _UNITS[f"{match[2]}B" if match[2] else ""]
    if count.denominator != 1:
        raise ValueError(f"a count is whole, got {text}; write {round(count)}, or a prefix such as {match[1]}T")
    return int(count)


def parse_layers(text: str | None) -> int | tuple[int, ...] | None:
    """`4`, or one number for each stage: `4,4,3,3`."""
    if text is None:
        return None
    if re.fullmatch(r"[1-9][0-9]{0,3}(,[1-9][0-9]{0,3})*", text) is None:
        raise ValueError(f"--layers takes a number from 1, or one for each stage such as 4,4,3,3, got {text!r}")
    numbers = tuple(map(int, text.split(",")))
    return numbers[0] if len(numbers) == 1 else numbers


def parse_ranks(text: str | None) -> range | None:
    """`3`, or from the first to the last: `0-7`."""
    if text is None:
        return None
    match = re.fullmatch(r"([0-9]{1,7})(?:-([0-9]{1,7}))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match is not None else (1, 0)
    if last < first:
        raise ValueError(f"ranks are one, or the first and the last such as 0-7, got {text!r}")
    return range(first, last + 1)
