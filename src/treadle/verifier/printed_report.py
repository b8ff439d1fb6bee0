"""A report of the verifier as `treadle verify --json` prints it."""

from __future__ import annotations

from typing import Annotated, TypedDict

from treadle.fields.kinds import Count, Text
from treadle.ir.printed_peak import PeakJson


class FindingJson(TypedDict):
    """A finding as it is printed."""

    code: Annotated[str, Text("^T[0-9]{3}$"), "The finding's code, which treadle explain takes."]
    rank: Annotated[Count, "The rank it is about."]
    cell: Annotated[Count | None, "The place in the rank's row, from 0; null where there is no single one."]
    op: Annotated[Count | None, "The op's index in the program; null where there is no single one."]
    message: Annotated[str, "The finding in a sentence."]
    steps: Annotated[list[str], "The witness: of a deadlock the ops that wait for each other, each for the next."]


class VerifyJson(TypedDict):
    """A report as it is printed."""

    clean: Annotated[bool, "True if there are no findings."]
    num_ranks: Annotated[Count, "Ranks of the schedule or program."]
    num_cells: Annotated[Count, "Cells of all ranks."]
    num_ops: Annotated[Count, "Ops of all ranks."]
    peak_activations: Annotated[
        list[Count],
        "Of a schedule: for each rank the most activations, each of a chunk and a micro-batch, alive at once; "
        "empty for a program.",
    ]
    peak: Annotated[
        PeakJson | None,
        "Of a program: activations held at most, or, of a weight update, the buffers; null for a schedule.",
    ]
    cut: Annotated[list[str], "Codes with so many findings that no more were looked for."]
    findings: Annotated[list[FindingJson], "The findings, worst first."]
