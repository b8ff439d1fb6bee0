"""`treadle update`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from treadle.cli.checkpoints import read_source
from treadle.cli.common_options import Json, parse_bytes, spread_options
from treadle.cli.output import print_json
from treadle.cli.terminal import err, out
from treadle.cli.update_ranks import ORDERS, RANK, StayingRanks, UpdateRanks, orders, workers_at
from treadle.host.extras import brought_by
from treadle.ir.show import show_bytes

if TYPE_CHECKING:
    import torch

    from treadle.cli.printed import UpdateJson
    from treadle.update import Updated, UpdateOptions, Updater, WeightSource


@dataclass(frozen=True, kw_only=True)
class UpdateTarget:
    """Where weights come from and go to."""

    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="A checkpoint: a directory of safetensors files, or one that treadle.train saved; or a trainer, "
            "MODULE:FUNCTION, which returns its rank's treadle.update.Source (under torchrun).",
        ),
    ] = None
    watch: Annotated[
        Path | None,
        typer.Option(
            help="In place of --from: the directory in which checkpoints appear. Each new one is loaded once it is "
            "whole, with the number at the end of its name as version, until Ctrl-C."
        ),
    ] = None
    target: Annotated[Path, typer.Option("--to", help="The engine: the directory of its workers' sockets.")]
    version: Annotated[
        int | None, typer.Option(help="The version's number; the one after the committed one if left out.")
    ] = None
    ledger: Annotated[
        Path | None,
        typer.Option(help="A directory that lasts, for decisions; 'ledger' beside the sockets if left out."),
    ] = None
    key: Annotated[
        Path | None,
        typer.Option(help="Where update ranks are on several hosts: the same key on all, in a file only you can read."),
    ] = None

    @property
    def log(self) -> Path:
        """The directory of the commit log."""
        return self.ledger if self.ledger is not None else self.target / "ledger"


@dataclass(frozen=True)
class UpdateManner:
    """The fields of `UpdateOptions`, as a user gives them."""

    rollback: Annotated[
        str | None,
        typer.Option(
            help="Where the old version waits until commit: host, disk or none; host with --changed elements."
        ),
    ] = None
    close: Annotated[str, typer.Option(help="drain lets requests end, abort breaks them off.")] = "drain"
    drain: Annotated[float, typer.Option(help="Seconds that requests get to end.")] = 30.0
    deadline: Annotated[float, typer.Option(help="Seconds of each wait.")] = 30.0
    bucket: Annotated[str, typer.Option(help="Bytes of a bucket.")] = "64MiB"
    check: Annotated[bool, typer.Option(help="Compare bytes from source to worker.")] = True
    compare_sources: Annotated[
        str, typer.Option(help="What ranks that hold the same weights compare: a sample, all or off.")
    ] = "sample"
    changed: Annotated[
        str,
        typer.Option(
            help="What moves: all tensors, or with --watch the elements that differ from the version before, which "
            "update ranks keep in host memory."
        ),
    ] = "tensors"

    def options(self) -> UpdateOptions:
        """Raises ValueError where a value is not one of those allowed."""
        from treadle.update import UpdateOptions

        return UpdateOptions(
            _memory(self.bucket),
            self.rollback,  # type: ignore[arg-type]  # checked there
            self.close,  # type: ignore[arg-type]
            self.drain,
            self.deadline,
            self.check,
            self.compare_sources,  # type: ignore[arg-type]
            changed=self.changed,  # type: ignore[arg-type]
        )


@dataclass(frozen=True)
class UpdateScope:
    """Which workers an update may touch, and whether it recovers."""

    recover: Annotated[
        bool, typer.Option("--recover", help="Bring the committed version to workers that lost it, from their peers.")
    ] = False
    takeover: Annotated[
        bool,
        typer.Option(
            "--takeover",
            help="These workers are the set, with the version they serve: their own log is lost, or other members of "
            "the log have ended.",
        ),
    ] = False


@spread_options
def update(where: UpdateTarget, how: UpdateManner, scope: UpdateScope, as_json: Json = False) -> None:
    """Pushes new weights to running engines: all workers serve them, or none does.

    Exits with 1 if the update was not committed. Without torchrun, starts an update rank for each worker.
    """
    given = (where.source is not None) + (where.watch is not None) + scope.recover
    if given != 1 or (where.watch is not None and where.version is not None):
        raise ValueError(
            "an update needs --from, --watch (which numbers versions itself), or --recover, which takes the version "
            "from the workers that serve it; give one of them"
        )
    _require_torch()
    if where.watch is not None:
        raise typer.Exit(_watch(where.watch, where))
    if RANK not in os.environ:
        raise typer.Exit(UpdateRanks(len(workers_at(where.target)), sys.argv[1:]).wait())
    raise typer.Exit(_be_rank(where, how.options(), scope, as_json=as_json))


def _require_torch() -> None:
    with brought_by("update", needed_by="an update"):
        import torch.distributed  # noqa: F401


def _memory(bucket: str) -> Any:
    from treadle.weights.buffer_sizes import Memory

    size = parse_bytes(bucket)
    return Memory(free_bytes=4 * size, share=1.0, target_bytes=size, least_bytes=min(size, 1 << 20))


def _watch(directory: Path, where: UpdateTarget) -> int:
    """Update for each new checkpoint, by ranks that stay."""
    from treadle.cli.watched_checkpoints import push_each

    if RANK in os.environ:
        raise ValueError(
            "--watch starts its update ranks itself, on this host; call it without torchrun, or give each "
            "checkpoint by --from under torchrun"
        )
    with closing(StayingRanks(where.target, _without_watch(sys.argv[1:]))) as ranks:
        try:
            return push_each(directory, where.log, lambda found: ranks.update(found.path, found.version))
        except BaseException:  # a second interrupt, or a mistake
            ranks.kill()
            raise


def _without_watch(arguments: list[str]) -> list[str]:
    """Return the arguments without --watch and its value."""
    at = next(index for index, each in enumerate(arguments) if each.partition("=")[0] == "--watch")
    return arguments[:at] + arguments[at + (1 if "=" in arguments[at] else 2) :]


# ---- one update rank -------------------------------------------------------------------------------------------------


def _be_rank(where: UpdateTarget, options: UpdateOptions, scope: UpdateScope, *, as_json: bool) -> int:
    """Join the process group, update, once or at each order, and print on rank 0; return the exit code."""
    import torch.distributed as dist

    from treadle.update import UpdateError

    _join_group()
    rank = dist.get_rank()
    bar = _Bar() if rank == 0 and err.is_terminal and not as_json else None
    say: Callable[[str], None] = err.print if rank == 0 and not as_json else lambda text: None
    try:
        for done in _run(where, options, scope, say, bar):
            if rank == 0:
                _print(done, as_json=as_json)
    except UpdateError as error:
        if rank == 0:
            err.print(f"[bold red]failed:[/] {error}", soft_wrap=True, markup=True)
        return 1
    finally:
        dist.destroy_process_group()
    return 0


def _join_group() -> None:
    """Join the process group, on the GPU of this rank if the host has any."""
    import torch.distributed as dist

    device = take_device(int(os.environ.get("LOCAL_RANK", os.environ[RANK])))
    os.environ.setdefault("TORCH_DIST_INIT_BARRIER", "1")  # a rank that fails at once leaves when all are connected
    backend = "gloo"
    if device is not None:
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device.type)}"
    dist.init_process_group(backend, timeout=timedelta(seconds=60))


def take_device(local_rank: int) -> torch.device | None:
    """Make the GPU of a rank this thread's current one: what names no device would take up memory on the first GPU."""
    import torch

    from treadle.update.memory.ipc_buffers import MEMORIES

    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type not in MEMORIES:
        return None
    num = torch.accelerator.device_count()
    if local_rank >= num:
        raise ValueError(
            f"local rank {local_rank} has no GPU of its own, {num} are visible; start at most one update rank for each "
            "GPU of a host, and make all of them visible (CUDA_VISIBLE_DEVICES)"
        )
    torch.accelerator.set_device_index(local_rank)
    return torch.device(found.type, local_rank)


