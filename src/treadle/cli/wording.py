"""Messages of the library in the words of the command line.

The library names its own fields, in backquotes, as Python writes them: `model_layers=64`, `moe=True`, `ring`. Here they
become the options that a user types: --model-layers 64, --moe, --ring.
"""

from __future__ import annotations

import re

OPTIONS = {
    "blocks": "--layout",
    "by_layer": "--by-layer",
    "cluster": "--cluster",
    "dense": "--dense",
    "dp": "--dp",
    "ep": "--ep",
    "every_gpu": "--every-gpu",
    "fold": "--fold",
    "communicators": "--communicators",
    "format": "--format",
    "fsdp": "--fsdp",
    "hold": "--hold",
    "layers": "--layers",
    "lazy": "--lazy",
    "max_activations": "--max-activations",
    "memory_limit": "--memory-limit",
    "microbatches": "--microbatches",
    "model_layers": "--model-layers",
    "moe": "--moe",
    "mtp": "--mtp",
    "offload": "--offload",
    "padded": "--padded",
    "precision": "--precision",
    "ranks": "--ranks",
    "receives": "--receives",
    "buckets": "--buckets",
    "recompute": "--recompute",
    "ring": "--ring",
    "schedules": "--schedule",
    "split": "--no-split",
    "tied": "--tied",
    "vpp": "--vpp",
}
"""Fields and parameters of the library, each with its option."""

_NAMED = re.compile(r"`([a-z_]+)(?:=([^`]+))?`")


def as_typed(message: str) -> str:
    """Return a message with options in place of the fields that it names."""
    return _NAMED.sub(_option, message)


def _option(match: re.Match[str]) -> str:
    name, value = match[1], match[2]
    if name not in OPTIONS:
        return match[0]
    return OPTIONS[name] if value in (None, "True") else f"{OPTIONS[name]} {value.strip(chr(39))}"
