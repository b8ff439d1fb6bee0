"""`treadle simulate-update`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from treadle.api import load_save
from treadle.cli.commands.simulate import print_path, print_update, step_object
from treadle.cli.common_options import Json, parse_bytes
from treadle.cli.output import print_json
from treadle.cli.terminal import again, suggest, working
from treadle.step import Step
from treadle.weights.bucket_stream import even_stream
from treadle.weights.summary import UpdateMetrics
from treadle.weights.update_lowering import lower_update
from treadle.weights.update_rates import Rates
from treadle.weights.update_rates import simulate_update as predict_update

if TYPE_CHECKING:
    from treadle.weights.bucket_stream import Stream


def simulate_update(
    devices: Annotated[int, typer.Option(help="Devices, each with an update rank and a worker.")],
    rounds: Annotated[int | None, typer.Option(help="Buckets of each device; times are units.")] = None,
    h2d_buffers: Annotated[int, typer.Option(help="H2D buffers of a device: 0, 1 or 2.")] = 1,
    ipc_buffers: Annotated[int, typer.Option(help="IPC buffers of a device: 1 or 2.")] = 2,
    size: Annotated[str | None, typer.Option(help="Bytes of the model, instead of --rounds: 1029GB.")] = None,
    bucket: Annotated[str | None, typer.Option(help="Bytes of a bucket, with --size: 8GiB.")] = None,
    broadcast_rate: Annotated[
        str | None, typer.Option(help="Bytes a second of a broadcast, with --size: 75GB.")
    ] = None,
    h2d_rate: Annotated[
        str | None, typer.Option(help="Bytes a second of a copy to the device; free if left out.")
    ] = None,
    reload_rate: Annotated[
        str | None, typer.Option(help="Bytes a second of a reload of a whole bucket; free if left out.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the trace: .npz, .json, .json.gz (Perfetto).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Predicts a weight update: how long it takes, and how much of copies and reloads broadcasts hide.

    Every device is a source of as many bytes. show, verify, simulate and draw take the trace that -o writes.
    """
    rates = _rates(size, bucket, {"h2d": h2d_rate, "broadcast": broadcast_rate, "reload": reload_rate})
    stream = _stream(devices, rounds, size, bucket, {"num_h2d": h2d_buffers, "num_ipc": ipc_buffers})
    with working("simulating"):
        step = Step(predict_update(lower_update(stream), rates))
    if output is not None:
        with working(f"writing {output}"):
            load_save.save_trace(step.trace, output)
    if as_json:
        print_json("simulate-update", step_object(step))
        return
    assert isinstance(step.metrics, UpdateMetrics)
    print_update(step.metrics, step.about)
    print_path(step.path, step.metrics.clock)
    suggest(again("-o update.npz") if output is None else f"treadle draw {shlex.quote(str(output))} -o update.svg")


def _stream(devices: int, rounds: int | None, size: str | None, bucket: str | None, buffers: dict[str, int]) -> Stream:
    if (rounds is None) == (size is None):
        raise ValueError(
            "an update has --rounds, or --size and --bucket: --devices 4 --rounds 2, or "
            "--devices 16 --size 1029GB --bucket 8GiB --broadcast-rate 75GB"
        )
    if rounds is not None:
        return even_stream(devices, rounds, **buffers)
    assert size is not None
    total, largest = parse_bytes(size), parse_bytes(bucket if bucket is not None else size)
    if total < 1 or largest < 1 or devices < 1:
        raise ValueError(f"--size, --bucket and --devices are 1 or more, got {total}, {largest} and {devices}")
    each = -(-total // devices)
    largest = min(largest, each)
    return even_stream(devices, -(-each // largest), bucket_bytes=largest, total_bytes=total, **buffers)


def _rates(size: str | None, bucket: str | None, given: dict[str, str | None]) -> Rates | None:
    if size is None:
        for name, rate in given.items():
            if rate is not None:
                raise ValueError(f"--{name}-rate is about bytes, which need --size and --bucket, not --rounds")
        if bucket is not None:
            raise ValueError("--bucket is about bytes, which need --size instead of --rounds")
        return None
    if given["broadcast"] is None:
        raise ValueError("--size needs --broadcast-rate, the bytes a second of a broadcast: --broadcast-rate 75GB")
    return Rates(**{name: float(parse_bytes(rate)) for name, rate in given.items() if rate is not None})