def _run(
    where: UpdateTarget,
    options: UpdateOptions,
    scope: UpdateScope,
    say: Callable[[str], None],
    bar: _Bar | None,
) -> Iterator[Updated]:
    """Yield each update that is done."""
    import torch.distributed as dist

    from treadle.update import Updater

    vouched: dict[str, Any] = {"takeover": scope.takeover}
    shown: dict[str, Any] = {"say": say, "progress": bar if bar is not None else _silent}
    with Updater(where.target, ledger=where.log, key=where.key, options=options, **vouched, **shown) as updater:
        for each in _each_order(where):
            with bar.progress if bar is not None else nullcontext():
                done = _update_or_recover(updater, each)
            dist.barrier()  # rank 0 has the coordinator, and ends last
            yield done


def _each_order(where: UpdateTarget) -> Iterator[UpdateTarget]:
    """Yield what is to be done: the command, or with each checkpoint that comes on standard input."""
    if where.source != ORDERS:
        yield where
        return
    for checkpoint, version in orders():
        yield replace(where, source=str(checkpoint), version=version)


def _update_or_recover(updater: Updater, where: UpdateTarget) -> Updated:
    if where.source is None:
        return updater.recover()
    source = _source(where.source, updater.rank, updater.world)
    return updater.update(source, where.version if where.version is not None else _next_version(where.log))


