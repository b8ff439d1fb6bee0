"""Which way buckets move: broadcast to all devices, or sent to those that take them: what is simulated faster."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, TypeAlias

from treadle.weights.bucket_stream import stream_of
from treadle.weights.buffer_sizes import Memory
from treadle.weights.targeted_plan import UntargetedError, plan_targeted
from treadle.weights.tensor_boxes import Holding
from treadle.weights.update_lowering import lower_update
from treadle.weights.update_plan import UpdatePlan, plan_update
from treadle.weights.update_rates import Rates, simulate_update

Transfer: TypeAlias = Literal["auto", "broadcast", "targeted"]

LIKELY = Rates(h2d=2e10, broadcast=1e10, reload=1e11, latency_s=1e-4)
"""Rates where none are known. Only their proportions matter: a device's link is slower than its memory."""


def plan_transfer(
    have: Holding,
    want: Holding,
    memory: Memory,
    only: Collection[str] | None = None,
    *,
    transfer: Transfer = "auto",
    rates: Rates = LIKELY,
    shared: bool = False,
) -> UpdatePlan:
    """Plan an update in one of the two ways, with `auto` the one that takes less time at these rates.

    A targeted plan that cannot be made is a ValueError, with `auto` broadcasts. `shared`: one of broadcasts lists, too,
    what several ranks have.
    """
    if transfer == "broadcast":
        return plan_update(have, want, memory, only, shared=shared)
    if transfer == "targeted":
        return plan_targeted(have, want, memory, only)
    broadcast = plan_update(have, want, memory, only, shared=shared)
    try:
        targeted = plan_targeted(have, want, memory, only)
    except UntargetedError:
        return broadcast
    return min(broadcast, targeted, key=lambda plan: predicted_s(plan, rates))


def predicted_s(plan: UpdatePlan, rates: Rates = LIKELY) -> float:
    """Return the seconds that the simulator gives a plan."""
    trace = simulate_update(lower_update(stream_of(plan)), rates)
    return trace.makespan / trace.clock.ticks / 1e6
