"""Colours and names of ops in pictures: one table a palette, the same for figures, page and terminal.

Neighbouring roles differ in lightness by 15 L* or carry a hatch, so that pictures survive a grey printer.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from treadle.fields.nearest import did_you_mean
from treadle.ir.program import OpKind


class Role(StrEnum):
    """A class of ops with a colour of its own."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT = "input gradient"
    WEIGHT = "weight gradient"
    EMBED = "embedding"
    MTP = "multi-token prediction"
    HEAD = "head and loss"
    RECOMPUTE = "recomputation"
    PP = "pipeline message"
    EP = "expert all-to-all"
    OUT = "offload"
    IN = "onload"
    DP = "gradient reduction"
    STEP = "end of the step"
    HOST = "host wait"
    H2D = "H2D"
    SOURCE = "broadcast (src)"
    BROADCAST = "broadcast (dst)"
    RELOAD = "reload weights"


ROLE_OF: dict[OpKind, Role] = {
    **dict.fromkeys((OpKind.F, OpKind.ATTN_F, OpKind.MLP_F), Role.FORWARD),
    **dict.fromkeys((OpKind.B, OpKind.ATTN_B, OpKind.MLP_B), Role.BACKWARD),
    OpKind.I: Role.INPUT,
    **dict.fromkeys((OpKind.W, OpKind.ATTN_W, OpKind.MLP_W, OpKind.MTP_W, OpKind.HEAD_W), Role.WEIGHT),
    **dict.fromkeys((OpKind.EMBED_F, OpKind.EMBED_B), Role.EMBED),
    **dict.fromkeys((OpKind.HEAD_F, OpKind.HEAD_B), Role.HEAD),
    **dict.fromkeys((OpKind.MTP_F, OpKind.MTP_B), Role.MTP),
    **dict.fromkeys((OpKind.ATTN_R, OpKind.MLP_R), Role.RECOMPUTE),
    **dict.fromkeys((OpKind.SEND_F, OpKind.SEND_B, OpKind.RECV_F, OpKind.RECV_B), Role.PP),
    **dict.fromkeys((OpKind.COUNTS, OpKind.DISPATCH_F, OpKind.COMBINE_F), Role.EP),
    **dict.fromkeys((OpKind.COMBINE_B, OpKind.DISPATCH_B), Role.EP),
    OpKind.HOST: Role.HOST,
    OpKind.OFFLOAD: Role.OUT,
    OpKind.ONLOAD: Role.IN,
    **dict.fromkeys((OpKind.REDUCE_GRAD, OpKind.REDUCE_TIED, OpKind.REDUCE_LAYERNORM), Role.DP),
    **dict.fromkeys((OpKind.CLIP, OpKind.OPTIMIZER, OpKind.GATHER_PARAMS, OpKind.GC), Role.STEP),
    OpKind.H2D: Role.H2D,
    OpKind.BROADCAST: Role.BROADCAST,
    OpKind.RELOAD: Role.RELOAD,
}
"""A broadcast is its source's on one device (Role.SOURCE), which its kind does not say."""

