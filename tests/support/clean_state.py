"""Is a process as it was before it ran somebody's function: what a rank that stays up is asked after each one.

    state = ProcessState()
    run(something)
    left = state.changes()  # ["thread 'lane ep'", "treadle.dist.channel.keep is another"]; empty: as it was

Compared are threads, children, descriptors, the environment, signals, torch's own settings, and by identity every
attribute of Treadle's and the tests' modules and of their classes, with the code of their functions: what a test
replaced and did not put back is found. Into what a module keeps and changes is not looked, but for dicts in
capitals, such as `HANDLERS`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch

PACKAGES = ("treadle", "tests")
MODULES = (
    "builtins",
    "os",
    "select",
    "signal",
    "socket",
    "threading",
    "time",
    "torch.distributed",
    "torch.nn.functional",
)
"""Those that are compared: all of the first, and of other people's the ones that tests replace parts of."""

ENDING_S = 1.0
"""How long a thread or a child that is about to end is waited for."""


class ProcessState:
    """What this process is like now, before it runs something."""

    def __init__(self) -> None:
        self._threads = set(threading.enumerate())
        self._children = set(_children())
        self._descriptors = _descriptors()
        self._settings = _settings()
        self._modules: dict[str, _Module] = {}
        self.see_modules()

    def see_modules(self) -> None:
        """Remembers the modules that were imported since."""
        for name, module in list(sys.modules.items()):
            if name not in self._modules and (name.partition(".")[0] in PACKAGES or name in MODULES):
                self._modules[name] = _Module(module)

    def changes(self) -> list[str]:
        """What is not as it was, a phrase each."""
        until_s = time.monotonic() + ENDING_S
        while (running := [*self._running()]) and time.monotonic() < until_s:
            time.sleep(0.005)
        was, now = self._settings, _settings()
        return [
            *running,
            *(f"descriptor {fd}: {path}" for fd, path in _descriptors().items() if fd not in self._descriptors),
            *(f"{name} is {value}, was {was[name]}" for name, value in now.items() if value != was[name]),
            *(f"{name}.{part} is another" for name, seen in self._modules.items() for part in seen.changes()),
        ]

    def _running(self) -> Iterator[str]:
        yield from (f"thread {thread.name!r}" for thread in threading.enumerate() if thread not in self._threads)
        yield from (f"child {pid}" for pid in _children() if pid not in self._children)


class _Module:
    """The attributes of a module and of its classes, and the code of their functions."""

    def __init__(self, module: ModuleType) -> None:
        own = {name: value for name, value in vars(module).items() if not name.startswith("__")}
        classes = [v for v in own.values() if issubclass(type(v), type) and v.__module__ == module.__name__]
        self._places: list[tuple[Any, dict[str, Any]]] = [(vars(module), own)]
        self._places += [(vars(cls), dict(vars(cls))) for cls in classes]
        self._places += [(v, dict(v)) for name, v in own.items() if name.isupper() and type(v) is dict]  # registries
        # By `type`: `isinstance` asks the part, and torch's deprecated ones then warn.
        parts = [part for _, values in self._places for part in values.values()]
        self._functions = [part for part in parts if type(part) is FunctionType]
        self._codes = [function.__code__ for function in self._functions]

    def changes(self) -> Iterator[str]:
        """Names of what was replaced or is gone; what came is no change: modules are imported, classes get caches."""
        for place, values in self._places:
            yield from (name for name, value in values.items() if place.get(name) is not value)
        yield from (
            f.__qualname__ for f, code in zip(self._functions, self._codes, strict=True) if f.__code__ is not code
        )


def _children() -> Iterator[int]:
    for thread in Path("/proc/self/task").iterdir():
        try:
            yield from map(int, (thread / "children").read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue


def _descriptors() -> dict[str, str]:
    found = {}
    for path in Path("/proc/self/fd").iterdir():
        try:
            found[path.name] = str(path.readlink())
        except FileNotFoundError:
            continue  # that of the listing itself
    return found


def _settings() -> dict[str, object]:
    """What a process has one of."""
    return {
        "environment": dict(os.environ),
        "directory": Path.cwd(),
        "sys.path": list(sys.path),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "trace": (sys.gettrace(), sys.getprofile(), threading.gettrace(), threading.getprofile()),
        "switch interval": sys.getswitchinterval(),
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook),
        "warnings": list(warnings.filters),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads of torch": torch.get_num_threads(),
        "autocast": torch.is_autocast_enabled("cpu"),
    }
