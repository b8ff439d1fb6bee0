"""The names that frameworks give to their work, and the ops that they stand for.

    attn(F)                               DeepSeek
    pre_dispatch_computation forward      Megatron, NVTX
    P2PCommunicator.send_forward          Megatron, NVTX
    forward-compute                       Megatron's timers, NDTimeline
    layer05.stage1_f                      PithTrain
    PP:0F3, Forward 3                     torch.distributed.pipelining, Treadle

Only `PP:` names and torch's `Forward 3` say which micro-batch they are about: `pp_ops` reads those, `op_of` and
`ops_of` all others. None of them guesses: a name that is not here is no op.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from treadle.ir.ops import STEP_END, OpKind, OpRole
from treadle.ir.placement import Placement
from treadle.ir.program import Op
from treadle.profiles.recording import UNKNOWN

_PARTS = {
    "attn": "ATTN",
    "pre_dispatch_computation": "ATTN",
    "stage1": "ATTN",
    "dispatch": "DISPATCH",
    "moe_dispatch": "DISPATCH",
    "stage2": "DISPATCH",
    "mlp": "MLP",
    "stage3": "MLP",
    "combine": "COMBINE",
    "moe_combine": "COMBINE",
    "stage4": "COMBINE",
}
"""Parts of a layer. PithTrain's stage5 (aggregate) and Megatron's mtp_post_process are no op of ours."""

_PASSES = {
    "(F)": "F",
    " forward": "F",
    "_f": "F",
    "(B)": "B",
    " backward": "B",
    "_b": "B",
    "(W)": "W",
    " wgrad": "W",
    "_w": "W",
}

_PART = re.compile(
    rf"(?:layer[_ ]?([0-9]+)\.)?({'|'.join(_PARTS)})({'|'.join(re.escape(suffix) for suffix in _PASSES)})"
)

_TIMERS = {
    "forward-compute": "F",
    "backward-compute": "B",
    "wgrad-compute": "W",
    "grads-reduce-scatter": "REDUCE_GRAD",
    "grads-all-reduce": "REDUCE_GRAD",
    "all-grads-sync": "REDUCE_GRAD",
    "embedding-grads-all-reduce": "REDUCE_TIED",
    "optimizer-clip-main-grad": "CLIP",
    "optimizer": "OPTIMIZER",
    "optimizer-inner-step": "OPTIMIZER",
    "params-all-gather": "GATHER_PARAMS",
    "layernorm-grads-all-reduce": "REDUCE_LAYERNORM",
    "gc": "GC",
}
"""Megatron's timers and what NDTimeline calls the same."""
_WHOLE = {timer: (OpKind[name],) for timer, name in _TIMERS.items()}

_TIMED_MESSAGES = re.compile(r"(?:(?:forward|backward)-(?:send|recv)-?)+(?<!-)")
_TIMED_MESSAGE = re.compile(r"(forward|backward)-(send|recv)")
_METHOD = re.compile(r"(?:.*\.)?((?:(?:send|recv)(?:_forward)?(?:_backward)?(?:_|$))+)")
_METHOD_PART = re.compile(r"(send|recv)(_forward)?(_backward)?")
_WAYS = {"forward": "F", "backward": "B"}

_LAYERS = re.compile(r"layer_([0-9]+)f(?:-layer_([0-9]+)b)?|layer_([0-9]+)b")

_NUMBER = "(0|[1-9][0-9]*)"
_PP_ACTION = re.compile(f"{_NUMBER}(F|B|I|W|SEND_F|SEND_B|RECV_F|RECV_B){_NUMBER}")
_PP_REDUCE = re.compile(f"{_NUMBER}REDUCE_GRAD")
_PP_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")
_PP_SHARDING = re.compile(f"PP:{_NUMBER}(UNSHARD|RESHARD)")
_PP_WAIT = re.compile("(PP:[0-9]+)WAIT_(SEND_[FB][0-9]+|REDUCE_GRAD)")
_SINGLE = re.compile(f"(Forward|Backward) {_NUMBER}")
_LABELLED = {kind.name.lower(): kind for kind in OpKind if kind.blocks or kind.role in (OpRole.COPY, OpRole.REDUCTION)}
_LABEL = re.compile(rf"({'|'.join(_LABELLED)}) {_NUMBER}?\.{_NUMBER}(?: L{_NUMBER})?")


CONTINUED = " continued"
"""Ends the names of an op's later calls in Treadle's cells: a receive is posted, and waited for where it is read."""

LANES = "treadle step "
"""Begins the keys under which Treadle leaves the ops of lanes that the profiler did not see, beside the events."""


class PPOp(NamedTuple):
    """An op as a `PP:` name has it. `joined` marks the second op of an overlapped pair."""

    kind: OpKind
    mb: int = UNKNOWN
    stage: int = UNKNOWN
    chunk: int = UNKNOWN
    layer: int = 0
    joined: bool = False


def op_of(name: str) -> tuple[OpKind, int] | None:
    """Return the op of a name and its layer, UNKNOWN where it names none; None if the name is no op, or several.

    Example:
        >>> op_of("mlp(W)")
        (<OpKind.MLP_W: 18>, -1)
        >>> op_of("layer05.stage1_f")
        (<OpKind.ATTN_F: 8>, 5)

    """
    if match := _PART.fullmatch(name):
        kind = OpKind.__members__.get(f"{_PARTS[match[2]]}_{_PASSES[match[3]]}")
        return (kind, int(match[1]) if match[1] else UNKNOWN) if kind is not None else None
    kinds = ops_of(name)
    return (kinds[0], UNKNOWN) if len(kinds) == 1 else None


