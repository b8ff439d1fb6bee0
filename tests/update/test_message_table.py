"""The table of messages in ARCHITECTURE.md is that of the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

from treadle.update.protocol.control import FromCoordinator, ToCoordinator
from treadle.update.protocol.update_messages import FromWorker, ToWorker

WAYS: dict[str, Any] = {
    "- worker": ToWorker,
    "worker -": FromWorker,
    "- coordinator": ToCoordinator,
    "coordinator -": FromCoordinator,
}


def test_every_message_has_a_row_with_its_ways() -> None:
    text = (Path(__file__).parents[2] / "ARCHITECTURE.md").read_text()
    listed = dict(re.findall(r"^\| `([A-Z]\w+)` \| (.*? - .*?) \|", text, re.MULTILINE))
    assert set(listed) == {kind.__name__ for kinds in WAYS.values() for kind in get_args(kinds)}
    for way, kinds in WAYS.items():
        assert {name for name, ways in listed.items() if way in ways} == {kind.__name__ for kind in get_args(kinds)}, (
            way
        )