NAMES: dict[OpKind, str] = {
    OpKind.F: "F",
    OpKind.B: "B",
    OpKind.I: "I",
    OpKind.W: "W",
    **dict.fromkeys((OpKind.SEND_F, OpKind.SEND_B, OpKind.RECV_F, OpKind.RECV_B), "PP"),
    **dict.fromkeys((OpKind.ATTN_F, OpKind.ATTN_B), "Attn"),
    **dict.fromkeys((OpKind.MLP_F, OpKind.MLP_B), "MLP"),
    **dict.fromkeys((OpKind.ATTN_W, OpKind.MLP_W, OpKind.MTP_W, OpKind.HEAD_W), "WGrad"),
    **dict.fromkeys((OpKind.EMBED_F, OpKind.EMBED_B), "Embed"),
    **dict.fromkeys((OpKind.HEAD_F, OpKind.HEAD_B), "Head"),
    **dict.fromkeys((OpKind.MTP_F, OpKind.MTP_B), "MTP"),
    OpKind.ATTN_R: "Attn again",
    OpKind.MLP_R: "MLP again",
    OpKind.COUNTS: "counts",
    OpKind.HOST: "host",
    **dict.fromkeys((OpKind.DISPATCH_F, OpKind.DISPATCH_B), "EP-D"),
    **dict.fromkeys((OpKind.COMBINE_F, OpKind.COMBINE_B), "EP-C"),
    OpKind.OFFLOAD: "Offload",
    OpKind.ONLOAD: "Onload",
    OpKind.REDUCE_GRAD: "reduce",
    OpKind.REDUCE_TIED: "tied",
    OpKind.CLIP: "clip",
    OpKind.OPTIMIZER: "optimizer",
    OpKind.GATHER_PARAMS: "gather",
    OpKind.GC: "gc",
    OpKind.REDUCE_LAYERNORM: "layernorm",
    OpKind.H2D: "H2D",
    OpKind.BROADCAST: "bcast",
    OpKind.RELOAD: "reload",
}
"""The text of a box, as in the published panels."""


@dataclass(frozen=True)
class Look:
    """A fill, the colour of text on it, and a hatch where the fill alone does not tell it from its neighbours.

    `later` is the fill for chunks after the first, with white text; where it is empty, chunks look alike.
    """

    fill: str
    text: str = "#000000"
    hatch: str = ""
    later: str = ""

    @property
    def lightness(self) -> float:
        """CIE L* of the fill: what a grey printer leaves of it."""
        red, green, blue = (_linear(int(self.fill[i : i + 2], 16) / 255) for i in (1, 3, 5))
        luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
        return float(116 * luminance ** (1 / 3) - 16 if luminance > 0.008856 else 903.3 * luminance)

    def of_later_chunk(self) -> Look:
        """Return the look in a chunk after the first."""
        return Look(self.later, "#ffffff", self.hatch) if self.later else self


def _linear(channel: float) -> float:
    return channel / 12.92 if channel <= 0.04045 else float(((channel + 0.055) / 1.055) ** 2.4)


LEAST_DIFFERENCE = 15
"""Difference in L* between neighbours without a hatch."""


def told_apart(one: Look, other: Look) -> bool:
    """Can the two be told apart on a grey printer."""
    return one.hatch != other.hatch or abs(one.lightness - other.lightness) >= LEAST_DIFFERENCE


Palette = dict[Role, Look]

_COPIES = {
    Role.OUT: Look("#d9d2c3", hatch="/////"),
    Role.IN: Look("#efe9dc", hatch="\\\\\\\\\\"),
    Role.HOST: Look("#b9b9b9", hatch="..."),
}

# Blocks besides layers, what is computed again, and the end of a step: told from everything else by their hatch.
_ENDS = {
    Role.EMBED: Look("#cfd8c4", hatch="|||||"),
    Role.MTP: Look("#c7dfe6", hatch="+++"),
    Role.HEAD: Look("#d9c7e6", hatch="-----"),
    Role.RECOMPUTE: Look("#e3eefb", hatch="ooo"),
    Role.STEP: Look("#c9c2ae", hatch="xxxx"),
}

# As in the published figure of Kimi K2's checkpoint engine, the source darker and H2D hatched for grey printers.
_UPDATE = {
    Role.H2D: Look("#dae8fc", hatch="/////"),
    Role.SOURCE: Look("#eeb257"),
    Role.BROADCAST: Look("#ffe6cc"),
    Role.RELOAD: Look("#f46200"),
}

