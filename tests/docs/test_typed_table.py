"""The table of typed commands in README and docs/plan.md is what the benchmark's rows give."""

from __future__ import annotations

import pytest

from held_to.printed import data_sets
from held_to.table import PAGES, ROOT, typed_rows, with_table
from held_to.typed import command_of


@pytest.mark.parametrize("page", PAGES)
def test_the_table_is_of_the_benchmarks_rows(page: str) -> None:
    assert (ROOT / page).read_text(encoding="utf-8") == with_table(page)


def test_changed_rows_change_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    slower = [row._replace(printed_s=2 * row.printed_s) for row in typed_rows()]
    monkeypatch.setattr("held_to.table.typed_rows", lambda: slower)
    assert all((ROOT / page).read_text(encoding="utf-8") != with_table(page) for page in PAGES)


def test_every_published_run_has_a_row_and_commands_name_no_other_option() -> None:
    rows = [row for each in data_sets().values() for row in each]
    assert [row.run for row in typed_rows()] == [row.name for row in rows]
    for row in rows[:60]:
        assert {"--gradients", "--layout", "--dispatch"}.isdisjoint(command_of(row.job))
