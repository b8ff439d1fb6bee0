"""Reads the pages: their commands with the output shown under them, their code, and the files they give.

```console              `$ command` lines, each with its output; `...` stands for any text
```python               code, run in the order of the page, in one namespace
```pycon                the same, with the output shown
```toml title="x.toml"  a file that the reader is to write: any language, with a title
<!-- not run: why -->   on the line above a block: no test runs it
"""

from __future__ import annotations

import doctest
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO
from unittest.mock import patch

DOCS = Path(__file__).parent
ROOT = DOCS.parent

_BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<why>[^\n]+) -->\n)?"
    r"```(?P<language>[a-z]*)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
_SHELL = re.compile(r"[<&;$*`\\\"()]|\d>|>>")
"""What only a shell reads, outside of quotes."""

COLUMNS = 80
"""The width of a terminal that is not there."""


@dataclass(frozen=True)
class Command:
    """A command line and the output that stands under it."""

    line: str
    expected: str

    @property
    def output(self) -> str | None:
        """Return the file that `-o` names, if there is one."""
        found = re.search(r"(?:^| )(?:-o|--output) (\S+)", self.line)
        return found[1] if found else None


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; `why_not` says why no test runs it."""

    language: str
    title: str | None
    text: str
    why_not: str | None

    def commands(self) -> Iterator[Command]:
        """Yield the commands of a console block."""
        for part in re.split(r"^\$ ", self.text, flags=re.MULTILINE)[1:]:
            line, _, output = part.partition("\n")
            yield Command(line, output)


def blocks(text: str) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    return [Block(found["language"], found["title"], found["text"], found["why"]) for found in _BLOCK.finditer(text)]


def pages() -> list[Path]:
    """Return README and every page of the site."""
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def run(line: str, directory: Path, timeout_s: float = 1200) -> tuple[int, str]:
    """Run a command line in a directory; return its exit code and what it printed.

    `treadle` commands run in this process, so that imports are paid for once, with pipes between them and a file at the
    end if the line has these; the rest runs in a shell.
    """
    pipeline = _pipeline(line)
    if pipeline is not None:
        return _run_pipeline(pipeline, directory)
    env = {**os.environ, "PATH": _path(), "COLUMNS": str(COLUMNS)}
    env.pop("FORCE_COLOR", None)
    env.setdefault("OMP_NUM_THREADS", "1")  # as torchrun would set it, with a warning
    done = subprocess.run(
        line, shell=True, cwd=directory, env=env, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    return done.returncode, settled(done.stdout + done.stderr)


def _path() -> str:
    """Return PATH with the commands of this installation first."""
    return f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def settled(printed: str) -> str:
    """Leave out what only the first run of an installation says: that it compiles."""
    return "".join(line for line in printed.splitlines(keepends=True) if not line.startswith("compiling, once for"))


@dataclass(frozen=True)
class _Pipeline:
    """Commands that read each other's output, and the file that gets the last one's."""

    commands: list[list[str]]
    output: str | None


def _pipeline(line: str) -> _Pipeline | None:
    """Read a line of `treadle` commands; None if it has others, or more than a shell is not needed for."""
    if _SHELL.search(re.sub(r"'[^']*'", "", line)):
        return None
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|>")
    lexer.whitespace_split = True
    commands: list[list[str]] = [[]]
    words = iter(lexer)
    for word in words:
        if word == "|":
            commands.append([])
        elif word == ">":
            output, *more = words
            return _Pipeline(commands, output) if _are_ours(commands) and not more else None
        else:
            commands[-1].append(word)
    return _Pipeline(commands, None) if _are_ours(commands) else None


def _are_ours(commands: list[list[str]]) -> bool:
    return all(words[:1] == ["treadle"] for words in commands)


def _run_pipeline(pipeline: _Pipeline, directory: Path) -> tuple[int, str]:
    printed, handed_on, code = io.StringIO(), "", 0
    *earlier, last = pipeline.commands
    for words in earlier:
        between = io.StringIO()
        run_here(words, directory, stdin=handed_on, stdout=between, stderr=printed)
        handed_on = between.getvalue()
    written = printed if pipeline.output is None else io.StringIO()
    code = run_here(last, directory, stdin=handed_on, stdout=written, stderr=printed)
    if pipeline.output is not None:
        (directory / pipeline.output).write_text(written.getvalue(), "utf-8")
    return code, settled(printed.getvalue())


def run_here(words: list[str], directory: Path, *, stdin: str = "", stdout: TextIO, stderr: TextIO) -> int:
    """Run `treadle ...` in this process as a process of its own would, its streams not on a terminal.

    Returns the exit code. What is not an error of a user's is raised.
    """
    from treadle.cli import main
    from treadle.cli.terminal import err, out
    from treadle.ir.kernel import Compiled

    widths = out.width, err.width
    environment = {name: value for name, value in os.environ.items() if name != "FORCE_COLOR"}
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, {**environment, "COLUMNS": str(COLUMNS)}, clear=True))
        stack.enter_context(patch.object(sys, "argv", words))
        stack.enter_context(patch.object(sys, "stdin", io.StringIO(stdin)))
        stack.enter_context(redirect_stdout(stdout))
        stack.enter_context(redirect_stderr(stderr))
        stack.enter_context(patch.object(Compiled, "compiling"))  # `main` sets it
        stack.enter_context(chdir(directory))
        out.width = err.width = COLUMNS
        try:
            main()
        except SystemExit as ended:
            return ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
        finally:
            out.width, err.width = widths
    return 0


@dataclass(frozen=True)
class Ran:
    """What became of a command or a piece of code: what was expected, and what came."""

    what: str
    expected: str
    printed: str
    code: int

    @property
    def is_right(self) -> bool:
        """Tell whether the output is the one shown; a command shown without any must succeed, too."""
        if not self.expected and self.code:
            return False
        return doctest.OutputChecker().check_output(self.expected, self.printed, doctest.ELLIPSIS)


def replay(
    text: str,
    directory: Path,
    elsewhere: Collection[str] = (),
    run_line: Callable[[str, Path], tuple[int, str]] = run,
) -> Iterator[Ran]:
    """Do what a page says, block by block; `examples`, `docs` and `configs` are in the directory, as in a checkout.

    Commands that install, and those that are run `elsewhere`, are passed over.
    """
    for name in ("examples", "docs", "configs"):
        (directory / name).symlink_to(ROOT / name)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(text):
        if block.why_not is not None:
            continue
        if block.title is not None:
            (directory / block.title).write_text(block.text, "utf-8")
        elif block.language == "console":
            for command in block.commands():
                if not (command.line.startswith("pip install") or command.line in elsewhere):
                    code, printed = run_line(command.line, directory)
                    yield Ran(command.line, command.expected, _trimmed(printed), code)
        elif block.language in ("python", "pycon"):
            yield _run_code(block, namespace, directory)


def _run_code(block: Block, namespace: dict[str, object], directory: Path) -> Ran:
    with (
        chdir(directory),
        patch.dict(os.environ, PATH=_path()),
        patch.object(sys, "path", [str(directory), *sys.path]),  # modules that the page has written
    ):
        if block.language == "pycon":
            test = doctest.DocTestParser().get_doctest(block.text, namespace, "page", None, None)
            told: list[str] = []
            runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
            runner.run(test, out=told.append, clear_globs=False)
            namespace |= test.globs
            return Ran(block.text, "", "".join(told), 0)
        with redirect_stdout(io.StringIO()):
            exec(compile(block.text, "page", "exec"), namespace)
        return Ran(block.text, "", "", 0)


def _trimmed(output: str) -> str:
    """Remove the blanks that pad tables to the width of a terminal."""
    return "".join(line.rstrip() + "\n" for line in output.splitlines())