# Forward and backward, first and later chunks, are four steps of lightness: they meet each other on every lane.
PALETTES: dict[str, Palette] = {
    "kimi": {
        Role.FORWARD: Look("#bcd7f5", later="#3d7cc9"),
        Role.BACKWARD: Look("#e98d84", later="#8f2a24"),
        Role.INPUT: Look("#f9d3cf", hatch="/////", later="#b0564f"),
        Role.WEIGHT: Look("#eba9a2", hatch="\\\\\\\\\\", later="#9c4640"),
        Role.PP: Look("#57a05a"),
        Role.EP: Look("#f7dd72"),
        Role.DP: Look("#6b5a94", "#ffffff"),
        **_ENDS,
        **_COPIES,
        **_UPDATE,
    },
    "dualpipe": {
        Role.FORWARD: Look("#f7c35a", later="#a86400"),
        Role.BACKWARD: Look("#66b052", later="#1f5a1a"),
        Role.INPUT: Look("#c3e8a0", hatch="/////", later="#4d8a35"),
        Role.WEIGHT: Look("#9ccbf2", hatch="\\\\\\\\\\", later="#2f6fb0"),
        Role.PP: Look("#8a8a8a"),
        Role.EP: Look("#f7ef9a"),
        Role.DP: Look("#5d4d85", "#ffffff"),
        **_ENDS,
        **_COPIES,
        **_UPDATE,
    },
    # From Okabe and Ito's colours, told apart with any common colour blindness.
    "colourblind": {
        Role.FORWARD: Look("#a6daf7", later="#0072b2"),
        Role.BACKWARD: Look("#ee8645", later="#682c00"),
        Role.INPUT: Look("#f7d58a", hatch="/////", later="#8a6100"),
        Role.WEIGHT: Look("#e6b3cf", hatch="\\\\\\\\\\", later="#96486f"),
        Role.PP: Look("#009e73"),
        Role.EP: Look("#f0e442"),
        Role.DP: Look("#44355e", "#ffffff"),
        **_ENDS,
        **_COPIES,
        Role.H2D: Look("#cfe6f7", hatch="/////"),
        Role.SOURCE: Look("#e6a820"),
        Role.BROADCAST: Look("#faedc8"),
        Role.RELOAD: Look("#d55e00"),
    },
    # For papers that are printed: steps of grey, halves of a backward told by their hatches.
    "grey": {
        Role.FORWARD: Look("#f4f4f4", later="#707070"),
        Role.BACKWARD: Look("#bdbdbd", later="#3a3a3a"),
        Role.INPUT: Look("#dedede", hatch="/////", later="#585858"),
        Role.WEIGHT: Look("#cfcfcf", hatch="\\\\\\\\\\", later="#4a4a4a"),
        Role.PP: Look("#8c8c8c"),
        Role.EP: Look("#e4e4e4"),
        Role.DP: Look("#4d4d4d", "#ffffff"),
        Role.EMBED: Look("#d4d4d4", hatch="|||||"),
        Role.MTP: Look("#dadada", hatch="+++"),
        Role.HEAD: Look("#c4c4c4", hatch="-----"),
        Role.RECOMPUTE: Look("#f0f0f0", hatch="ooo"),
        Role.STEP: Look("#c0c0c0", hatch="xxxx"),
        Role.OUT: Look("#cccccc", hatch="/////"),
        Role.IN: Look("#ebebeb", hatch="\\\\\\\\\\"),
        Role.HOST: Look("#b9b9b9", hatch="..."),
        Role.H2D: Look("#e2e2e2", hatch="/////"),
        Role.SOURCE: Look("#adadad"),
        Role.BROADCAST: Look("#ededed"),
        Role.RELOAD: Look("#7d7d7d", "#ffffff"),
    },
}


def palette(name: str) -> Palette:
    """The palette of this name, or a ValueError that names the ones there are."""
    name = "colourblind" if name == "colorblind" else name
    if name not in PALETTES:
        raise ValueError(f"{name!r} is not a palette; {did_you_mean(name, PALETTES)}")
    return PALETTES[name]
