"""Runs scripts and commands on ranks that have torch imported, in the environment that torchrun gives.

    shown = torchrun(4, EXAMPLES / "moe_layer.py", cwd=tmp_path)
    ends = check(run_under_torchrun(2, treadle, "update", "--recover", "--to", "sockets"))

A script or a module is run as `__main__`, as Python runs one. Nothing restarts it: that is torchrun's own.
"""

from __future__ import annotations

import os
import runpy
import shlex
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, redirect_stdout
from pathlib import Path
from typing import TextIO, TypeVar, TypeVarTuple
from unittest.mock import patch

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from tests.support.ranks import Outcome, check, run_ranks

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def torchrun(num_ranks: int, script: Path, *arguments: str, cwd: Path, env: Mapping[str, str] | None = None) -> str:
    """What the ranks of a script write to stdout, rank by rank; an AssertionError if one fails."""
    words = [str(script), *arguments]
    return "".join(check(run_under_torchrun(num_ranks, _run_main, words, cwd, {} if env is None else env)))


def run_line(line: str, cwd: Path) -> str:
    """What `torchrun --nproc-per-node N SCRIPT ...`, or `-m MODULE ...`, writes to stdout and then to stderr."""
    name, option, num_ranks, *words = shlex.split(line)
    assert (name, option) == ("torchrun", "--nproc-per-node"), line
    ends = run_under_torchrun(int(num_ranks), _run_main, words, cwd, {})
    return "".join(check(ends)) + "".join(end.stderr for end in ends)


def run_under_torchrun(
    num_ranks: int, fn: Callable[[*Ts], T], *args: *Ts, stuck: Collection[int] = ()
) -> list[Outcome[T]]:
    """`fn(*args)` on each of so many ranks, which join no process group before: the environment says how to.

    Their processes are new, as torchrun's are. Those in `stuck` are killed when all others have ended.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's agent has it
    return run_ranks(num_ranks, _enter, num_ranks, store.port, fn, args, stuck=stuck, new=True)


def _enter(rank: int, num_ranks: int, port: int, fn: Callable[[*Ts], T], args: tuple[*Ts]) -> T:
    dist.destroy_process_group()
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    os.environ.update({name: str(value) for name, value in {**place, **where, "OMP_NUM_THREADS": 1}.items()})
    return fn(*args)


def _run_main(words: Sequence[str], cwd: Path, env: Mapping[str, str]) -> str:
    """Runs a script, or `-m` a module, to its end; what it and processes that it starts write to stdout."""
    is_module = words[0] == "-m"
    name, *arguments = words[1:] if is_module else words
    os.environ.update(env)
    with (
        chdir(cwd),
        patch.object(sys, "argv", [name, *arguments]),
        patch.object(sys, "path", [str(cwd if is_module else Path(name).resolve().parent), *sys.path]),
        patch.object(tempfile, "tempdir", None),  # read from the environment again
        tempfile.TemporaryFile("w+") as printed,
    ):
        with _stdout_into(printed):
            try:
                if is_module:
                    runpy.run_module(name, run_name="__main__", alter_sys=True)
                else:
                    runpy.run_path(name, run_name="__main__")
            except SystemExit as ended:
                if ended.code:
                    raise RuntimeError(f"{name} ended with {ended.code}") from ended
        printed.seek(0)
        return printed.read()


@contextmanager
def _stdout_into(file: TextIO) -> Iterator[None]:
    before = os.dup(1)
    os.dup2(file.fileno(), 1)
    try:
        with redirect_stdout(file):
            yield
        file.flush()
    finally:
        os.dup2(before, 1)
        os.close(before)
