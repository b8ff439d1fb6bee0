"""The calls that ranks make together, as numbers: so that ranks in different calls raise an error that names both."""

from __future__ import annotations

CALLS = (
    "step()",
    "step() in no_sync()",
    "step() after an update",
    "step() in no_sync() after an update",
    "evaluate()",
    "grad_norm()",
    "gather_trace()",
    "the exchange of parameters",
    "the agreement between steps",
)
"""What a rank may be in. Calls of one name may meet."""

TOGETHER = (
    *CALLS,
    "making the pipeline",
    "the agreement on the call",
    "the agreement on shapes",
    "the agreement on the loss",
)
"""What ranks do together besides ops: calls, and what leads to them."""

_RANK_BITS, _STEP_BITS = 20, 36


class DifferentCallsError(ValueError):
    """Ranks have begun different calls."""


def number_of(call: str, step: int, rank: int) -> int:
    """Return a call of a rank as a number that fits into int64; numbers of the same call differ in the rank only.

    Args:
        call: one of CALLS.
        step: steps done before.
        rank: this one.

    Example:
        >>> contradiction(number_of("step()", 3, 1), number_of("step()", 3, 0)) is None
        True

    """
    return ((CALLS.index(call) << _STEP_BITS | step) << _RANK_BITS) | rank


def contradiction(one: int, other: int) -> str | None:
    """Return what is wrong if two numbers are of different calls."""
    if one >> _RANK_BITS == other >> _RANK_BITS:
        return None
    first, second = (_described(number) for number in sorted((one, other), key=_rank))
    return f"{first}, {second}: all ranks make the same calls in the same order"


def _rank(number: int) -> int:
    return number & ((1 << _RANK_BITS) - 1)


def _described(number: int) -> str:
    call, step = divmod(number >> _RANK_BITS, 1 << _STEP_BITS)
    return f"rank {_rank(number)} is in {CALLS[call]} after {step} steps"
