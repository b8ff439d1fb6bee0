"""Two hosts with a slow link between them, on one machine: network namespaces, a veth pair, a token bucket each way.

Needs root, `ip` and `tc`; `why_not` says what is missing. Everything is gone when the link is closed.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress


class ShapedLink:
    """`num` namespaces on one bridge, each with `rate` (as tc says it: 200mbit) out of it."""

    def __init__(self, rate: str, num: int = 2) -> None:
        self.rate, self.num = rate, num
        self._name = f"treadle{os.getpid() % 100_000}"
        self._net = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"

    def address(self, host: int) -> str:
        """Where a host is reached."""
        return f"{self._net}.{host + 1}"

    def interface(self, host: int) -> str:
        """What a host's address is on."""
        return f"{self._name}h{host}"

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """The same command, run on a host."""
        return ["ip", "netns", "exec", self.space(host), *command]

    def space(self, host: int) -> str:
        """The name of a host's namespace."""
        return f"{self._name}-{host}"

    def cut(self, host: int) -> None:
        """Pulls a host's cable."""
        _run("ip", "link", "set", f"{self._name}b{host}", "down")

    def mend(self, host: int) -> None:
        """Plugs a host's cable in again."""
        _run("ip", "link", "set", f"{self._name}b{host}", "up")

    def __enter__(self) -> ShapedLink:
        try:
            bridge = self._name
            _run("ip", "link", "add", bridge, "type", "bridge")
            _run("ip", "link", "set", bridge, "up")
            for host in range(self.num):
                self._add(host, bridge)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _add(self, host: int, bridge: str) -> None:
        space, inside, outside = self.space(host), self.interface(host), f"{self._name}b{host}"
        _run("ip", "netns", "add", space)
        _run("ip", "link", "add", outside, "type", "veth", "peer", "name", inside, "netns", space)
        _run("ip", "link", "set", outside, "master", bridge, "up")
        within = ("ip", "netns", "exec", space)
        _run(*within, "ip", "link", "set", "lo", "up")
        _run(*within, "ip", "addr", "add", f"{self.address(host)}/24", "dev", inside)
        _run(*within, "ip", "link", "set", inside, "up")
        bucket = ("tbf", "rate", self.rate, "burst", "256kb", "latency", "50ms")
        _run(*within, "tc", "qdisc", "add", "dev", inside, "root", *bucket)

    def __exit__(self, *_: object) -> None:
        for host in range(self.num):
            with suppress(RuntimeError):
                _run("ip", "netns", "del", self.space(host))
            with suppress(RuntimeError):
                _run("ip", "link", "del", f"{self._name}b{host}")
        with suppress(RuntimeError):
            _run("ip", "link", "del", self._name)


def why_not() -> str | None:
    """What stands against making such a link here, if something does."""
    try:
        with ShapedLink("100mbit"):
            return None
    except (RuntimeError, OSError) as error:
        return str(error)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
