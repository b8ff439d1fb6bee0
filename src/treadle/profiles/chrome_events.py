"""The events of a Chrome trace of any size, those of some categories only, in bounded memory.

A profile of a GPU is hundreds of megabytes of JSON, and most of its events are of no use here. So a file is not parsed:
categories are looked for in its bytes, at the speed of a text search, and only events of the wanted ones are decoded.
That relies on `cat` standing before `args`, as in every file that torch writes.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Generator, Iterable, Iterator, Mapping
from json import JSONDecodeError, JSONDecoder
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, TypeAlias

from treadle.profiles.reader import Advance

Event: TypeAlias = dict[str, Any]

PIECE_BYTES = 2**22
"""As many bytes of the content are held at once, and the rest of the last event."""

_USUAL_EVENT_BYTES = 2**10
_MOST_EVENT_BYTES = 2**24
_TAIL_BYTES = 2**16
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_WHITESPACE = b" \t\r\n"


class ChromeEvents:
    """Iterates once over the events of one file, plain or compressed; `about` and `trouble` are known afterwards.

    Of the categories in `named` only events of that name are read, where the name follows the category.

    Fractions are left as text, as microseconds of a clock do not fit into a float with their nanoseconds: see `to_ns`.
    """

    def __init__(
        self,
        path: Path,
        categories: Iterable[str],
        advance: Advance,
        *,
        named: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.path = path
        self.about: dict[str, Any] = {}
        """What stands beside the events: schemaVersion, distributedInfo, ..."""
        self.trouble: str | None = None
        """Why the file could be read in part only."""
        self.num_read = 0
        self._advance = advance
        wanted = [f'{re.escape(category)}"' for category in categories]
        wanted += [
            rf'{re.escape(category)}"\s*,\s*"name"\s*:\s*"{re.escape(name)}"' for category, name in named.items()
        ]
        self._wanted = re.compile(rf'"cat"\s*:\s*"(?:{"|".join(wanted)})'.encode())
        self._decode = JSONDecoder(parse_float=str).raw_decode
        self._open = 0
        """Opened and not closed braces and brackets."""
        self._tail = b""

    def __iter__(self) -> Iterator[Event]:
        pieces = self._pieces()
        held = self._read_about(pieces)
        for piece in pieces:
            held += piece
            held = held[(yield from self._events(held)) :]
            if len(held) > _MOST_EVENT_BYTES:
                self.trouble = f"an event of more than {_MOST_EVENT_BYTES:,} bytes; what follows is not read"
                return
        yield from self._events(held)
        self._read_end()

    def _pieces(self) -> Iterator[bytes]:
        """Yield the content, decompressed, and report the bytes on disk; end where a file is cut or damaged."""
        with self.path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            pieces = self._raw(file)
            for piece in self._unpacked(pieces) if packed else pieces:
                self._open += piece.count(b"{") + piece.count(b"[") - piece.count(b"}") - piece.count(b"]")
                self._tail = (self._tail + piece)[-_TAIL_BYTES:]
                yield piece

    def _raw(self, file: IO[bytes]) -> Iterator[bytes]:
        while piece := file.read(PIECE_BYTES):
            self._advance(len(piece))
            yield piece

    def _unpacked(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        """Decompress, with nothing lost of what stands before a cut, as in gzip's own reader."""
        gzip_form = 31
        unpack = zlib.decompressobj(gzip_form)
        for packed in pieces:
            rest = packed
            while rest:
                if unpack.eof:  # a file may be several, one after the other
                    unpack = zlib.decompressobj(gzip_form)
                try:
                    piece = unpack.decompress(rest, PIECE_BYTES)
                except zlib.error as error:
                    self.trouble = f"damaged: it cannot be decompressed any further ({error})"
                    return
                rest = unpack.unused_data if unpack.eof else unpack.unconsumed_tail
                if piece:
                    yield piece
        if piece := unpack.flush():
            yield piece
        if not unpack.eof:
            self.trouble = "cut off: its compressed data ends too early"

    def _read_about(self, pieces: Iterator[bytes]) -> bytes:
        """Read up to the first event; a ValueError names a file without events."""
        held = bytearray()
        for piece in pieces:
            looked_at = max(0, len(held) - 64)
            held += piece
            if match := _EVENTS.search(held, looked_at):
                self._add_about(bytes(held[: match.end()]) + b"]}")
                return bytes(held[match.end() :])
        why = self.trouble or "it has no traceEvents"
        raise ValueError(f"{self.path}: {why}; a Chrome trace is a JSON object with a list of traceEvents")

    def _events(self, held: bytes) -> Generator[Event, None, int]:
        """Yield the wanted events and return where the first one begins that is not complete."""
        at = 0
        for match in self._wanted.finditer(held):
            if match.start() < at:
                continue
            begin = held.rfind(b"{", at, match.start())
            if begin < 0:
                continue
            event, end = self._event(held, begin)
            if event is None:
                return begin
            at = end
            if "ts" in event:
                self.num_read += 1
                yield event
        # A category may begin here and go on in the next piece, and its event begins before it.
        return max(at, held.rfind(b"{"), held.rfind(b"}"))

    def _event(self, held: bytes, begin: int) -> tuple[Event | None, int]:
        """Decode the event that begins there and return it with its end: None if it is not complete.

        Bytes are taken for characters, so that the decoder counts in bytes; names that are not ASCII are put right.
        """
        size = _USUAL_EVENT_BYTES
        while True:
            text = held[begin : begin + size].decode("latin-1")
            try:
                event, length = self._decode(text)
            except JSONDecodeError:
                if begin + size >= len(held):
                    return None, begin
                size *= 8
                continue
            name = event.get("name", "")
            if not name.isascii():
                event["name"] = name.encode("latin-1").decode("utf-8", "replace")
            return event, begin + length

    def _read_end(self) -> None:
        """Read what follows the events, and find out whether that is the end of the file."""
        if self.trouble is not None:
            return
        if self._open != 0 or not self._tail.rstrip(_WHITESPACE).endswith(b"}"):
            self.trouble = "cut off: its JSON ends before it is closed"
            return
        close = self._tail.rfind(b"]")
        if close >= 0:
            self._add_about(b'{"traceEvents": [' + self._tail[close:])

    def _add_about(self, text: bytes) -> None:
        try:
            about = json.loads(text)
        except ValueError:
            return
        about.pop("traceEvents", None)
        self.about.update(about)


def span_ns(event: Event, source: str) -> tuple[int, int]:
    """Return the start and the end of an event, in nanoseconds.

    Raises:
        ValueError: they are no numbers; the message names the file and the event.

    """
    try:
        start = to_ns(event["ts"])
        return start, start + to_ns(event.get("dur", 0))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"{source}: event {event.get('name')!r} has ts {event.get('ts')!r} and dur {event.get('dur')!r}; both are "
            "microseconds, as finite numbers: the file was damaged or changed; write it again, or leave the rank out"
        ) from error


def to_ns(us: int | str | float) -> int:
    """Convert microseconds as a file has them, exactly: 1740461679471346.123 is too long for a float.

    Example:
        >>> to_ns("1740461679471346.123"), to_ns(52), to_ns("1.5e3")
        (1740461679471346123, 52000, 1500000)

    """
    if isinstance(us, int):
        return us * 1000
    if isinstance(us, str):
        if us[-4:-3] == ".":  # as torch writes it
            digits = us[:-4] + us[-3:]
            if digits.isdigit():
                return int(digits)
        whole, _, part = us.partition(".")
        if whole.isdigit() and (part.isdigit() or not part):
            return int(whole) * 1000 + int((part + "000")[:3])
    return round(float(us) * 1000)
