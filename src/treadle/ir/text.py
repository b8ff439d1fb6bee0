"""The text form of a schedule: a row a rank, after `#` lines that let it be read back.

    # treadle-schedule 1
    # name: 1f1b
    # placement: loop
    # pp: 2
    # vpp: 1
    # microbatches: 2
    0: F0.0 F1.0 B0.0 B1.0
    1: F0.0 B0.0 F1.0 B1.0

`# receive 0>1: F0.0 F1.0` gives the receives of a channel, `# issue 0: . >1 <1 .` the order in which rank 0 issues its
cells and messages (`treadle.ir.turn`). `parse(dump(s)) == s`. Rows alone are read too, with what is missing taken from
the rows or from the caller. `##` starts a comment. With one chunk a rank, rows that people write may leave `.0` out,
and may begin with `rank 0:` or `rank0:`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from treadle.fields.nearest import did_you_mean
from treadle.host.errors import PortableError
from treadle.ir.action import Action, Cell, Kind, Pair
from treadle.ir.placement import Placement
from treadle.ir.schedule import MAGIC, Channel, Row, Schedule
from treadle.ir.turn import TURNS, Turn, parse_turn

KEYS = ("name", "placement", "pp", "vpp", "microbatches", "receive", "issue")

_HEADER = re.compile(r"# ([a-z_-]+)(?: ([0-9]+)(?:>([0-9]+))?)?:(?: |$)(.*)")
_ROW = re.compile(r"(?:[Rr]ank *)?([0-9]+):(.*)")
_ACTION = re.compile(r"([FBIW])(0|[1-9][0-9]{0,5})(?:\.(0|[1-9][0-9]{0,2}))?")
_PAIR = re.compile(r"\((F[^|]*)\|(B[^|]*)\)")


class ParseError(PortableError, ValueError):
    """An error in a text; the message shows the line with a caret under the place."""

    def __init__(self, message: str, source: str, line_number: int, line: str, column: int) -> None:
        self.message, self.line_number, self.column = message, line_number, column
        start = max(0, column - 60)
        shown = line[start : start + 100]
        super().__init__(f"{source}:{line_number}:{column + 1}: {message}\n  {shown}\n  {' ' * (column - start)}^")


def dump(schedule: Schedule, *, header: bool = True) -> str:
    """Return the text form; without its `#` lines if `header` is False."""
    return "\n".join([str(schedule)] if header else schedule.row_lines()) + "\n"


def parse_action(text: str) -> Action | None:
    """Return an action from its token, or None if it is not one."""
    action = _read_action(text)
    return action if action is not None and str(action) == text else None


def parse_cell(text: str) -> Cell | None:
    """Return a cell from its token, or None if it is not one."""
    cell = _read_cell(text)
    return cell if cell is not None and str(cell) == text else None


def _read_action(text: str) -> Action | None:
    """Return an action from its token, with or without its chunk, or None if it is not one."""
    match = _ACTION.fullmatch(text)
    return Action(Kind[match[1]], int(match[2]), int(match[3] or 0)) if match else None


def _read_cell(text: str) -> Cell | None:
    match = _PAIR.fullmatch(text)
    if match is None:
        return _read_action(text)
    forward, backward = _read_action(match[1]), _read_action(match[2])
    return Pair(forward, backward) if forward and backward else None


class _Short(NamedTuple):
    """A token that leaves a chunk out, the cell it stands for, and its place."""

    token: str
    cell: Cell
    number: int
    line: str
    column: int


@dataclass
class _TextReader:
    """Collect what the lines hold; `finish` puts it together."""

    source: str
    strict: bool
    values: dict[str, str] = field(default_factory=dict)
    receives: dict[Channel, tuple[Action, ...]] = field(default_factory=dict)
    issue: list[tuple[Turn, ...]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    number: int = 0
    line: str = ""
    short: _Short | None = None

    def error(self, message: str, column: int = 0) -> ParseError:
        return ParseError(message, self.source, self.number, self.line, column)

    def read(self, number: int, line: str) -> None:
        self.number, self.line = number, line
        if line.startswith("#"):
            self._read_header(line)
        elif line.strip():
            self._read_row(line)

    def _read_header(self, line: str) -> None:
        match = _HEADER.fullmatch(line)
        if match is None and self.strict and not line.startswith("##"):
            raise self.error(f"not a line of a schedule: they are '# key: value' with {', '.join(KEYS)}; '##' comments")
        if match is None or (match[1] not in KEYS and not self.strict):
            return
        key, value = match[1], match[4]
        if key not in KEYS:
            way_out = did_you_mean(key, KEYS)
            raise self.error(f"{key!r} is not a line of a schedule; {way_out} ('##' starts a comment)", 2)
        if (key == "receive") != (match[3] is not None):
            raise self.error("a channel is written '# receive 0>1: F0.0 ...', and only there", 2)
        if (key in ("receive", "issue")) != (match[2] is not None):
            raise self.error("a rank is written '# issue 0: . >1 ...', and only there", 2)
        if key == "issue":
            if int(match[2]) != len(self.issue):
                raise self.error(f"expected the issue of rank {len(self.issue)}, got rank {match[2]}", 2)
            self.issue.append(tuple(self._turns(match.start(4))))
        elif key == "receive":
            channel = (int(match[2]), int(match[3]))
            if channel in self.receives:
                raise self.error(f"receives of channel {match[2]}>{match[3]} were given above", 2)
            self.receives[channel] = tuple(self._labels(match.start(4)))
        elif self.values.setdefault(key, value) != value:
            raise self.error(f"{key} was given as {self.values[key]!r} above", match.start(4))

    def _read_row(self, line: str) -> None:
        match = _ROW.fullmatch(line)
        if match is None:
            raise self.error("expected a row such as '0: F0.0 B0.0'")
        if int(match[1]) != len(self.rows):
            raise self.error(f"expected the row of rank {len(self.rows)}, got rank {match[1]}")
        cells = []
        for token, column in _tokens(line, match.start(2)):
            cell = _read_cell(token)
            if cell is None:
                raise self.error(f"{token!r} is not a cell; cells are {_CELLS}", column + _junk(token))
            self._note_short(token, cell, column)
            cells.append(cell)
        self.rows.append(tuple(cells))

    def _labels(self, start: int) -> Iterator[Action]:
        for token, column in _tokens(self.line, start):
            action = _read_action(token)
            if action is None or action.kind not in (Kind.F, Kind.B):
                raise self.error(f"{token!r} is not a message; messages are F0.0 or B0.0", column)
            self._note_short(token, action, column)
            yield action

    def _turns(self, start: int) -> Iterator[Turn]:
        for token, column in _tokens(self.line, start):
            turn = parse_turn(token)
            if turn is None:
                raise self.error(f"{token!r} is not a turn; turns are {TURNS}", column)
            yield turn

    def _note_short(self, token: str, cell: Cell, column: int) -> None:
        """Remember the first token that leaves a chunk out: whether it may is known after the last line."""
        if self.short is None and token != str(cell):
            self.short = _Short(token, cell, self.number, self.line, column)

    def finish(self, placement: str | None) -> Schedule:
        absent = [key for key in KEYS[1:5] if self.strict and key not in self.values]
        if absent:
            raise ValueError(f"{self.source}: '# {absent[0]}: ...' is missing after '{MAGIC}'")
        if not self.rows:
            raise ValueError(f"{self.source}: no rows; a schedule has a line such as '0: F0.0 B0.0' for each rank")
        actions = [action for row in self.rows for cell in row for action in cell.actions]
        chunks = 1 + max((a.chunk for a in actions), default=0)
        vpp = self._integer("vpp", chunks)
        self._check_short(max(vpp, chunks))
        pp = self._integer("pp", len(self.rows))
        if pp != len(self.rows):
            raise ValueError(f"{self.source}: the header says pp {pp}, but there are {len(self.rows)} rows")
        try:
            where = Placement.parse(self.values.get("placement", placement or "loop"), pp, vpp)
        except ValueError as error:
            raise ValueError(f"{self.source}: {error}") from None
        seen = 1 + max((a.mb for a in actions), default=0)
        num = self._integer("microbatches", seen * where.num_pipes)
        name = self.values.get("name", "custom")
        try:
            return Schedule(name, where, num, tuple(self.rows), self.receives, tuple(self.issue))
        except ValueError as error:
            raise ValueError(f"{self.source}: {error}") from None

    def _check_short(self, chunks: int) -> None:
        if chunks > 1 and self.short is not None:
            token, cell, number, line, column = self.short
            message = f"{token!r} has no chunk, and ranks have {chunks} here; for chunk 0 write {cell}"
            raise ParseError(message, self.source, number, line, column)

    def _integer(self, key: str, default: int) -> int:
        text = self.values.get(key, str(default))
        if re.fullmatch(r"[1-9][0-9]*", text) is None:
            raise ValueError(f"{self.source}: {key} is a whole number from 1, got {text!r}")
        return int(text)


_CELLS = "F0.0, B0.0, I0.0, W0.0 or (F1.0|B0.0), micro-batches to 999999 and chunks to 999"


def _tokens(line: str, start: int) -> Iterator[tuple[str, int]]:
    for match in re.compile(r"\S+").finditer(line, start):
        yield match[0], match.start()


def _junk(token: str) -> int:
    """Return the place in a token, which is no cell, where its longest valid beginning ends."""
    good = _ACTION.match(token)
    if good is not None and good[3] is not None:
        return good.end()
    closing = token.find(")")
    return closing + 1 if closing >= 0 and _read_cell(token[: closing + 1]) is not None else 0


def parse(text: str, source: str = "<text>", *, placement: str | None = None) -> Schedule:
    """Read the text form. `placement` is used only where the text does not name one."""
    lines = text.splitlines()
    versions = [line for line in lines if line.startswith("# treadle-schedule")]
    if versions and versions != [MAGIC]:
        raise ValueError(
            f"{source}: {versions[-1][2:]!r} is not a form this version reads; it reads {MAGIC[2:]!r}, once"
        )
    reader = _TextReader(source, strict=bool(versions))
    for number, line in enumerate(lines, start=1):
        if line != MAGIC:
            reader.read(number, line)
    return reader.finish(placement)
