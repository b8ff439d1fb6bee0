"""Blocks: the letters that the stages of a model are written in, and Megatron's layout strings.

E   embedding                         m   MTP block, with a loss of its own
t   MoE layer, or the only kind       L   final norm, head and loss
d   dense layer beside MoE ones; Megatron writes t for both

A layout string (Megatron's `--pipeline-model-parallel-layout`) has the stages in order, apart by `|`; `t*4` is `tttt`,
`(tt|)*3` is `tt|tt|tt|`, commas and spaces mean nothing:

    Et|(tt|)*30L      ('Et', 'tt', ... 30 times, 'L')

Megatron's order, all ranks of virtual stage 0 before those of virtual stage 1, is the order of stages along the pipe.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NoReturn

LETTERS = "EtdmL"
LAYERS = "td"

MOST_LETTERS = 100_000
"""Blocks and bars of a layout, written out; a longer one is taken for a typing error."""

_ALLOWED = "E (embedding), t (layer), d (dense layer), m (MTP), L (head and loss)"


def parse_layout(text: str) -> tuple[str, ...]:
    """Read a layout string: the blocks of each stage.

    Only the form is judged here; `check_blocks` judges what stands where. What Megatron reads otherwise than it looks
    (groups in groups, a repeated repeat) is refused.

    Raises:
        ValueError: the text is no layout, a stage is empty, or there are more than `MOST_LETTERS` letters; the message
            shows the place.

    Example:
        >>> parse_layout("Et|(tt|)*2,tL")
        ('Et', 'tt', 'tt', 'tL')

    """
    return _LayoutReader(text).read()


def write_layout(blocks: Sequence[str], *, dense: bool = False) -> str:
    """Write the shortest layout string of its kind: Megatron reads it back to the same stages.

    Args:
        blocks: the blocks of each stage.
        dense: keep d, which Treadle reads and Megatron does not; otherwise it becomes t.

    Raises:
        ValueError: there is no stage, a stage is empty, or a letter is no block.

    Example:
        >>> write_layout(("Et", "tt", "tt", "tt", "tttttL"))
        'Et|(tt|)*3t*5L'

    """
    _check_letters(blocks)
    stages = [_runs(stage if dense else stage.replace("d", "t")) for stage in blocks]
    bars = "".join(_repeated_stage(stage, len(list(equal))) for stage, equal in groupby(stages[:-1]))
    return bars + stages[-1]


def with_dense(blocks: Sequence[str], count: int) -> tuple[str, ...]:
    """Make the first `count` layers dense ones; the others stay as they are.

    Raises:
        ValueError: `count` is negative, or there are fewer layers.

    Example:
        >>> with_dense(("Et", "tt", "tL"), 2)
        ('Ed', 'dt', 'tL')

    """
    layers = sum(stage.count(letter) for stage in blocks for letter in LAYERS)
    if not 0 <= count <= layers:
        raise ValueError(f"0 to {layers} of the layout's {layers} layers can be dense, got {count}")
    changed = []
    for stage in blocks:
        changed.append(re.sub(f"[{LAYERS}]", "d", stage, count=count) if count else stage)
        count -= min(count, sum(map(stage.count, LAYERS)))
    return tuple(changed)


def check_blocks(blocks: Sequence[str]) -> None:
    """Check that stages are a model as Megatron has it: E first, L last, each once, no layer after an MTP block.

    A stage has at least one block. It need not have a layer: `E`, `m`, `L` and `mL` are stages.

    Raises:
        ValueError: the first thing that is wrong, with its stage and what is allowed.

    """
    _check_letters(blocks)
    last = len(blocks) - 1
    if blocks[0][0] != "E":
        raise ValueError(f"stage 0: the first block is E, the embedding, got {blocks[0]!r}; write {'E' + blocks[0]!r}")
    if blocks[last][-1] != "L":
        raise ValueError(
            f"stage {last}: the last block is L, the head with its loss, got {blocks[last]!r}; "
            f"write {blocks[last] + 'L'!r}"
        )
    seen_mtp: int | None = None
    for stage, row in enumerate(blocks):
        for place, letter in enumerate(row):
            if letter == "E" and (stage, place) != (0, 0):
                raise ValueError(f"stage {stage}: E stands once, as the first block of stage 0, got another in {row!r}")
            if letter == "L" and (stage, place) != (last, len(row) - 1):
                raise ValueError(
                    f"stage {stage}: L stands once, as the last block of stage {last}, got another in {row!r}"
                )
            if letter in LAYERS and seen_mtp is not None:
                raise ValueError(
                    f"stage {stage}: layers stand before the MTP blocks, got {letter} in {row!r} after the m of "
                    f"stage {seen_mtp}; move the m after the last layer"
                )
            if letter == "m" and seen_mtp is None:
                seen_mtp = stage


def check_order(blocks: Sequence[str]) -> None:
    """Check that blocks stand in order: E first if there is one, layers, MTP blocks, L last if there is one.

    Raises:
        ValueError: the message names the stage.

    """
    _check_letters(blocks)
    place, turns = 0, {"E": 0, "t": 1, "d": 1, "m": 2, "L": 3}
    seen = ""
    for stage, row in enumerate(blocks):
        for letter in row:
            if turns[letter] < place or (letter in "EL" and letter in seen) or (letter == "E" and seen):
                raise ValueError(
                    f"stage {stage}: {letter} in {row!r} is out of order; a model is E at most once and first, then "
                    "layers (t, d), then m, then L at most once and last"
                )
            place, seen = turns[letter], seen + letter


def _check_letters(blocks: Sequence[str]) -> None:
    if not blocks:
        raise ValueError("a layout has at least one stage, got none; the shortest is ('EL',)")
    for stage, row in enumerate(blocks):
        if not row:
            raise ValueError(f"stage {stage}: a stage has at least one block, got none; blocks are {_ALLOWED}")
        wrong = row.strip(LETTERS)
        if wrong:
            raise ValueError(f"stage {stage}: {wrong[0]!r} in {row!r} is not a block; blocks are {_ALLOWED}")


def _runs(stage: str) -> str:
    """Write a stage with `t*4` where that is shorter than the letters."""
    runs = ((letter, len(list(equal))) for letter, equal in groupby(stage))
    return "".join(min(letter * count, f"{letter}*{count}", key=len) for letter, count in runs)


def _repeated_stage(stage: str, count: int) -> str:
    """Write `count` equal stages and their bars; `min` keeps the plain form where the group is no shorter."""
    return min(f"{stage}|" * count, f"({stage}|)*{count}", key=len)


class _LayoutReader:
    """Reads one layout string. `letters` and `places` are the text without what means nothing, and where it stood."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.places = [place for place, letter in enumerate(text) if letter not in ", "]
        self.letters = "".join(text[place] for place in self.places)
        self.at = 0
        self.size = 0

    def read(self) -> tuple[str, ...]:
        stages, start = [""], 0
        for letter, place in self.blocks():
            if letter != "|":
                stages[-1] += letter
                continue
            self.no_empty_stage(stages, start)
            stages.append("")
            start = place + 1
        self.no_empty_stage(stages, len(self.letters))
        return tuple(stages)

    def no_empty_stage(self, stages: list[str], place: int) -> None:
        if not stages[-1]:
            self.fail(f"stage {len(stages) - 1} is empty; give it a block or leave out a '|'", place)

    def blocks(self) -> Iterator[tuple[str, int]]:
        """Yield the letters and bars, groups written out, each with its place in `letters`."""
        while self.at < len(self.letters):
            if self.letters[self.at] == "(":
                yield from self.group()
            else:
                yield from self.item()

    def group(self) -> Iterator[tuple[str, int]]:
        opened = self.at
        self.at += 1
        inside: list[tuple[str, int]] = []
        while self.at < len(self.letters) and self.letters[self.at] != ")":
            inside += self.item()
        if self.at == len(self.letters):
            self.fail("this '(' is never closed; write (tt|)*3", opened)
        if not inside and opened + 1 == self.at:
            self.fail("there is nothing between the parentheses; write (tt|)*3", opened)
        self.at += 1
        count = self.count()
        if count is None:
            self.fail("how often the group stands is missing; write (tt|)*3", self.at)
        self.size -= len(inside)
        self.grow(len(inside) * count, opened)
        yield from inside * count

    def item(self) -> list[tuple[str, int]]:
        """Read a bar, or a block and how often it stands."""
        place = self.at
        letter = self.letters[place]
        if letter == "(":
            self.fail("a group cannot stand in a group, as Megatron reads none; write the inner one out", place)
        if letter not in LETTERS + "|":
            hint = "'*' and ')' belong after a block or a group; blocks" if letter in "*)" else "blocks"
            self.fail(f"{letter!r} is not a block; {hint} are {_ALLOWED}, '|' ends a stage", place)
        self.at += 1
        count = self.count()
        if count is not None and letter == "|":
            self.fail("a repeated '|' makes empty stages; repeat a group such as (tt|)*3", place)
        times = 1 if count is None else count
        self.grow(times, place)
        return [(letter, place)] * times

    def count(self) -> int | None:
        """Read `*n` if it stands here."""
        found = re.compile(r"\*([0-9]*)").match(self.letters, self.at)
        if found is None:
            return None
        if not found[1]:
            self.fail("a number belongs after '*'; write t*4 or (tt|)*3", found.end())
        if len(found[1]) > len(str(MOST_LETTERS)):
            self.too_long(self.at)
        self.at = found.end()
        if self.letters[self.at : self.at + 1] == "*":
            self.fail("a repeat cannot be repeated; multiply the numbers", self.at)
        return int(found[1])

    def grow(self, count: int, place: int) -> None:
        self.size += count
        if self.size > MOST_LETTERS:
            self.too_long(place)

    def too_long(self, place: int) -> NoReturn:
        self.fail(f"the layout has more than {MOST_LETTERS} letters from here on; repeat less", place)

    def fail(self, message: str, place: int) -> NoReturn:
        """Raise with the text and a caret under a place in `letters`."""
        column = self.places[place] if place < len(self.places) else len(self.text)
        start = max(0, column - 60)
        shown = self.text[start : start + 100]
        raise ValueError(f"layout, character {column + 1}: {message}\n  {shown}\n  {' ' * (column - start)}^")
