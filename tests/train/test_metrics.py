"""The line of a step."""

from __future__ import annotations

from dataclasses import replace

from treadle.train.run_log import StepFacts

FACTS = StepFacts(7, 2.5, 0.01, 1234.5, 0.25, None, 2**30, 1.5, 3e-4)


def test_a_line_names_all_facts_and_a_dash_for_what_was_not_measured() -> None:
    assert FACTS.line(100) == (
        "step   7/100  loss  2.5000  aux 0.0100    1,234 tok/s  bubble  25.0%  hidden      -  peak  1.00 GiB"
        "  norm   1.500  lr 3.00e-04"
    )


def test_lines_of_a_run_are_aligned() -> None:
    other = replace(FACTS, step=100, loss=11.25, tokens_per_s=123456, bubble=None, hidden=1.0, grad_norm=100.25)
    assert len(other.line(100)) == len(FACTS.line(100))
    assert "aux" not in replace(FACTS, aux_loss=None).line(100)


def test_memory_of_a_process_is_not_called_that_of_a_gpu() -> None:
    assert "  process  1.00 GiB" in FACTS.line(100, on_gpu=False)
