"""Reads a pickle of plain values, without running anything of it.

A pickle is a program. The opcodes here build None, booleans, numbers, texts, lists, tuples and dictionaries, which is
all that torch's Flight Recorder writes; each other opcode is refused by its name, those that import or call among them.
"""

from __future__ import annotations

import pickle
import pickletools
import struct
from typing import Any

MOST_BYTES = 2**28
"""A longer pickle is refused. torch writes about 1 KB an entry, and 2,000 entries by default."""

_NAMES = {opcode.code.encode("latin-1"): opcode.name for opcode in pickletools.opcodes}
_CODES = {name: code for code, name in _NAMES.items()}
_MOST_INT_BYTES = 16
_MARK = object()


class UnreadablePickleError(ValueError):
    """A pickle with something else than plain values, or one that is cut off."""


def load_plain(data: bytes) -> Any:
    """Return the value of a pickle.

    Raises:
        UnreadablePickleError: an opcode that builds no plain value, by name; or the pickle is damaged or too long.

    """
    if len(data) > MOST_BYTES:
        raise UnreadablePickleError(f"it has {len(data):,} bytes, and at most {MOST_BYTES:,} are read")
    return _Reader(data).value()


class _Reader:
    """A stack, a memo, and a place in the bytes."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def value(self) -> Any:
        steps = {_CODES[name]: getattr(self, f"_{name.lower()}") for name in _READ}
        pushed, stop = dict(_CONSTANTS), pickle.STOP
        while True:
            code = self._take(1)
            if code == stop:
                return self._pop()
            if code in pushed:
                self.stack.append(pushed[code])
            elif (step := steps.get(code)) is not None:
                step()
            else:
                raise self._refused(code)

    # -- bytes and stack ---------------------------------------------------------------------------------------------

    def _take(self, num: int) -> bytes:
        taken = self.data[self.at : self.at + num]
        if len(taken) < num:
            raise UnreadablePickleError("it ends too early")
        self.at += num
        return taken

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _pop(self) -> Any:
        if not self.stack or self.stack[-1] is _MARK:
            raise UnreadablePickleError("an opcode takes a value where there is none")
        return self.stack.pop()

    def _above_mark(self) -> list[Any]:
        place = len(self.stack) - 1
        while place >= 0 and self.stack[place] is not _MARK:
            place -= 1
        if place < 0:
            raise UnreadablePickleError("an opcode takes values up to a mark where there is none")
        items = self.stack[place + 1 :]
        del self.stack[place:]
        return items

    def _top(self, kind: type) -> Any:
        if not self.stack or type(self.stack[-1]) is not kind:
            raise UnreadablePickleError(f"an opcode adds to a {kind.__name__} where there is none")
        return self.stack[-1]

    def _refused(self, code: bytes) -> UnreadablePickleError:
        name = _NAMES.get(code)
        if name is None:
            return UnreadablePickleError(f"byte {self.at - 1} is no opcode of a pickle")
        wanted = ""
        if name in ("GLOBAL", "INST"):
            lines = self.data[self.at : self.at + 200].split(b"\n")[:2]
            wanted = f", which imports {b'.'.join(lines).decode('utf-8', 'replace')!r}"
        elif name == "STACK_GLOBAL" and all(isinstance(part, str) for part in self.stack[-2:]):
            wanted = f", which imports {'.'.join(self.stack[-2:])!r}"
        return UnreadablePickleError(
            f"it has the opcode {name}{wanted}: no plain value, so nothing of it is run or read"
        )

    # -- opcodes -----------------------------------------------------------------------------------------------------

    def _proto(self) -> None:
        if (version := self._number("<B")) > pickle.HIGHEST_PROTOCOL:
            raise UnreadablePickleError(f"its protocol is {version}, and up to {pickle.HIGHEST_PROTOCOL} are read")

    def _frame(self) -> None:
        self._take(8)

    def _mark(self) -> None:
        self.stack.append(_MARK)

    def _binint(self) -> None:
        self.stack.append(self._number("<i"))

    def _binint1(self) -> None:
        self.stack.append(self._number("<B"))

    def _binint2(self) -> None:
        self.stack.append(self._number("<H"))

    def _long1(self) -> None:
        size = self._number("<B")
        if size > _MOST_INT_BYTES:
            raise UnreadablePickleError(f"it has a number of {size} bytes, and at most {_MOST_INT_BYTES} are read")
        self.stack.append(int.from_bytes(self._take(size), "little", signed=True))

    def _binfloat(self) -> None:
        self.stack.append(self._number(">d"))

    def _binunicode(self) -> None:
        self._text(self._number("<I"))

    def _short_binunicode(self) -> None:
        self._text(self._number("<B"))

    def _text(self, size: int) -> None:
        try:
            self.stack.append(self._take(size).decode("utf-8", "surrogatepass"))
        except UnicodeDecodeError as error:
            raise UnreadablePickleError(f"a text is no UTF-8: {error.reason}") from error

    def _empty_list(self) -> None:
        self.stack.append([])

    def _empty_dict(self) -> None:
        self.stack.append({})

    def _append(self) -> None:
        item = self._pop()
        self._top(list).append(item)

    def _appends(self) -> None:
        items = self._above_mark()
        self._top(list).extend(items)

    def _setitem(self) -> None:
        value, key = self._pop(), self._pop()
        self._set([key, value])

    def _setitems(self) -> None:
        self._set(self._above_mark())

    def _set(self, items: list[Any]) -> None:
        into = self._top(dict)
        if len(items) % 2 or not all(isinstance(key, str | int) for key in items[::2]):
            raise UnreadablePickleError("the keys of a dictionary are not texts or numbers")
        into.update(zip(items[::2], items[1::2], strict=True))

    def _tuple(self) -> None:
        self.stack.append(tuple(self._above_mark()))

    def _tuple1(self) -> None:
        self._tuple_of(1)

    def _tuple2(self) -> None:
        self._tuple_of(2)

    def _tuple3(self) -> None:
        self._tuple_of(3)

    def _tuple_of(self, num: int) -> None:
        self.stack.append(tuple([self._pop() for _ in range(num)][::-1]))

    def _binput(self) -> None:
        self._put(self._number("<B"))

    def _long_binput(self) -> None:
        self._put(self._number("<I"))

    def _memoize(self) -> None:
        self._put(len(self.memo))

    def _put(self, place: int) -> None:
        self.stack.append(self._pop())
        self.memo[place] = self.stack[-1]

    def _binget(self) -> None:
        self._get(self._number("<B"))

    def _long_binget(self) -> None:
        self._get(self._number("<I"))

    def _get(self, place: int) -> None:
        if place not in self.memo:
            raise UnreadablePickleError("an opcode reads a place of the memo that was not written")
        self.stack.append(self.memo[place])


_CONSTANTS = {pickle.NONE: None, pickle.NEWTRUE: True, pickle.NEWFALSE: False, pickle.EMPTY_TUPLE: ()}
_READ = (
    *("PROTO", "FRAME", "MARK", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE"),
    *("EMPTY_LIST", "EMPTY_DICT", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET"),
)
"""Opcodes that build plain values, besides those of `_CONSTANTS`: the reader has a method for each."""
