"""Reads a pickle of plain values and of the classes on a list, without importing or running anything else of it.

A pickle is a program. The opcodes here build None, booleans, numbers, texts, lists, tuples and dictionaries, which is
all that torch's Flight Recorder writes; each other opcode is refused by its name, those that import or call among them.
A caller that lists classes and functions by name (`known`) has these called, and nothing is looked up anywhere else.
"""

from __future__ import annotations

import pickle
import pickletools
import struct
from collections.abc import Mapping
from typing import Any

MOST_BYTES = 2**28
"""A longer pickle is refused. torch writes about 1 KB an entry, and 2,000 entries by default."""

_NAMES = {opcode.code.encode("latin-1"): opcode.name for opcode in pickletools.opcodes}
_CODES = {name: code for code, name in _NAMES.items()}
_MOST_INT_BYTES = 16
_LONGEST_NAME = 300
_MARK = object()


class UnreadablePickleError(ValueError):
    """A pickle with something else than plain values and what is known, or one that is cut off."""


def load_plain(data: bytes, known: Mapping[str, Any] | None = None) -> Any:
    """Return the value of a pickle, which may contain `known` values, and call those, by their names in the pickle.

    Raises:
        UnreadablePickleError: an opcode that builds no plain value, by name; a name that is not known; or the pickle is
            damaged or too long.

    """
    if len(data) > MOST_BYTES:
        raise UnreadablePickleError(f"it has {len(data):,} bytes, and at most {MOST_BYTES:,} are read")
    return _Reader(data, known or {}).value()


class _Reader:
    """A stack, a memo, and a place in the bytes."""

    def __init__(self, data: bytes, known: Mapping[str, Any]) -> None:
        self.data, self.at, self.known = data, 0, known
        self.callables = {id(each) for each in known.values() if callable(each)}
        self.classes = {each for each in known.values() if isinstance(each, type)}
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def value(self) -> Any:
        names = (*_READ, *_MAKING) if self.known else _READ
        steps = {_CODES[name]: getattr(self, f"_{name.lower()}") for name in names}
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
        if len(items) % 2 or not all(isinstance(key, str | int) or type(key) in self.classes for key in items[::2]):
            raise UnreadablePickleError("the keys of a dictionary are not texts or numbers")
        try:
            into.update(zip(items[::2], items[1::2], strict=True))
        except Exception as error:  # of a key's own hash
            raise UnreadablePickleError(f"a key of a dictionary cannot be one: {error}") from error

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

    # -- opcodes for what is known -----------------------------------------------------------------------------------

    def _global(self) -> None:
        lines = self.data[self.at : self.at + _LONGEST_NAME].split(b"\n")[:2]
        self._take(sum(map(len, lines)) + 2)
        self._find(b".".join(lines).decode("utf-8", "replace"))

    def _stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        self._find(f"{module}.{name}" if isinstance(module, str) and isinstance(name, str) else "no name")

    def _find(self, name: str) -> None:
        if name not in self.known:
            raise UnreadablePickleError(
                f"it imports {name!r}, which is not among what is read, so nothing of it is run"
            )
        self.stack.append(self.known[name])

    def _newobj(self) -> None:
        arguments, made = self._pop(), self._pop()
        if not isinstance(made, type) or made not in self.classes or arguments != ():
            raise UnreadablePickleError("it makes an object of something else than what is known")
        try:
            self.stack.append(object.__new__(made))
        except TypeError as error:  # of a tuple's own kind
            raise UnreadablePickleError(f"{made.__name__} is not made so: {error}") from error

    def _reduce(self) -> None:
        arguments, called = self._pop(), self._pop()
        if id(called) not in self.callables or type(arguments) is not tuple:
            raise UnreadablePickleError("it calls something else than what is known")
        try:
            self.stack.append(called(*arguments))
        except Exception as error:
            raise UnreadablePickleError(f"{called.__name__} refuses its arguments: {error}") from error

    def _build(self) -> None:
        state, made = self._pop(), self._pop()
        if type(made) not in self.classes:
            raise UnreadablePickleError("it sets attributes of something else than what is known")
        try:
            if hasattr(made, "__setstate__"):
                made.__setstate__(state)
            else:
                vars(made).update(state)
        except Exception as error:
            raise UnreadablePickleError(f"{type(made).__name__} refuses its attributes: {error}") from error
        self.stack.append(made)


_CONSTANTS = {pickle.NONE: None, pickle.NEWTRUE: True, pickle.NEWFALSE: False, pickle.EMPTY_TUPLE: ()}
_READ = (
    *("PROTO", "FRAME", "MARK", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE"),
    *("EMPTY_LIST", "EMPTY_DICT", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET"),
)
"""Opcodes that build plain values, besides those of `_CONSTANTS`: the reader has a method for each."""
_MAKING = ("GLOBAL", "STACK_GLOBAL", "NEWOBJ", "REDUCE", "BUILD")
"""Opcodes that name, call and fill what is known: there are methods for these, too."""
