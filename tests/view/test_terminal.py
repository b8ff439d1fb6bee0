"""The terminal's rows: what runs when, in characters, with and without colour."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import treadle
from treadle.costs import UNIT_COSTS, load_costs
from treadle.ir.ops import OpKind
from treadle.ir.trace import Trace
from treadle.lowering import LoweringOptions, lower
from treadle.simulator import simulate
from treadle.view.character_rows import LETTERS, terminal_rows


def trace(name: str, pp: int, num_mb: int, layers: int | None = None) -> Trace:
    costs = UNIT_COSTS if layers is None else load_costs("deepseek-v3-h800")
    schedule = treadle.generate(name, pp=pp, microbatches=num_mb)
    return simulate(lower(schedule, costs, LoweringOptions(layers=layers, moe=layers is not None)), costs)


def rows(drawn: Trace, width: int, *, lanes: bool = False) -> list[str]:
    return [row.plain.rstrip() for row in terminal_rows(drawn, width, colour=False, lanes=lanes)]


def test_rows_show_what_runs_when() -> None:
    """1f1b P2 M2 takes 9 units; at three columns a unit each box is where its times say."""
    assert rows(trace("1f1b", 2, 2), 3 + 27)[:2] == [
        "0  F0-F1-      B0----   B1----",
        "1     F0-B0----F1-B1----",
    ]


def test_the_halves_of_a_pair_stand_side_by_side() -> None:
    """At unit costs a pair takes 3: one for its forward, two for its backward."""
    drawn = rows(trace("dualpipev", 1, 3), 3 + 3 * 18)
    assert drawn[0] == "0  F0-F0-F1-B0----F1-B0----F2-B1----F2-B1----B2----I2-W2-"


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe", "interleaved-overlap"])
def test_rows_fit_the_terminal(name: str, width: int) -> None:
    drawn = trace(name, 4, 16)
    lines = [line for line in rows(drawn, width) if line[:1].isdigit()]
    assert len(lines) % 4 == 0
    assert all(len(line) <= width for line in lines)


def test_a_step_that_is_too_long_for_a_line_is_folded_so_that_every_op_shows() -> None:
    """1f1b P16 M64 takes 237 units, F 1 and B 2; in 76 columns no op of rank 15 is lost, which does F B F B."""
    lines = rows(trace("1f1b", 16, 64), 80)
    last = "".join(line.ljust(80)[4:] for line in lines if line.startswith("15  "))
    letters = re.sub(r"(.)\1+", r"\1", re.sub("[^FB]", "", last))  # an op at the end of a strip goes on in the next
    assert letters == "FB" * 64
    assert next(line for line in lines if "from" in line).split()[:3] == ["from", "0", "to"]


def test_what_cannot_be_folded_is_drawn_after_a_note() -> None:
    assert rows(trace("1f1b", 64, 256), 80)[0].startswith("ops shorter than a column do not show")
    assert not any("shorter than a column" in line for line in rows(trace("1f1b", 2, 2), 80))


def test_lanes_have_a_row_each() -> None:
    lines = rows(trace("1f1b", 2, 2, layers=1), 120, lanes=True)
    names = [line.split("  ")[0] for line in lines if line[:1].isdigit()]
    assert names[:3] == ["0 compute", "0 ep", "0 send to 1"]


def test_colour_says_the_same_as_letters() -> None:
    drawn = trace("zb-h1", 2, 4)
    plain = [row.plain for row in terminal_rows(drawn, 80, colour=False)]
    coloured = [row.plain for row in terminal_rows(drawn, 80, colour=True)]
    assert [line.replace("-", " ") for line in plain] == [line.replace("-", " ") for line in coloured]
    assert any(span.style for row in terminal_rows(drawn, 80, colour=True) for span in row.spans)


def test_many_ranks_are_cut_with_a_note() -> None:
    assert "more rows" in rows(trace("1f1b", 80, 4), 80)[-1]


def test_every_kind_of_op_has_a_letter() -> None:
    assert set(LETTERS) == set(OpKind)


def test_stages_of_all_blocks_are_drawn() -> None:
    """An MTP block, parts that are computed again, a tie and the end of a step, a row for each lane."""
    costs = load_costs("deepseek-v3-model")
    options = LoweringOptions(
        blocks=("Edt", "tmL"), by_layer=True, recompute=("attn", "mlp"), tied=((0, 1),), dp=2, moe=True
    )
    step = replace(costs, model={}, step={"clip": 1000, "optimizer": 1000, "gather_params": 1000})
    drawn = simulate(lower(treadle.generate("1f1b", pp=2, microbatches=2), step, options), step)
    letters = set(map(OpKind, drawn.program.kind.tolist()))
    assert {OpKind.MTP_F, OpKind.ATTN_R, OpKind.REDUCE_TIED, OpKind.CLIP, OpKind.OPTIMIZER} <= letters
    assert any("T0" in row for row in rows(drawn, 4000))
    assert rows(drawn, 200, lanes=True)
