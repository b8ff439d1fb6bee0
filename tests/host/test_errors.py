"""Errors of Treadle as other processes get them: frameworks that run ranks, as Ray does, pickle what they raise."""

from __future__ import annotations

import pickle
from pathlib import Path

import msgspec
import pytest

from treadle import RankLostError
from treadle.host.pressure import short_of_cores
from treadle.ir.text import ParseError
from treadle.update import UpdateError
from treadle.update.protocol.control import Fault

FAULT = Fault(7, "worker 1", "load", 3, "bytes differ", corrupt=True)


@pytest.mark.parametrize(
    "error",
    [
        RankLostError("rank 1 was lost first", rank=1, kind="killed", op="F3.0", waiting_for=None),
        UpdateError(msgspec.structs.replace(FAULT, committed=True)),
        ParseError("expected a row", "mine.txt", 1, "1f1b", 0),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_is_the_same_in_another_process(error: Exception) -> None:
    error.add_note("at 3 a.m.")
    other = pickle.loads(pickle.dumps(error))
    assert type(other) is type(error)
    assert str(other) == str(error)
    assert vars(other) == vars(error)


def test_lateness_is_put_down_to_a_host_that_is_short_of_cores(tmp_path: Path) -> None:
    pressure = tmp_path / "cpu"
    assert short_of_cores(pressure) == ""  # a kernel that does not tell
    short = " (this host is short of cores: in 76 % of the last ten seconds something waited for one)"
    for waited, said in ((3.5, ""), (76.4, short)):
        pressure.write_text(f"some avg10={waited} avg60=1.00 avg300=0.00 total=1\nfull avg10=0.00 avg60=0.00\n")
        assert short_of_cores(pressure) == said
