"""What mkdocs cannot do by itself: figures from the pages' own commands, help texts, files of the repository.

A picture that a page shows as `made/NAME.svg` is made by the command of that page that says `-o NAME.svg`.
A link to `../FILE` leads to a copy of that file in the site; so do links within such a copy.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path[:0] = [str(DOCS)]
os.environ.setdefault("COLUMNS", "100")

import pages  # noqa: E402

_MADE = re.compile(r"\((?:\.\./)*made/([\w.-]+)\)")
_OUTSIDE = re.compile(r"\]\(((?:\.\./)+)([\w./-]+)(#[\w-]*)?\)")
_INSIDE = re.compile(r"\]\((?![a-z]+:|[#/])([\w./-]+)(#[\w-]*)?\)")
_HELP = re.compile(r"^<!-- help: (.*) -->$", re.MULTILINE)
_NOT_RUN = re.compile(r"^<!-- not run: (.+) -->\n", re.MULTILINE)

_kept: list[tempfile.TemporaryDirectory[str]] = []


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Make the figures, and bring the files of the repository that pages link to."""
    place = tempfile.TemporaryDirectory(prefix="treadle-docs-")
    _kept.append(place)
    linked: set[str] = set()
    made_by: dict[str, str] = {}
    for file in files.documentation_pages():
        text = file.content_string
        shown = set(_MADE.findall(text))
        if shown:
            directory = Path(place.name) / file.src_uri
            _make(text, directory)
            for name in sorted(shown):
                if not (directory / name).exists():
                    raise PluginError(f"{file.src_uri} shows made/{name}, and no command there writes it")
                if (other := made_by.setdefault(name, file.src_uri)) != file.src_uri:
                    raise PluginError(f"{other} and {file.src_uri} both write made/{name}: name one of them otherwise")
                files.append(File.generated(config, f"made/{name}", abs_src_path=str(directory / name)))
        linked |= {path for path in (_outside(file.src_uri, m) for m in _OUTSIDE.finditer(text)) if path}
    copied: set[str] = set()
    while left := linked - copied:
        for path in sorted(left):
            files.append(File.generated(config, _copied(path), content=_as_page(path)))
            linked |= _linked(path)
        copied |= left
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Put help texts in, turn links out of the pages into links to copies, and show which blocks no test runs."""
    uri = page.file.src_uri
    up = "../" * (len(PurePosixPath(uri).parents) - 1)

    def link(found: re.Match[str]) -> str:
        path = _outside(uri, found)
        return f"]({up}{_copied(path)}{found[3] or ''})" if path else found[0]

    markdown = _OUTSIDE.sub(link, markdown)
    markdown = _HELP.sub(lambda found: f"```text\n{_help(found[1])}```", markdown)
    return _NOT_RUN.sub(lambda found: f"*No test runs this: {found[1]}.*\n\n", markdown)


def on_post_build(**_: Any) -> None:
    """Remove the figures' directory; the site has copies."""
    while _kept:
        _kept.pop().cleanup()


def _make(text: str, directory: Path) -> None:
    """Run the commands of a page that write files, in a directory."""
    directory.mkdir(parents=True)
    for name in ("examples", "docs"):
        (directory / name).symlink_to(ROOT / name)
    for block in pages.blocks(text):
        if block.title is not None:
            (directory / block.title).write_text(block.text, "utf-8")
        for command in block.commands() if block.language == "console" and block.why_not is None else ():
            if not command.line.startswith(("treadle", "printf")) or not (command.output or ">" in command.line):
                continue
            code, printed = pages.run(command.line, directory)
            if code not in (0, 1):
                raise PluginError(f"$ {command.line}\n{printed}")


def _outside(uri: str, found: re.Match[str]) -> str | None:
    """Return the path in the repository that a link leads to, if it leads out of the pages."""
    target = os.path.normpath(PurePosixPath("docs", uri).parent / found[1] / found[2])
    return None if target.startswith("docs/") else target


def _copied(path: str) -> str:
    return f"tree/{path}" if path.endswith(".md") else f"tree/{path}.md"


def _as_page(path: str) -> str:
    """Return the file as a page: markdown as it is, anything else as a listing."""
    if not (ROOT / path).is_file():
        raise PluginError(f"a page links to {path}, which is not in the repository")
    text = (ROOT / path).read_text("utf-8")
    if path.endswith(".md"):
        return _INSIDE.sub(lambda found: f"]({_from_copy(path, found[1])}{found[2] or ''})", text)
    language = {".py": "python", ".toml": "toml"}.get(Path(path).suffix, "text")
    return f"# {path}\n\n```{language}\n{text}```\n"


def _linked(path: str) -> set[str]:
    """Return the files of the repository that a copy of a page links to, and that are no pages."""
    if not path.endswith(".md"):
        return set()
    targets = {_target(path, found[1]) for found in _INSIDE.finditer((ROOT / path).read_text("utf-8"))}
    return {target for target in targets if not target.startswith("docs/")}


def _target(path: str, link: str) -> str:
    return os.path.normpath(PurePosixPath(path).parent / link)


def _from_copy(path: str, link: str) -> str:
    """Return the link of a file of the repository as its copy in the site has it."""
    target = _target(path, link)
    uri = target.removeprefix("docs/") if target.startswith("docs/") else _copied(target)
    return os.path.relpath(uri, PurePosixPath(_copied(path)).parent)


def _help(command: str) -> str:
    code, printed = pages.run(f"{command} --help", ROOT)
    if code:
        raise PluginError(f"{command} --help: {printed}")
    return "".join(line.rstrip() + "\n" for line in printed.strip("\n").splitlines())
