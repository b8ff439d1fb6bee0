"""What a kind of op looks like and is called in pictures: one table a palette, the same for figures, page and terminal.

Neighbouring roles differ in lightness by 15 L* or carry a hatch, so that pictures survive a grey printer.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from enum import StrEnum

from weft.ir.program import OpKind


class Role(StrEnum):
    """What a reader tells apart by colour."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT = "input gradient"
    WEIGHT = "weight gradient"
    PP = "pipeline message"
    EP = "expert all-to-all"
    OUT = "offload"
    IN = "onload"
    DP = "gradient reduction"
    HOST = "host wait"


ROLE_OF: dict[OpKind, Role] = {
    **dict.fromkeys((OpKind.F, OpKind.ATTN_F, OpKind.MLP_F), Role.FORWARD),
    **dict.fromkeys((OpKind.B, OpKind.ATTN_B, OpKind.MLP_B), Role.BACKWARD),
    OpKind.I: Role.INPUT,
    **dict.fromkeys((OpKind.W, OpKind.ATTN_W, OpKind.MLP_W), Role.WEIGHT),
    **dict.fromkeys((OpKind.SEND_F, OpKind.SEND_B, OpKind.RECV_F, OpKind.RECV_B), Role.PP),
    **dict.fromkeys((OpKind.COUNTS, OpKind.DISPATCH_F, OpKind.COMBINE_F), Role.EP),
    **dict.fromkeys((OpKind.COMBINE_B, OpKind.DISPATCH_B), Role.EP),
    OpKind.HOST: Role.HOST,
    OpKind.OFFLOAD: Role.OUT,
    OpKind.ONLOAD: Role.IN,
    OpKind.REDUCE_GRAD: Role.DP,
}

NAMES: dict[OpKind, str] = {
    OpKind.F: "F",
    OpKind.B: "B",
    OpKind.I: "I",
    OpKind.W: "W",
    **dict.fromkeys((OpKind.SEND_F, OpKind.SEND_B, OpKind.RECV_F, OpKind.RECV_B), "PP"),
    **dict.fromkeys((OpKind.ATTN_F, OpKind.ATTN_B), "Attn"),
    **dict.fromkeys((OpKind.MLP_F, OpKind.MLP_B), "MLP"),
    **dict.fromkeys((OpKind.ATTN_W, OpKind.MLP_W), "WGrad"),
    OpKind.COUNTS: "counts",
    OpKind.HOST: "host",
    **dict.fromkeys((OpKind.DISPATCH_F, OpKind.DISPATCH_B), "EP-D"),
    **dict.fromkeys((OpKind.COMBINE_F, OpKind.COMBINE_B), "EP-C"),
    OpKind.OFFLOAD: "Offload",
    OpKind.ONLOAD: "Onload",
    OpKind.REDUCE_GRAD: "reduce",
}
"""What a box says, as the published panels do."""


@dataclass(frozen=True)
class Look:
    """A fill, the colour of text on it, and a hatch where the fill alone does not tell it from its neighbours."""

    fill: str
    text: str = "#000000"
    hatch: str = ""


Palette = dict[Role, Look]

PALETTES: dict[str, Palette] = {
    "kimi": {
        Role.FORWARD: Look("#8fb8ea"),
        Role.BACKWARD: Look("#e0736b"),
        Role.INPUT: Look("#f0a39c"),
        Role.WEIGHT: Look("#c4463f", "#ffffff"),
        Role.PP: Look("#57a05a"),
        Role.EP: Look("#f7dd72"),
        Role.OUT: Look("#d9d2c3", hatch="///"),
        Role.IN: Look("#efe9dc", hatch="\\\\\\"),
        Role.DP: Look("#8d78b5", "#ffffff"),
        Role.HOST: Look("#b9b9b9", hatch="..."),
    },
    "dualpipe": {
        Role.FORWARD: Look("#f2b03d"),
        Role.BACKWARD: Look("#5fa94a"),
        Role.INPUT: Look("#b5e08d"),
        Role.WEIGHT: Look("#6ea8e0", hatch="///"),
        Role.PP: Look("#8a8a8a"),
        Role.EP: Look("#f7ef9a"),
        Role.OUT: Look("#d9d2c3", hatch="///"),
        Role.IN: Look("#efe9dc", hatch="\\\\\\"),
        Role.DP: Look("#8d78b5", "#ffffff"),
        Role.HOST: Look("#b9b9b9", hatch="..."),
    },
    # Okabe and Ito's colours, told apart with any common colour blindness.
    "colourblind": {
        Role.FORWARD: Look("#56b4e9"),
        Role.BACKWARD: Look("#d55e00", "#ffffff"),
        Role.INPUT: Look("#e69f00", hatch="///"),
        Role.WEIGHT: Look("#0072b2", "#ffffff"),
        Role.PP: Look("#009e73", hatch="..."),
        Role.EP: Look("#f0e442"),
        Role.OUT: Look("#cccccc", hatch="///"),
        Role.IN: Look("#ededed", hatch="\\\\\\"),
        Role.DP: Look("#cc79a7"),
        Role.HOST: Look("#999999", hatch="xxx"),
    },
}


def palette(name: str) -> Palette:
    """The palette of this name, or a ValueError that names the ones there are."""
    name = "colourblind" if name == "colorblind" else name
    if name not in PALETTES:
        close = difflib.get_close_matches(name, PALETTES, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(PALETTES)}"
        raise ValueError(f"{name!r} is not a palette; {hint}")
    return PALETTES[name]
