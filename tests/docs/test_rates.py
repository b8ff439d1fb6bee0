"""The tables of how often `why` and `hang` are right are what the benchmarks counted, and no innocent is among them."""

from __future__ import annotations

from collections import Counter

import pytest

from rates.table import HANG, ROOT, WHY, Rates
from tests.support.injected_causes import CAUSES
from tests.support.stopped_dumps import SIZES


@pytest.mark.parametrize("rates", [WHY, HANG], ids=["why", "hang"])
def test_the_table_is_of_the_counts(rates: Rates, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / rates.page).read_text(encoding="utf-8")
    assert text == rates.with_table()
    more = {key: counts + Counter({"right": 1}) for key, counts in rates.counts().items()}
    monkeypatch.setattr(Rates, "counts", lambda _: more)
    assert text != rates.with_table()


def test_every_cause_is_counted_and_only_schedules_that_exist() -> None:
    assert {cause for cause, _ in WHY.counts()} == set(CAUSES)
    assert {name for name, _ in HANG.counts()} <= set(SIZES)


def test_nobody_innocent_is_accused() -> None:
    assert sum(counts["wrong"] for counts in HANG.counts().values()) == 0
    why = WHY.counts()
    assert sum(counts["wrong"] for (cause, _), counts in why.items() if cause == "none") == 0
    total = sum(why.values(), Counter())
    assert total["wrong"] <= 0.01 * total.total()
