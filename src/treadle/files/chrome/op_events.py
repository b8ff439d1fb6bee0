"""The events of a Chrome-trace file -> columns. Types are looked at a column at a time: there may be a million ops."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np

from treadle.fields.kinds import shown
from treadle.files.checked_columns import DTYPES, Column
from treadle.files.chrome.scale import TickScale
from treadle.ir.ops import OpKind
from treadle.ir.program import NEVER, Longs

_EVENT_KEYS = frozenset(("ph", "name", "cat", "pid", "tid", "ts", "dur", "args"))
_ARG_KEYS = frozenset(("index", "kind", "mb", "chunk", "layer", "cell", "launch", "bytes", "deps"))
_JOINED_KEYS = _ARG_KEYS | {"joined"}
_DERIVED = ("M", "s", "f")
"""Names and arrows: what viewers need and `dump` makes from the rest."""

_COLUMNS = {"mb": "mb", "chunk": "chunk", "layer": "layer", "cell": "cell", "launch": "launch", "bytes": "size_bytes"}
_CODES = {kind.name: int(kind) for kind in OpKind}
_LONG = np.dtype(np.int64)


@dataclass(frozen=True)
class Ops:
    """The complete events of a file, with their places in `traceEvents`, which is how errors name them."""

    source: str
    events: list[Any]
    places: list[int]

    @classmethod
    def of(cls, events: list[Any], source: str) -> Ops:
        """Take the ops, let what viewers need pass, and refuse anything else."""
        places = []
        for place, event in enumerate(events):
            phase = event.get("ph") if isinstance(event, dict) else None
            if phase == "X":
                places.append(place)
            elif phase not in _DERIVED:
                came = f"ph {shown(phase)}" if isinstance(event, dict) else shown(event)
                raise ValueError(f"{source}: traceEvents[{place}] is an event of ph X, M, s or f, got {came}")
        ops = cls(source, [events[place] for place in places], places)
        ops._check_keys()
        return ops

    def _check_keys(self) -> None:
        for number, event in enumerate(self.events):
            if event.keys() != _EVENT_KEYS:
                raise self._error(number, _difference("an op", event, _EVENT_KEYS))
            args = event["args"]
            if not isinstance(args, dict):
                raise self._error(number, f"args is an object, got {shown(args)}")
            if args.keys() != _ARG_KEYS and args.keys() != _JOINED_KEYS:
                raise self._error(number, _difference("args", args, _ARG_KEYS))

    def _error(self, number: int, message: str) -> ValueError:
        return ValueError(f"{self.source}: traceEvents[{self.places[number]}]: {message}")

    @cached_property
    def index(self) -> Longs:
        """Which op of the Program each event is."""
        return self._argument("index", _LONG)

    def check_places(self, lanes: dict[str, Column]) -> None:
        """Each event on the thread of a lane (`lanes` is sorted by tid) that has its op, in that lane's process."""
        tid, pid = self._field("tid", _LONG), self._field("pid", _LONG)
        row = np.searchsorted(lanes["tid"], tid)
        lane = {key: np.append(column, NEVER)[row] for key, column in lanes.items()}  # past the last: no lane
        right = (lane["tid"] == tid) & (lane["rank"] + 1 == pid)
        right &= (self.index >= lane["first"]) & (self.index < lane["first"] + lane["num_ops"])
        if not right.all():
            number = int(np.flatnonzero(~right)[0])
            where = f"pid {pid[number]} and tid {tid[number]}"
            raise self._error(number, f"op {self.index[number]} is of no lane with {where} in treadle.lanes")

    def columns(self, scale: TickScale) -> dict[str, Column]:
        """All columns of the ops but `dep`, and how many entries of that each has."""
        columns = {name: self._argument(key, DTYPES[name]) for key, name in _COLUMNS.items()}
        start, dur = self._ticks("ts", scale), self._ticks("dur", scale)
        num_deps = np.array([len(deps) for deps in self._deps], np.int64)
        times = {"start": scale.origin + start, "end": scale.origin + start + dur}
        return {
            "index": self.index,
            "kind": self._kind(),
            "joined": self._joined(),
            "num_deps": num_deps,
            **columns,
            **times,
        }

    @cached_property
    def _deps(self) -> list[list[Any]]:
        deps = list(map(itemgetter("deps"), self._args))
        if set(map(type, deps)) - {list}:
            number = next(n for n, value in enumerate(deps) if not isinstance(value, list))
            raise self._error(number, f"args.deps is a list, got {shown(deps[number])}")
        return deps

    def dep(self) -> Column:
        """The dependencies of all ops, one behind the other."""
        owner = np.repeat(np.arange(len(self._deps)), [len(deps) for deps in self._deps])
        return self._whole(list(chain.from_iterable(self._deps)), "args.deps", DTYPES["dep"], owner)

    @cached_property
    def _args(self) -> list[Any]:
        return list(map(itemgetter("args"), self.events))

    def _field(self, key: str, dtype: np.dtype[Any]) -> Column:
        return self._whole(list(map(itemgetter(key), self.events)), key, dtype)

    def _argument(self, key: str, dtype: np.dtype[Any]) -> Column:
        return self._whole(list(map(itemgetter(key), self._args)), f"args.{key}", dtype)

    def _whole(self, values: list[Any], name: str, dtype: np.dtype[Any], owner: Longs | None = None) -> Column:
        """A column of whole numbers; `owner` says whose they are where that is not one each."""
        low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
        if set(map(type, values)) - {int} or (values and not (low <= min(values) and max(values) <= high)):
            wrong = next(n for n, value in enumerate(values) if type(value) is not int or not low <= value <= high)
            number = wrong if owner is None else int(owner[wrong])
            raise self._error(number, f"{name} is a whole number from {low} to {high}, got {shown(values[wrong])}")
        return np.array(values, dtype)

    def _kind(self) -> Column:
        names = list(map(itemgetter("kind"), self._args))
        if set(map(type, names)) - {str} or set(names) - _CODES.keys():
            number = next(n for n, name in enumerate(names) if not isinstance(name, str) or name not in _CODES)
            allowed = ", ".join(_CODES)
            raise self._error(number, f"args.kind is a kind of op ({allowed}), got {shown(names[number])}")
        return np.array([_CODES[name] for name in names], DTYPES["kind"])

    def _joined(self) -> Column:
        joined = [args.get("joined", False) for args in self._args]
        if set(map(type, joined)) - {bool}:
            number = next(n for n, value in enumerate(joined) if not isinstance(value, bool))
            raise self._error(number, f"args.joined is true or false, got {shown(joined[number])}")
        return np.array(joined, DTYPES["joined"])

    def _ticks(self, key: str, scale: TickScale) -> Longs:
        values = list(map(itemgetter(key), self.events))
        ticks, wrong = scale.ticks(values)
        if wrong is not None:
            allowed = "with at most three decimals" if scale.decimals else "without decimals"
            raise self._error(wrong, f"{key} is a number from 0 {allowed}, got {shown(values[wrong])}")
        return ticks


def _difference(what: str, content: dict[str, Any], keys: Collection[str]) -> str:
    """Describe the keys that an object has too many or too few of."""
    missing, surplus = sorted(keys - content.keys()), sorted(content.keys() - keys)
    came = f"without {missing[0]!r}" if missing else f"with {shown(surplus[0])} too"
    return f"{what} has {', '.join(sorted(keys))}, got one {came}"
