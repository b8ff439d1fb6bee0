"""Compiles the device with g++, once for each torch, Python and text of its sources."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from treadle.host.errors import TreadleError

SOURCES = Path(__file__).parent
NAME = "treadle_sim"
CACHE = Path.home() / ".cache" / "treadle"
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-w", f"-DTORCH_EXTENSION_NAME={NAME}", "-DUSE_DISTRIBUTED")
LIBRARIES = ("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python")


class BuildError(TreadleError, RuntimeError):
    """The device cannot be compiled on this machine."""


def built(cache: Path = CACHE) -> Path:
    """Return the compiled extension; the first process compiles it, and others wait for that."""
    directory = cache / f"sim-{key()}"
    extension = directory / f"{NAME}.so"
    if extension.exists():
        return extension
    directory.mkdir(parents=True, exist_ok=True)
    with _locked(directory / "lock"):
        if not extension.exists():
            _compile(extension)
    return extension


def key() -> str:
    """Return the digest of all that the extension depends on."""
    digest = hashlib.sha256(repr((torch.__version__, sys.version, FLAGS)).encode())
    for path in _texts():
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _texts() -> list[Path]:
    return sorted(path for path in SOURCES.iterdir() if path.suffix in (".cpp", ".h"))


def _compile(extension: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        raise BuildError("no g++ here, and the device 'sim' is compiled when it is first used; apt-get install g++")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        raise BuildError("no Python.h here, and the device 'sim' is compiled against it; apt-get install python3-dev")
    root = Path(torch.__file__).parent
    includes = [root / "include", root / "include/torch/csrc/api/include", Path(sysconfig.get_path("include"))]
    common = [compiler, *FLAGS, *(part for path in includes for part in ("-isystem", str(path)))]
    with tempfile.TemporaryDirectory(dir=extension.parent) as directory:
        units = [path for path in _texts() if path.suffix == ".cpp"]
        objects = [Path(directory, path.stem + ".o") for path in units]
        commands = [[*common, "-c", str(unit), "-o", str(made)] for unit, made in zip(units, objects, strict=True)]
        with ThreadPoolExecutor(max(1, os.cpu_count() or 1)) as threads:
            list(threads.map(_run, commands))
        made = Path(directory, extension.name)
        libraries = [f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}", *LIBRARIES]
        _run([compiler, "-shared", *map(str, objects), *libraries, "-o", str(made)])
        made.replace(extension)


def _run(command: Sequence[str]) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise BuildError(f"the device 'sim' does not compile with torch {torch.__version__}: {ended.stderr[:4000]}")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
