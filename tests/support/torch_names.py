"""The names of torch that the source uses, looked up in the torch that runs this: its CUDA build needs no GPU for it.

    $ .ci/cuda_build                # torch 2.13.0 and the newest one, each in an environment of its own
    $ python -m tests.support.torch_names

Names by attribute from what is imported of torch, with the keywords they are called with; the fields that are set on
NCCL's options; the methods called on a communicator; and settings by environment variable, which are strings of the
libraries that read them.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SOURCE = Path(__file__).parents[2] / "src" / "treadle"

SETTING = re.compile(r"(?:TORCH_NCCL|NCCL|PYTORCH|TORCH)_[A-Z0-9_]+[A-Z0-9]")
"""Those of the driver, CUDA_, are read by no library of a wheel."""

OTHER_BUILDS = {"torch.distributed.ProcessGroupXCCL"}
"""Names of builds for other devices than CUDA's."""

COMMUNICATOR = {
    "send": 3,
    "recv": 3,
    "allreduce": 2,
    "allgather": 3,
    "_allgather_base": 3,
    "_reduce_scatter_base": 3,
    "alltoall_base": 4,
    "abort": 0,
    "shutdown": 0,
    "get_error": 0,
    "eager_connect_single_device": 1,
    "_group_start": 0,
    "_group_end": 0,
}
"""Methods of a process group's backend, and the most arguments they are called with."""


@dataclass
class Used:
    """What the source uses: names with the keywords of their calls, fields of options, settings; each with a place."""

    names: dict[str, set[str]] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    fields: dict[str, str] = field(default_factory=dict)
    methods: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, source: Path) -> Used:
        """Return what all files below a directory use."""
        used = cls()
        for path in sorted(source.rglob("*.py")):
            text = path.read_text()
            tree = ast.parse(text)
            aliases = dict(_imported(tree))
            for name in aliases.values():
                used._note(name, f"{path}:1")
            for node in ast.walk(tree):
                used._take(node, aliases, f"{path}:{getattr(node, 'lineno', 0)}")
        return used

    def _note(self, name: str, place: str) -> None:
        self.names.setdefault(name, set())
        self.places.setdefault(name, place)

    def _take(self, node: ast.AST, aliases: dict[str, str], place: str) -> None:
        if isinstance(node, ast.Attribute):
            name = _dotted(node, aliases)
            if name is not None:
                self._note(name, place)
            elif node.attr in COMMUNICATOR:
                self.methods.setdefault(node.attr, place)
        if isinstance(node, ast.Call):
            name = _dotted(node.func, aliases)
            if name is not None:
                self._note(name, place)
                self.names[name] |= {keyword.arg for keyword in node.keywords if keyword.arg is not None}
        if isinstance(node, ast.Assign):
            for target in (each for part in node.targets for each in getattr(part, "elts", [part])):
                text = ast.unparse(target)
                if text.startswith("options.") and "communicators.py" in place:
                    self.fields.setdefault(text.removeprefix("options."), place)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and SETTING.fullmatch(node.value):
            self.settings.setdefault(node.value, place)


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield (name here, name of torch) of what a module imports of torch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    yield (alias.asname, alias.name) if alias.asname else ("torch", "torch")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch" and not node.level:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _dotted(node: ast.AST, aliases: dict[str, str]) -> str | None:
    """Return the name of torch that an expression is, None for any other."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in aliases:
        return None
    return ".".join([aliases[node.id], *reversed(parts)])


def find(name: str) -> Any:
    """Return what a dotted name is here. Raises AttributeError or ImportError where it is nothing."""
    parts = name.split(".")
    for depth in range(len(parts), 0, -1):
        with suppress(ModuleNotFoundError):
            return reduce(getattr, parts[depth:], importlib.import_module(".".join(parts[:depth])))
    raise ImportError(f"no module {parts[0]}")


def keywords_of(called: Any) -> set[str] | None:
    """Return the keywords that something takes, None where it takes any or does not tell."""
    try:
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):
        text = str(getattr(called, "__doc__", None) or "") + str(getattr(called.__init__, "__doc__", None) or "")
        return set(re.findall(r"\w+", text)) | ({"out"} if _writes_out(called) else set()) or None
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return None
    return {each.name for each in parameters if each.kind not in (each.POSITIONAL_ONLY, each.VAR_POSITIONAL)}


def _writes_out(called: Any) -> bool:
    op = getattr(torch.ops.aten, getattr(called, "__name__", ""), None)
    return op is not None and any("out" in overload for overload in op.overloads())


def lacking(used: Used) -> list[str]:
    """Return a line for each name, keyword, field, method and setting that this torch lacks."""
    return [*_names(used), *_fields(used), *_methods(used), *_settings(used)]


def _names(used: Used) -> Iterator[str]:
    for name, given in sorted(used.names.items()):
        if name in OTHER_BUILDS or name.startswith("torch.utils.tensorboard"):  # which needs another package
            continue
        try:
            found = find(name)
        except (AttributeError, ImportError) as error:
            yield f"{used.places[name]}: {name}: {error}"
            continue
        taken = keywords_of(found) if given else None
        if taken is not None and not given <= taken:
            yield f"{used.places[name]}: {name} takes no {', '.join(sorted(given - taken))}"


def _fields(used: Used) -> Iterator[str]:
    options = dist.ProcessGroupNCCL.Options()
    for name, place in sorted(used.fields.items()):
        holder: Any = options
        for part in name.split("."):
            if not hasattr(holder, part):
                yield f"{place}: ProcessGroupNCCL.Options has no {name}"
                break
            holder = getattr(holder, part)


def _methods(used: Used) -> Iterator[str]:
    for name, place in sorted(used.methods.items()):
        method = getattr(dist.ProcessGroupNCCL, name, None)
        if method is None:
            yield f"{place}: ProcessGroupNCCL has no {name}"
            continue
        signatures = re.findall(rf"{name}\((.*)\) ->", str(method.__doc__))
        most = max((text.count(": ") - 1 for text in signatures), default=None)
        if most is not None and most < COMMUNICATOR[name]:
            yield f"{place}: ProcessGroupNCCL.{name} takes {most} arguments, not {COMMUNICATOR[name]}"


def _settings(used: Used) -> Iterator[str]:
    left = dict(used.settings)
    for path in _libraries():
        if not left:
            return
        raw = path.read_bytes()
        left = {name: place for name, place in left.items() if name.encode() not in raw}
    for name, place in sorted(left.items()):
        yield f"{place}: no library of torch reads {name}"


def _libraries() -> Iterator[Path]:
    """Yield torch's libraries and those of NVIDIA beside it, and its Python files last."""
    home = Path(torch.__file__).parent
    yield from sorted((home / "lib").glob("lib*.so*"))
    yield from sorted(path for path in (home.parent / "nvidia").rglob("libnccl*.so*"))
    yield from sorted((home / "distributed").rglob("*.py"))


def main() -> int:
    used = Used.of(SOURCE)
    found = lacking(used)
    counts = {
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
        "names": len(used.names),
        "fields": len(used.fields),
        "methods": len(used.methods),
        "settings": len(used.settings),
        "lacking": len(found),
    }
    sys.stdout.write("\n".join([*found, json.dumps(counts), ""]))
    return 1 if found else 0


if __name__ == "__main__":
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    sys.exit(main())
