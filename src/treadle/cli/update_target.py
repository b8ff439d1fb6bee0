"""The options of `update`, a weight update that show, verify, simulate and draw take where others take a schedule."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treadle.cli.options import parse_bytes
from treadle.cli.target import UPDATE, Target
from treadle.cli.terminal import working
from treadle.ir import Schedule

if TYPE_CHECKING:
    from treadle.ir.program import Program
    from treadle.ir.trace import Trace
    from treadle.weights.rates import Rates
    from treadle.weights.stream import Stream


def _option(name: str, help: str) -> Any:
    """An option that `treadle COMMAND --help` leaves out, and `treadle COMMAND update --help` has."""
    hidden = UPDATE not in sys.argv[1:3]
    return typer.Option(f"--{name}", help=help, rich_help_panel="A weight update", hidden=hidden)


@dataclass(frozen=True)
class Update:
    """The options as given. Every device is a source of as many bytes; times are units, or follow from sizes."""

    devices: Annotated[int | None, _option("devices", "Devices, each with an update rank and a worker.")] = None
    rounds: Annotated[int | None, _option("rounds", "Buckets of each device.")] = None
    h2d_buffers: Annotated[int, _option("h2d-buffers", "H2D buffers of a device: 0, 1 or 2.")] = 1
    ipc_buffers: Annotated[int, _option("ipc-buffers", "IPC buffers of a device: 1 or 2.")] = 2
    size: Annotated[str | None, _option("size", "Bytes of the model, instead of --rounds: 1029GB.")] = None
    bucket: Annotated[str | None, _option("bucket", "Bytes of a bucket, with --size: 8GiB.")] = None
    broadcast_rate: Annotated[
        str | None, _option("broadcast-rate", "Bytes a second of a broadcast, with --size: 75GB.")
    ] = None
    h2d_rate: Annotated[
        str | None, _option("h2d-rate", "Bytes a second of a copy to the device; free if left out.")
    ] = None
    reload_rate: Annotated[
        str | None, _option("reload-rate", "Bytes a second of a reload of a whole bucket; free if left out.")
    ] = None

    def load(self, target: Target) -> Schedule | Program | Trace:
        """Load the target; an update is simulated at once, as its times do not come from costs."""
        if target.name == UPDATE:
            return self.trace(target)
        self._check_unused(target)
        loaded = target.load()
        if isinstance(loaded, Schedule):
            return loaded
        from treadle.ir.program import Program
        from treadle.weights.rates import simulate_update

        if isinstance(loaded, Program) and loaded.layout.is_update:
            return simulate_update(loaded)
        return loaded

    def trace(self, target: Target) -> Trace:
        """The update that the options describe, predicted."""
        from treadle.weights.lower import lower_update
        from treadle.weights.rates import simulate_update

        target.check_no_size()
        stream, rates = self._stream(), self._rates()
        with working("simulating"):
            return simulate_update(lower_update(stream), rates)

    def _stream(self) -> Stream:
        if self.devices is None or (self.rounds is None) == (self.size is None):
            raise ValueError(
                f"{UPDATE} needs --devices and --rounds, or --devices, --size and --bucket: "
                f"{UPDATE} --devices 4 --rounds 2"
            )
        from treadle.weights.stream import even_stream

        buffers = {"num_h2d": self.h2d_buffers, "num_ipc": self.ipc_buffers}
        if self.size is None:
            assert self.rounds is not None
            return even_stream(self.devices, self.rounds, **buffers)
        total, bucket = parse_bytes(self.size), parse_bytes(self.bucket if self.bucket is not None else self.size)
        if total < 1 or bucket < 1 or self.devices < 1:
            raise ValueError(f"--size, --bucket and --devices are 1 or more, got {total}, {bucket} and {self.devices}")
        each = -(-total // self.devices)
        bucket = min(bucket, each)
        return even_stream(self.devices, -(-each // bucket), bucket_bytes=bucket, total_bytes=total, **buffers)

    def _rates(self) -> Rates | None:
        given = {name: getattr(self, f"{name}_rate") for name in ("h2d", "broadcast", "reload")}
        if self.size is None:
            for name, rate in given.items():
                if rate is not None:
                    raise ValueError(f"--{name}-rate is about bytes, which need --size and --bucket, not --rounds")
            if self.bucket is not None:
                raise ValueError("--bucket is about bytes, which need --size instead of --rounds")
            return None
        if self.broadcast_rate is None:
            raise ValueError("--size needs --broadcast-rate, the bytes a second of a broadcast: --broadcast-rate 75GB")
        from treadle.weights.rates import Rates

        return Rates(**{name: float(parse_bytes(rate)) for name, rate in given.items() if rate is not None})

    def _check_unused(self, target: Target) -> None:
        for field in fields(self):
            if getattr(self, field.name) != field.default:
                option = field.name.replace("_", "-")
                raise ValueError(f"--{option} is for {UPDATE}, got {target.name}; leave it out")

    def __str__(self) -> str:
        given = ((field.name.replace("_", "-"), getattr(self, field.name), field.default) for field in fields(self))
        return " ".join(f"--{name} {value}" for name, value, default in given if value != default)
