"""What is compared: several targets with sizes of their own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from treadle.cli.target import Target
from treadle.cli.terminal import note
from treadle.ir import Schedule
from treadle.ir.program import Program
from treadle.ir.trace import Trace
from treadle.schedules import family, is_known

Loaded: TypeAlias = Schedule | Program | Trace

_SIZES = {"pp": "pp", "vpp": "vpp", "m": "microbatches"}


def load_all(names: Sequence[str], sizes: Target) -> list[tuple[str, Loaded]]:
    """Load what is named. `sizes` are for schedules by name, where they have none of their own (`interleaved:vpp=4`).

    --vpp is for the schedules that can have so many chunks; where some of several cannot, they keep what they have, and
    a note says so.
    """
    targets = [_target(name, sizes) for name in names]
    named = [target for target in targets if target.is_name()]
    kept = [target for name, target in zip(names, targets, strict=True) if target in named and _keeps(name, sizes.vpp)]
    if kept and len(kept) < len(named):
        told = ", ".join(f"{target.name} keeps {family(target.name).default_vpp}" for target in kept)
        note(f"--vpp {sizes.vpp} is not for all of them: {told}")
        targets = [replace(target, vpp=None) if target in kept else target for target in targets]
    return [(name, target.load()) for name, target in zip(names, targets, strict=True)]


def _keeps(name: str, vpp: int | None) -> bool:
    """True for a schedule by name, without sizes of its own, that cannot have so many chunks on a rank."""
    return vpp is not None and is_known(name) and bool(family(name).vpps) and vpp not in family(name).vpps


def _target(text: str, sizes: Target) -> Target:
    """`zb-v`, `interleaved:vpp=4`, `1f1b:pp=8,m=32`, or a file, which has its own sizes."""
    name, colon, own = text.partition(":")
    if colon and is_known(name):
        given: dict[str, Any] = {}
        for part in own.split(","):
            size = re.fullmatch(r"(pp|vpp|m)=([0-9]{1,9})", part)
            if size is None:
                raise ValueError(
                    f"{text!r}: sizes of a schedule are pp, vpp and m, as in {name}:vpp=2,m=16, got {part!r}"
                )
            given[_SIZES[size[1]]] = int(size[2])
        return replace(sizes, name=name, **given)
    target = replace(sizes, name=text)
    return target if target.is_name() else Target(text)
