"""Facts of a run, compared over the world through the store: without a connection between ranks."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from tests.support.patience import HUNG_S
from treadle.runtime import world_agreement
from treadle.runtime.agreement import Facts
from treadle.runtime.faults.watch import RankLostError
from treadle.runtime.world_agreement import agree_over_world

HOST = os.uname().nodename


def ended(world: Store, facts: Sequence[Facts], problems: Sequence[str | None], **more: Any) -> list[str]:
    """How the agreement ends on each rank; a rank without facts does not come."""
    said = ["" for _ in facts]

    def of_rank(rank: int) -> None:
        text = problems[rank] if rank < len(problems) else None
        try:
            problem = ValueError(text) if text is not None else None
            agree_over_world(rank, len(facts), more.get("deadline_s", HUNG_S), facts[rank], problem, world=world)
        except (ValueError, RankLostError) as error:
            said[rank] = f"{type(error).__name__}: {error}"

    ranks = [threading.Thread(target=of_rank, args=(rank,)) for rank in range(len(facts)) if facts[rank]]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return said


def test_ranks_agree_more_than_once_or_all_refuse_with_both_values() -> None:
    world, same = HashStore(), {"lr": "0.1", "steps": "3"}
    assert ended(world, [same] * 8, []) == [""] * 8
    odd = ended(world, [same] * 5 + [{**same, "lr": "0.2"}] * 3, [])
    said = f"rank 0 ({HOST}, 5 ranks alike) and rank 5 ({HOST}, 3 ranks alike) differ in lr (0.1 and 0.2)"
    assert odd == [f"ValueError: {said}; these must be the same on all ranks"] * 8
    assert ended(world, [same] * 8, []) == [""] * 8


def test_a_problem_of_one_rank_is_raised_there_and_quoted_by_all() -> None:
    facts = [{"lr": "0.1"}] * 3 + [{"lr": "0.2"}]
    said = ended(HashStore(), facts, [None, "no text", "no disk"])
    assert said[1:3] == ["ValueError: no text", "ValueError: no disk"]
    assert said[0] == said[3] == "ValueError: rank 1 could not start: no text"


def test_a_rank_that_does_not_come_is_lost_by_name() -> None:
    said = ended(HashStore(), [{"lr": "1"}, {}, {"lr": "1"}, {}], [], deadline_s=0.2)
    assert said[1] == said[3] == ""
    for rank in (0, 2):
        assert f"RankLostError: ranks 1, 3 did not come to make the pipeline within 0.2 s of rank {rank}" in said[rank]


@pytest.mark.parametrize("num_ranks", [4, 64])
def test_a_rank_makes_as_many_requests_in_any_world(num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that comes last reads what each wrote."""
    num: Counter[int] = Counter()

    class Counted(PrefixStore):
        def __getattribute__(self, name: str) -> Any:
            num[threading.get_ident()] += 1
            return super().__getattribute__(name)

    monkeypatch.setattr(world_agreement, "PrefixStore", Counted)
    ended(HashStore(), [{"lr": "1"}] * num_ranks, [])
    assert len(num) == num_ranks
    *others, last = sorted(num.values())
    assert {*others} <= {5, 6}
    assert last - num_ranks in (6, 7)
