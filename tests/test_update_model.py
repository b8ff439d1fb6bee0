"""The protocol of weight updates, explored: with its rules no state is wrong, without them the known faults are found.

`python tests/update_model.py --ranks 2 --workers 2 --updates 2 --crashes 2` explores more than is done here.
"""

from __future__ import annotations

import pytest

from update_model import explore
from update_world import RULES, Sizes

SMALL = {
    "crash": Sizes(updates=1, crashes=1),
    "replaced": Sizes(updates=1, crashes=0, replacements=1),
    "mistake": Sizes(updates=1, crashes=0, mistakes=1),
    "two updates": Sizes(updates=2, crashes=0),
    "one worker": Sizes(ranks=1, workers=1, updates=1, crashes=2, replacements=1),
}


@pytest.mark.parametrize("name", SMALL)
def test_no_state_is_wrong(name: str) -> None:
    found = explore(SMALL[name])
    print(f"{name}: {found.states} states in {found.seconds:.1f} s")  # noqa: T201
    assert not found.wrong, "\n".join((found.wrong, *found.trace))
    assert found.states > 200


FAULTS = {
    "fewer ranks than workers": ("members", Sizes(updates=1, crashes=0, mistakes=1), "committed: worker 1"),
    "a replaced worker serves on": ("slots", Sizes(updates=1, crashes=0, replacements=1), "committed: worker"),
    "ranks keep their connection": ("slots", Sizes(updates=0, crashes=0, replacements=1, recoveries=2), "told right"),
    "another run's log": ("log ids", Sizes(updates=0, crashes=0, mistakes=1), "told right: recover"),
    "two logs, the same workers": ("log ids", Sizes(updates=1, crashes=0, mistakes=1, recoveries=0), ""),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_fault_is_found_where_the_rule_is_left_out(name: str) -> None:
    rule, sizes, wrong = FAULTS[name]
    without = Sizes(**{**sizes.__dict__, "rules": RULES - {rule}})
    found = explore(without)
    print(f"{name}: {found.wrong}, {len(found.trace)} steps, {found.states} states")  # noqa: T201
    assert found.wrong
    assert found.wrong.startswith(wrong)
    assert found.trace
    assert not explore(sizes).wrong
