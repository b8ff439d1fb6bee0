"""The entries of a JSON object in a file, or the items of a list, one after the other: no more is held than one."""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

_PIECE_BYTES = 2**20
_DECODE = json.JSONDecoder().raw_decode
_BEHIND = frozenset(",:}] \t\r\n")
"""What may follow a value."""


def entries(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the key and the value of each entry of a file's JSON object; gzip is read as it is.

    Raises:
        ValueError: the file is damaged or cut off, or holds something else; its name is in the message.

    """
    yield from _read(path, "no JSON object", _Json.entries)


def events(path: Path) -> Iterator[Any]:
    """Yield the events of a Chrome trace: a list of them, or an object that has them as `traceEvents`.

    Raises:
        ValueError: the file is damaged or cut off, or holds something else; its name is in the message.

    """
    yield from _read(path, "no Chrome trace", _Json.events)


def _read(path: Path, wrong: str, part: Callable[[_Json], Iterator[Any]]) -> Iterator[Any]:
    with path.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        try:
            yield from part(_Json(gzip.GzipFile(fileobj=raw) if packed else raw))
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path}: cannot be decompressed: {error}; the file is cut off or damaged") from error
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: is no text: {error}; the file is damaged") from error
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: is {wrong}: {error.msg}; the file is cut off or damaged") from error


class _Json:
    """Reads on in pieces, twice as much each time that a value is not whole yet."""

    def __init__(self, file: BinaryIO | gzip.GzipFile) -> None:
        self.file = file
        self.decode = codecs.getincrementaldecoder("utf-8")().decode
        self.text, self.at = "", 0

    def entries(self) -> Iterator[tuple[str, Any]]:
        """The entries of the object that begins here."""
        for key in self._keys():
            yield key, self._value()

    def events(self) -> Iterator[Any]:
        """The items of the list that begins here, or that the object here has under `traceEvents`."""
        if self._next() == "[":
            yield from self._items()
            return
        for key in self._keys():
            if key == "traceEvents":
                yield from self._items()
            else:
                self._value()

    def _keys(self) -> Iterator[str]:
        """The keys of an object; whoever takes one takes its value before the next."""
        self._expect("{")
        if self._next() == "}":
            return
        while True:
            key = self._value()
            self._expect(":")
            yield str(key)
            if self._next() == "}":
                return
            self._expect(",")

    def _items(self) -> Iterator[Any]:
        self._expect("[")
        if self._next() == "]":
            self.at += 1
            return
        while True:
            yield self._value()
            if self._next() == "]":
                self.at += 1
                return
            self._expect(",")

    def _more(self) -> bool:
        piece = self.file.read(max(_PIECE_BYTES, len(self.text) - self.at))
        self.text, self.at = self.text[self.at :] + self.decode(piece, not piece), 0
        return bool(piece)

    def _next(self) -> str:
        """The next character that is no space, without taking it."""
        while True:
            while self.at < len(self.text) and self.text[self.at].isspace():
                self.at += 1
            if self.at < len(self.text):
                return self.text[self.at]
            if not self._more():
                raise json.JSONDecodeError("it ends too early", self.text, self.at)

    def _expect(self, mark: str) -> None:
        if (found := self._next()) != mark:
            raise json.JSONDecodeError(f"{mark!r} is expected, and there is {found!r}", self.text, self.at)
        self.at += 1

    def _value(self) -> Any:
        self._next()
        while True:
            try:
                value, end = _DECODE(self.text, self.at)
            except json.JSONDecodeError as error:
                if not self._more():
                    raise json.JSONDecodeError(error.msg, error.doc, error.pos) from error
                continue
            if self.text[end : end + 1] in _BEHIND:  # else a number may go on in the next piece
                self.at = end
                return value
            begun = self.at
            if not self._more():
                self.at = end - begun
                return value