@lru_cache(maxsize=4096)
def ops_of(name: str) -> tuple[OpKind, ...]:
    """Return the kinds of all ops that a name stands for: messages that are exchanged at once are several.

    Example:
        >>> [kind.name for kind in ops_of("forward-send-backward-recv")]
        ['SEND_F', 'RECV_B']

    """
    if _PART.fullmatch(name):
        op = op_of(name)
        return (op[0],) if op is not None else ()
    if name in _WHOLE:
        return _WHOLE[name]
    if _TIMED_MESSAGES.fullmatch(name):
        return tuple(OpKind[f"{verb.upper()}_{_WAYS[way]}"] for way, verb in _TIMED_MESSAGE.findall(name))
    if match := _METHOD.fullmatch(name):
        return tuple(
            OpKind[f"{verb.upper()}_{_WAYS[way[1:]]}"]
            for verb, *ways in _METHOD_PART.findall(match[1])
            for way in ways
            if way
        )
    return ()


def layers_of(name: str) -> tuple[int, int] | None:
    """Return the layers whose forward and backward run in one of Megatron's ranges, UNKNOWN for the one it lacks.

    Example:
        >>> layers_of("layer_3f-layer_0b"), layers_of("layer_3f"), layers_of("layer_0b")
        ((3, 0), (3, -1), (-1, 0))

    """
    match = _LAYERS.fullmatch(name)
    if match is None:
        return None
    return int(match[1] or UNKNOWN), int(match[2] or match[3] or UNKNOWN)


def is_sharding(name: str) -> bool:
    """Return whether a name is FSDP's work on a stage, which `PP:` names too and no op of ours stands for."""
    return _PP_SHARDING.fullmatch(name) is not None


def pp_ops(name: str) -> tuple[PPOp, ...]:
    """Return the ops of a name that says which micro-batch it is about; an overlapped pair is two, other names none.

    A message's stage is that of the rank it is on: the sender's for a send. Labels of Treadle's own ops (`PP:attn_f 3.1
    L0`) have a chunk, torch's names a stage, `Forward 3` neither.

    Example:
        >>> [(op.kind.name, op.stage, op.mb) for op in pp_ops("PP:(0F4;7B2)OVERLAP_F_B")]
        [('F', 0, 4), ('B', 7, 2)]

    """
    if match := _SINGLE.fullmatch(name):
        return (PPOp(OpKind[match[1][0]], mb=int(match[2])),)
    if not name.startswith("PP:"):
        return ()
    word = name[3:]
    if match := _PP_PAIR.fullmatch(word):
        halves = [_pp_action(half) for half in match.groups()]
        if all(half is not None and half.kind.role is OpRole.ACTION for half in halves):
            return tuple(half._replace(joined=at > 0) for at, half in enumerate(halves) if half is not None)
        return ()
    op = _pp_action(word) or _labelled(word)
    return (op,) if op is not None else ()


def begun_as(name: str) -> str | None:
    """Return the name of the range in which an op began that this range goes on with, None for one that begins an op.

    torch waits for its sends and reductions in ranges of their own, Treadle for what it posted before.

    Example:
        >>> begun_as("PP:0WAIT_SEND_F3"), begun_as("PP:1RECV_F3 continued"), begun_as("PP:1F3")
        ('PP:0SEND_F3', 'PP:1RECV_F3', None)

    """
    if match := _PP_WAIT.fullmatch(name):
        return match[1] + match[2]
    return name.removesuffix(CONTINUED) if name.endswith(CONTINUED) else None


def pp_name(op: Op, placement: Placement) -> str:
    """Return the name of an op of a Program, which `pp_ops` reads: torch's own for cells and messages, else its label.

    `op.lane.rank` and `op.lane.peer` are ranks of the pipeline.
    """
    rank, kind = op.lane.rank, op.kind
    if kind.is_send:
        reader = placement.stage(op.lane.peer, op.chunk)
        return f"PP:{reader + (1 if kind is OpKind.SEND_B else -1)}{kind.name}{op.mb}"
    if kind.role in (OpRole.ACTION, OpRole.MESSAGE):
        return f"PP:{placement.stage(rank, op.chunk)}{kind.name}{op.mb}"
    if kind is OpKind.REDUCE_GRAD:
        return f"PP:{placement.stage(rank, op.chunk)}{kind.name}"
    return f"PP:{op.label}"


def _pp_action(word: str) -> PPOp | None:
    if match := _PP_ACTION.fullmatch(word):
        return PPOp(OpKind[match[2]], mb=int(match[3]), stage=int(match[1]))
    if match := _PP_REDUCE.fullmatch(word):
        return PPOp(OpKind.REDUCE_GRAD, stage=int(match[1]))
    return None


def _labelled(word: str) -> PPOp | None:
    """Read the label of an op of a Program: `attn_f 3.1 L0`, `head_f 3.1`, `reduce_tied .0`, `clip`."""
    if word.upper() in OpKind.__members__ and OpKind[word.upper()] in STEP_END and word == word.lower():
        return PPOp(OpKind[word.upper()])
    match = _LABEL.fullmatch(word)
    if match is None:
        return None
    kind = _LABELLED[match[1]]
    reduces = kind.role is OpRole.REDUCTION
    if (match[2] is None) != reduces or (match[4] is not None) != kind.has_layer:
        return None
    return PPOp(
        kind, mb=int(match[2] or UNKNOWN), chunk=int(match[3]), layer=int(match[4]) if match[4] is not None else 0
    )
