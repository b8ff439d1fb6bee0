"""Settings of torch's NCCL watchdog under which a rank can raise an error about a lost peer.

By default torch's watchdog thread ends the process about a second after a peer has died, before Treadle can say which
rank was lost; its monitor does so where that thread is slow. Both read the environment when a group is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Setting(NamedTuple):
    """An environment variable of torch, a former name of it, the value that it needs, and why."""

    name: str
    former: str | None
    default: str
    needed: str
    why: str


SETTINGS = (
    Setting(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "NCCL_ASYNC_ERROR_HANDLING",
        default="3",
        needed="0",
        why="else torch ends this process when another rank dies, before Treadle can name it",
    ),
    Setting(
        "TORCH_NCCL_ENABLE_MONITORING",
        None,
        default="1",
        needed="0",
        why="else torch ends this process while Treadle aborts its communicators",
    ),
    Setting(
        "TORCH_NCCL_BLOCKING_WAIT",
        "NCCL_BLOCKING_WAIT",
        default="0",
        needed="0",
        why="else every wait stops the thread that launches, and nothing overlaps",
    ),
)

NEEDED = {setting.name: setting.needed for setting in SETTINGS}
"""The environment to give to every rank."""

_FALSE = ("0", "n", "no", "f", "false", "off")


def wrong_settings(environment: Mapping[str, str]) -> list[str]:
    """Return a sentence for each setting that this environment has wrong."""
    return [text for setting in SETTINGS if (text := _wrong(setting, environment)) is not None]


def refuse_wrong_settings(environment: Mapping[str, str]) -> None:
    """Raise ValueError if a communicator of NCCL made in this environment would end the process by itself."""
    wrong = wrong_settings(environment)
    if wrong:
        assigned = " ".join(f"{name}={value}" for name, value in NEEDED.items())
        raise ValueError(
            f"{'; '.join(wrong)}. Give every rank {assigned} before init_process_group: in the environment of "
            "torchrun, or os.environ.update(treadle.dist.nccl_settings.NEEDED) at the top of the script"
        )


def _wrong(setting: Setting, environment: Mapping[str, str]) -> str | None:
    name = setting.name
    if name not in environment and setting.former is not None and setting.former in environment:
        name = setting.former
    value = environment.get(name, setting.default)
    if value.strip().lower() in _FALSE:
        return None
    found = f"is {value!r}" if name in environment else f"is not set, which means {value}"
    return f"{name} {found}, and must be {setting.needed}: {setting.why}"
