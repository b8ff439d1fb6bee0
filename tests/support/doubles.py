"""Stand-ins of objects that need a GPU. Each method names the lines that it copies, and behaves as they do.

@double_of("torch.distributed.ProcessGroupNCCL")
class Nccl:
    def shutdown(self) -> None:
        \"\"\"torch 2.12 ProcessGroupNCCL.cpp:1586-1634: waits until the peers have come here, too.\"\"\"
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

Kind = TypeVar("Kind", bound=type)

SOURCE = re.compile(r"\b(torch|NCCL|DeepEP) v?\d[\w.]* [\w/.]+\.(cpp|hpp|h|py|cu|cc|pyi):\d+(-\d+)?\b")

MARKS = {
    "eager_connect_single_device",
    "_group_start",
    "_is_initialized",
    "get_dispatch_layout",
    "elapsed_time",
    "query",
    "wait_event",
    "alltoall_base",
    "_reduce_scatter_base",
    "wait_stream",
    "record_stream",
}
"""Methods that no other object has: a class among the tests that defines one is a double."""


def double_of(real: str, own: Sequence[str] = ()) -> Callable[[Kind], Kind]:
    """Declare that a class stands in for `real`, which lacks the methods `own`."""
    assert real
    assert not isinstance(own, str)

    def declared(kind: Kind) -> Kind:
        return kind

    return declared


@dataclass(frozen=True)
class Lack:
    """A double that is not declared (`method` is ""), or a method of one without its source."""

    path: str
    name: str
    method: str


def lacks(paths: Sequence[Path]) -> Iterator[Lack]:
    """Yield what is lacking of the doubles in these files."""
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                yield from _lacks(str(path), node)


def _lacks(path: str, node: ast.ClassDef) -> Iterator[Lack]:
    methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
    calls = [each for each in node.decorator_list if isinstance(each, ast.Call)]
    declared = next((each for each in calls if ast.unparse(each.func) == "double_of"), None)
    if declared is None:
        if MARKS & {each.name for each in methods}:
            yield Lack(path, node.name, "")
        return
    own = next((ast.literal_eval(each.value) for each in declared.keywords if each.arg == "own"), ())
    for method in methods:
        if method.name not in own and SOURCE.search(ast.get_docstring(method) or "") is None:
            yield Lack(path, node.name, method.name)
