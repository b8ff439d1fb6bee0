"""What costs do not say: of a program's ops what is taken as 0, and of a costs file which options want more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from treadle.costs.costs import EXCHANGE, Costs
from treadle.costs.durations import WHOLE
from treadle.ir.ops import RECOMPUTE, OpKind, OpPhase, OpRole
from treadle.ir.program import Layout, Program

_SHARES: dict[OpPhase | None, str] = {OpPhase.F: "f", OpPhase.B: "i", OpPhase.W: "w"}
"""The action whose time attention and MLP share, by the phase of a part."""


def missing(program: Program, costs: Costs) -> tuple[str, ...]:
    """Return what a prediction of this program takes as 0 because the costs do not say it, by name.

    A time of 0 that the costs give is not missing. `dispatch` stands for both `dispatch_f` and `dispatch_b`.

    Example:
        >>> schedule = treadle.generate("1f1b", pp=2, microbatches=4)
        >>> costs = Costs("mine", treadle.load_costs("unit").clock, cells={"f": 3, "i": 3})
        >>> missing(treadle.lower(schedule, costs), costs)
        ('w', 'send')

    """
    layout = program.layout
    if layout.is_update:
        return ()
    there = [OpKind(int(kind)) for kind in np.unique(program.kind)]
    wanted = [name for kind in there for name in _wanted(kind, layout, costs)]
    lacking = list(dict.fromkeys(wanted))
    stems = {name: name.removesuffix("_f").removesuffix("_b").removesuffix("_w") for name in lacking}
    named = {kind.name.lower() for kind in there}
    shown = [
        stem if {n for n in named if n.startswith(f"{stem}_")} <= set(lacking) else name for name, stem in stems.items()
    ]
    return tuple(dict.fromkeys(shown))


def _wanted(kind: OpKind, layout: Layout, costs: Costs) -> Iterator[str]:
    """Names that an op's time comes from and that the costs do not have."""
    name = kind.cost_key
    section = costs.by_layers if layout.model_layers else costs.cells
    if kind is OpKind.B:
        yield from () if name in section else (half for half in ("i", "w") if not costs.says(section, half))
    elif kind.role is OpRole.ACTION:
        yield from () if costs.says(section, name) else (name,)
    elif kind in RECOMPUTE:
        yield from () if name in costs.layer else _wanted(RECOMPUTE[kind], layout, costs)
    elif kind.cost == "layer" and kind.role is OpRole.COMPUTE and not costs.has_parts:
        action = _SHARES[kind.phase]
        yield from () if costs.says(costs.by_layers or costs.cells, action) else (action,)
    else:
        yield from () if kind.cost and name in getattr(costs, kind.cost) else (name,)
    half = WHOLE.get(kind)
    if half is not None and half not in layout.weights:
        by_parts = half.cost != "layer" or costs.has_parts
        yield from (half.cost_key,) if by_parts and half.cost_key not in getattr(costs, half.cost) else ()


@dataclass(frozen=True)
class Lack:
    """Entries that a costs file does not have, and what follows from that."""

    names: tuple[str, ...]
    effect: str

    def __str__(self) -> str:
        return f"lacks {', '.join(self.names)}: {self.effect}"


def lacks(costs: Costs) -> tuple[Lack, ...]:
    """Return what costs lack for which options."""
    return tuple(_lacks(costs))


def _lacks(costs: Costs) -> Iterator[Lack]:
    section = costs.by_layers or costs.cells
    name = "[model]" if costs.model else "[cells]"
    actions = [action for action in ("f", "i", "w") if not costs.says(section, action)]
    if "b" in section:
        actions = [action for action in actions if action == "f"]
    if actions:
        yield Lack(tuple(f"{name} {action}" for action in actions), "computation that takes 0")
    if not costs.says_layers:
        effect = "`model_layers` is refused, and so is a comparison of schedules with different numbers of stages"
        yield Lack(("[cells] layers",), effect)
    if not costs.has_parts:
        yield Lack(("[layer] attn_f, mlp_f, ...",), "with `layers`, attention and MLP share f, i and w evenly")
    for section_name, names, effect in (
        ("layer", EXCHANGE, "taken as 0 with `moe` (counts and host not with `padded`)"),
        ("message", ("send",), "messages between stages take 0"),
        ("message", ("offload", "onload"), "taken as 0 with `offload`"),
        ("message", ("reduce_grad",), "taken as 0 with `dp` or `ep`"),
        ("message", ("reduce_scatter",), "taken as 0 with `buckets`"),
        ("ends", ("embed_f", "head_f"), "no embedding, head and loss are simulated"),
    ):
        absent = [f"[{section_name}] {key}" for key in names if key not in getattr(costs, section_name)]
        if len(absent) == len(names) or (absent and section_name != "ends"):
            yield Lack(tuple(absent), effect)
    silent = costs.unsaved(costs.blocks)
    if silent:
        effect = "peaks count layers, not bytes, and `memory_limit` of verify is refused"
        yield Lack(tuple(f"[saved_bytes] {part}" for part in silent), effect)
