"""The verifier of Programs held to the executor that is written from the semantics."""

from __future__ import annotations

from tests.support.brute_force_program import Outcome
from treadle.ir.program import Longs, Program
from treadle.verifier import VerifyReport, verify_program

COVERED_BY = {
    "hang": {"T201", "T202", "T203", "T205"},
    "wrong data": {"T204", "T401"},
    "missing": {"T101"},
    "double": {"T102"},
    "unknown": {"T105"},
    "launch order": {"T206"},
}


def hold_to_oracle(program: Program, dur: Longs, outcome: Outcome) -> VerifyReport:
    """Both verdicts must agree, and every symptom be covered by a finding."""
    report = verify_program(program, dur)
    codes = {finding.code for finding in report.findings}
    context = f"{report}\n{sorted(outcome.symptoms)}\n" + "\n".join(outcome.notes[:12])
    assert report.clean == outcome.clean, context
    for symptom in outcome.symptoms:
        assert codes & COVERED_BY[symptom], f"{symptom} is not covered\n{context}"
    assert ("hang" in outcome.symptoms) == bool(codes & COVERED_BY["hang"]), context
    for symptom, code in (("unknown", "T105"), ("missing", "T101"), ("double", "T102"), ("launch order", "T206")):
        assert (symptom in outcome.symptoms) == (code in codes), context
    if outcome.clean:
        assert report.peaks == outcome.peak, context
    return report
