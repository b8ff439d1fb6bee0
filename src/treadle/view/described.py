"""A trace in a few words: its devices, chunks and micro-batches."""

from __future__ import annotations

from treadle.ir.show import counted
from treadle.ir.trace import Trace
from treadle.view.update_rows import described_update


def described(trace: Trace) -> str:
    """Describe a trace, as a default title."""
    layout = trace.program.layout
    if layout.is_update:
        return described_update(trace.program)
    chunks = f", {layout.placement.vpp} chunks each" if layout.placement.vpp > 1 else ""
    return f"{counted(layout.num_ranks, 'device')}{chunks}, {counted(layout.num_microbatches, 'micro-batch')}"
