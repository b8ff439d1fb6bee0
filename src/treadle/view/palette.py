"""Colours and names of ops in pictures: one table a palette, the same for figures, page and terminal.

Neighbouring roles differ in lightness by 15 L* or carry a hatch, so that pictures survive a grey printer.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from treadle.fields.nearest import did_you_mean
from treadle.ir.ops import LaneKind, OpKind, OpPart, OpPhase, OpRole


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


_BY_LANE = {
    LaneKind.SEND: Role.PP,
    LaneKind.RECV: Role.PP,
    LaneKind.EP: Role.EP,
    LaneKind.HOST: Role.HOST,
    LaneKind.OUT: Role.OUT,
    LaneKind.IN: Role.IN,
    LaneKind.DP: Role.DP,
    LaneKind.TIED: Role.DP,
    LaneKind.TP: Role.DP,
    LaneKind.H2D: Role.H2D,
    LaneKind.BROADCAST: Role.BROADCAST,
    LaneKind.RELOAD: Role.RELOAD,
}
_BY_PART = {OpPart.EMBED: Role.EMBED, OpPart.HEAD: Role.HEAD, OpPart.MTP: Role.MTP}
_BY_PHASE = {
    OpPhase.F: Role.FORWARD,
    OpPhase.B: Role.BACKWARD,
    OpPhase.I: Role.INPUT,
    OpPhase.W: Role.WEIGHT,
    OpPhase.R: Role.RECOMPUTE,
}


def _role(kind: OpKind) -> Role:
    """Colours go by lane; those of the compute lane by phase, but for blocks that are no layers."""
    if kind.role is OpRole.STEP_END:
        return Role.STEP
    if kind.role is OpRole.UPDATE and (kind.is_send or kind.is_recv):
        return Role.SOURCE if kind.is_send else Role.BROADCAST
    if kind.lane is not LaneKind.COMPUTE:
        return _BY_LANE[kind.lane]
    if kind.phase is None:
        return Role.STEP
    by_phase = _BY_PHASE[kind.phase]
    return by_phase if kind.part is None or by_phase is Role.WEIGHT else _BY_PART.get(kind.part, by_phase)


ROLE_OF: dict[OpKind, Role] = {kind: _role(kind) for kind in OpKind}
"""A broadcast is its source's on one device (Role.SOURCE), which its kind does not say."""

NAMES: dict[OpKind, str] = {kind: kind.box for kind in OpKind}
"""The text of a box, as in the published panels."""


@dataclass(frozen=True)
class Look:
    """A fill, the colour of text on it, and a hatch where the fill alone does not separate it from its neighbours.

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
    """Return whether the two differ on a grey printer."""
    return one.hatch != other.hatch or abs(one.lightness - other.lightness) >= LEAST_DIFFERENCE


Palette = dict[Role, Look]

_COPIES = {
    Role.OUT: Look("#d9d2c3", hatch="/////"),
    Role.IN: Look("#efe9dc", hatch="\\\\\\\\\\"),
    Role.HOST: Look("#b9b9b9", hatch="..."),
}

# Blocks besides layers, recompute, and the end of a step: a hatch marks them.
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
    # From Okabe and Ito's colours, which differ with any common colour blindness.
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
    # For papers that are printed: steps of grey, dgrad and wgrad by their hatches.
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