def _next_version(ledger: Path) -> int:
    """The version after the committed one, which rank 0 tells all: the ledger is on its host."""
    import torch
    import torch.distributed as dist

    from treadle.update.coordinator.commit_log import peek

    number = torch.tensor((peek(ledger).version or 0) + 1 if dist.get_rank() == 0 else 0)
    dist.broadcast(number, 0)
    return int(number)


def _source(named: str, rank: int, world: int) -> WeightSource:
    if Path(named).is_dir():
        return read_source(Path(named), rank, world)
    module, colon, function = named.partition(":")
    if not colon:
        raise ValueError(f"--from takes a directory or MODULE:FUNCTION, got {named!r}, which is neither")
    from importlib import import_module

    sys.path.insert(0, str(Path.cwd()))
    try:
        found = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"--from {named}: there is no module {error.name!r} here or among those installed") from None
    if not hasattr(found, function):
        raise ValueError(f"--from {named}: {found.__file__} has no {function!r}; name the function that makes a Source")
    made: WeightSource = getattr(found, function)()
    return made


def _silent(done: int, total: int) -> None:
    """Show no progress."""


class _Bar:
    """A progress bar of the bytes broadcast, on stderr."""

    def __init__(self) -> None:
        columns = (TextColumn("updating"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self._bar = Progress(*columns, console=err, transient=True)
        self._task = self._bar.add_task("updating", total=None)

    @property
    def progress(self) -> AbstractContextManager[Any]:
        """Show the bar while it is entered."""
        return self._bar

    def __call__(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total)


def _print(done: Updated, *, as_json: bool) -> None:
    if as_json:
        shown: UpdateJson = {
            "version": done.version,
            "attempt": done.epoch,
            "bytes": done.size_bytes,
            "rollback_bytes": done.rollback_bytes,
            "rollbacks": done.rollbacks,
            "seconds": {phase: round(seconds, 6) for phase, seconds in done.seconds.items()},
            "notes": list(done.notes),
        }
        print_json("update", shown)
        return
    out.print(f"[green]version {done.version}[/] is served by all workers")
    seconds = ", ".join(f"{phase} {s:.3f}" for phase, s in done.seconds.items() if phase != "total" and s >= 0.0005)
    out.print(f"moved    {show_bytes(done.size_bytes)} in {done.seconds['total']:.3f} s ({seconds})", soft_wrap=True)
    for note in done.notes:
        out.print(f"note     {note}", soft_wrap=True)
