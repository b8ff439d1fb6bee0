"""`treadle agent`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from treadle.cli.terminal import err
from treadle.host.extras import brought_by


def agent(
    target: Annotated[Path, typer.Option("--to", help="The engine: the directory of its workers' sockets.")],
    at: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where rank 0 of those that call has opened its world.")],
    worker: Annotated[
        int,
        typer.Option(help="The number of the worker, counted over all hosts. Buffers are on the GPU of its weights."),
    ] = 0,
    key: Annotated[
        Path | None,
        typer.Option(help="Where ranks are on several hosts: the same key on all, in a file only you can read."),
    ] = None,
) -> None:
    """Speaks for an inference worker in the updates that others call, until Ctrl-C.

    It joins when they are there, waits when they are gone, and brings a worker that was started again up to date.
    """
    host, colon, port = at.rpartition(":")
    if not colon or not host or not port.isdigit():
        raise ValueError(f"--at takes HOST:PORT, got {at!r}; rank 0 opens it with RankWorld.host(size, port=29600)")
    if not target.is_dir():
        raise ValueError(f"there is no directory {target}; give that of the engine's sockets, of mode 0700")
    with brought_by("update", needed_by="an agent"):
        from treadle.update.agent import Agent, Meeting
    meeting = Meeting(host, int(port), str(key) if key is not None else None)
    speaker = Agent(target, worker, meeting, lambda text: err.print(text, soft_wrap=True, markup=False))
    try:
        speaker.run()
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
