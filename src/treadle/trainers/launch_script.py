"""Options of a launch script in bash, as far as it can be read without running it.

Read are variables with literal values, their defaults `${NAME:-4}`, arithmetic on them, arrays, and lines that are
continued. Not read are branches, loops, functions and what other programs print; their lines are reported.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

_OPENED = re.compile(r"\s*(if|for|while|until|case)\b|.*\)\s*\{\s*$")
_CLOSED = re.compile(r"\s*(fi|done|esac|\})\s*(;|#|&|\||$)")
_ASSIGNED = re.compile(r"\s*(?:export\s+|declare\s+(?:-\w+\s+)?|local\s+)?([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_ENDS = re.compile(r"[|&;]+|[0-9&]?>.*|<.*")
_SUMS = re.compile(r"[0-9+\-*/%() ]+")


class Script(NamedTuple):
    """Options of the command that a script runs."""

    options: dict[str, list[str]]
    """By name, with its dashes; an option without a value has none."""

    skipped: tuple[str, ...]
    """Lines with options that depend on a condition."""

    program: str
    """The file or module that is launched, if the script has one."""


def read_script(text: str) -> Script:
    """Return the options of a script, or of a command line."""
    reader = _ScriptReader()
    for statement in _statements(text):
        reader.take(statement)
    words = max(reader.commands, key=_num_options, default=[]) or reader.assigned_words()
    program = next((word for word in words if word.endswith(".py")), "")
    if "-m" in words and words.index("-m") + 1 < len(words) and not program:
        program = words[words.index("-m") + 1]
    return Script(_options(words[words.index(program) + 1 :] if program else words), tuple(reader.skipped), program)


def _statements(text: str) -> Iterator[str]:
    """Yield lines, with those that a backslash, a quote or a parenthesis continues."""
    waiting = ""
    for line in text.replace("\\\r\n", " ").replace("\\\n", " ").splitlines():
        waiting += ("\n" if waiting else "") + re.sub(r"(^|\s)#.*$", "", line)
        bare = re.sub(r"'[^']*'|\"[^\"]*\"", "", waiting)
        if "'" in bare or '"' in bare or _in_array(bare):
            continue
        yield waiting
        waiting = ""
    if waiting:
        yield waiting


def _in_array(bare: str) -> bool:
    return re.search(r"=\s*\(", bare) is not None and bare.count("(") > bare.count(")")


class _ScriptReader:
    """Takes statements one after the other; `values` are the variables as they are then."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.commands: list[list[str]] = []
        self.skipped: list[str] = []
        self._depth = 0

    def take(self, statement: str) -> None:
        inside = self._depth > 0
        if _OPENED.match(statement) and not re.search(r"\b(fi|done|esac)\s*;?\s*$", statement):
            self._depth += 1
        elif _CLOSED.match(statement):
            self._depth = max(0, self._depth - 1)
        if inside or _OPENED.match(statement) or re.match(r"\s*(\[|test\b).*(&&|\|\|)", statement):
            if "--" in statement or _ASSIGNED.match(statement):
                self.skipped.append(" ".join(statement.split()))
            return
        assigned = _ASSIGNED.fullmatch(statement)
        if assigned is not None and not _leads_command(assigned[3]):
            self._assign(assigned[1], assigned[3].strip(), more=bool(assigned[2]))
        elif "--" in (expanded := self.expand(statement)):
            self.commands.append(_split(expanded))

    def _assign(self, name: str, value: str, *, more: bool) -> None:
        plain = self.expand(value)
        if plain.startswith("("):
            plain = plain[1 : plain.rindex(")")] if ")" in plain else plain[1:]
        elif plain[:1] == plain[-1:] and plain[:1] in ("'", '"'):
            plain = plain[1:-1]
        self.values[name] = f"{self.values.get(name, '')} {plain}" if more else plain

    def expand(self, text: str) -> str:
        """Put values in for variables, arrays and sums; what has none stays."""
        array = r'"?\$\{(\w+)\[[@*]\]\}"?'
        text = re.sub(array, lambda found: self.values.get(found[1], found[0]), text)
        for _ in range(3):
            text = re.sub(r"\$\{(\w+):?-([^${}]*)\}", lambda found: self.values.get(found[1]) or found[2], text)
            text = re.sub(r"\$\{(\w+)\}|\$(\w+)", lambda found: self.values.get(found[1] or found[2], found[0]), text)
            text = re.sub(r"\$\(\(([^$]*?)\)\)(?!\))", self._sum, text)
        return text

    def _sum(self, found: re.Match[str]) -> str:
        named = re.sub(r"[A-Za-z_]\w*", lambda name: self.values.get(name[0], name[0]), found[1])
        if _SUMS.fullmatch(named) is None or "**" in named:
            return found[0]
        try:
            return str(int(eval(named.replace("/", "//"), {"__builtins__": {}})))
        except (SyntaxError, ZeroDivisionError, TypeError, ValueError):
            return found[0]

    def assigned_words(self) -> list[str]:
        """Return the words of all variables that have options: the script itself runs nothing that does."""
        return [word for value in self.values.values() if "--" in value for word in _split(value)]


def _num_options(words: list[str]) -> int:
    return sum(word.startswith("--") for word in words)


def _leads_command(value: str) -> bool:
    """Return True if a command follows an assignment on its line: `OMP_NUM_THREADS=1 torchrun ...`."""
    return re.match(r"(\"[^\"]*\"|'[^']*'|[^\s\"'(]*)\s+[^\s#;]", value) is not None


def _split(text: str) -> list[str]:
    """Return words as bash has them; a word with options in it was a command in quotes."""
    try:
        words = shlex.split(text)
    except ValueError:
        words = text.split()
    found: list[str] = []
    for word in words:
        found += _split(word) if re.search(r"(^|\s)--\w.*\s--\w|\.py\s.*--\w", word, re.DOTALL) else [word]
    return found


def _options(words: list[str]) -> dict[str, list[str]]:
    options: dict[str, list[str]] = {}
    values: list[str] | None = None
    for word in words:
        if _ENDS.fullmatch(word):
            break
        if word in ("$@", "$*"):
            continue
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word.partition("=")
            values = options[name] = [value] if equals else []
        elif values is not None:
            values.append(word)
    return options
