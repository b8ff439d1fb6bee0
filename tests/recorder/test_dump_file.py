"""Dumps are read without torch, and nothing of a pickle is run."""

from __future__ import annotations

import json
import os
import pickle
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import check, run_ranks
from treadle.fields.plain_pickle import UnreadablePickleError, load_plain
from treadle.recorder.dump_directory import read_dumps
from treadle.recorder.dump_file import ChannelEnd, read_dump

VALUE = {
    "a": [1, -5, 300, 70000, 2**40, 2.5, None, True, False],
    "b": ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)),
    7: {},
}


def entry(number: int, name: str, **more: Any) -> dict[str, Any]:
    made = {
        "record_id": number,
        "process_group": ("1", "pp"),
        "profiling_name": name,
        "state": "completed",
        "p2p_seq_id": number + 1,
        "op_id": number + 1,
        "input_sizes": [[2, 16]],
        "input_dtypes": ["BFloat16"],
    }
    return made | more


def dump(*entries: dict[str, Any], ranks: str = "[4, 6]") -> dict[str, Any]:
    return {
        "version": "2.10",
        "pg_config": {"1": {"name": "1", "desc": "pp", "ranks": ranks}},
        "entries": list(entries),
    }


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_plain_values_are_read_as_pickle_reads_them(protocol: int) -> None:
    assert load_plain(pickle.dumps(VALUE, protocol)) == VALUE


class Runs:
    """A pickle that makes a directory when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_that_would_run_something_is_refused_by_name_and_not_run(protocol: int, tmp_path: Path) -> None:
    path = tmp_path / "trace_0"
    path.write_bytes(
        b"\x80\x02" + pickle.dumps(dump() | {"x": Runs(tmp_path / "made")}, protocol)[2 * (protocol > 1) :]
    )
    with pytest.raises(ValueError, match=r"trace_0: .* opcode \w+") as error:
        read_dump(path, 0)
    assert "GLOBAL" not in str(error.value) or "mkdir" in str(error.value)
    assert not (tmp_path / "made").exists()


def test_a_damaged_pickle_is_an_error_and_nothing_else() -> None:
    whole = pickle.dumps(VALUE, 4)
    rng = random.Random(7)
    for end in range(len(whole)):
        with pytest.raises(UnreadablePickleError):
            load_plain(whole[:end])
    for _ in range(3000):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        with suppress(UnreadablePickleError):
            load_plain(bytes(damaged))


def test_a_place_of_the_memo_takes_no_memory() -> None:
    assert load_plain(b"\x80\x02]r\xff\xff\xff\x7f.") == []


def gloo_dump(rank: int) -> tuple[bytes, bytes]:
    dist.all_reduce(torch.ones(4))
    recorder: Any = torch._C._distributed_c10d
    return recorder._dump_fr_trace(), recorder._dump_fr_trace_json()


def test_what_torch_writes_is_read_in_both_forms(tmp_path: Path) -> None:
    for rank, (pickled, printed) in enumerate(check(run_ranks(2, gloo_dump))):
        assert load_plain(pickled) == pickle.loads(pickled)
        (tmp_path / f"pickled_{rank}").write_bytes(pickled)
        (tmp_path / f"printed_{rank}.json").write_bytes(printed)
    for rank, read in read_dumps([tmp_path], "pickled_").items():
        assert any(each.name == "gloo:all_reduce" for each in read.entries)
        assert set(read.groups.values()) <= {(0, 1)}
        assert read.entries == read_dump(tmp_path / f"printed_{rank}.json", rank).entries


@pytest.mark.parametrize("form", ["pickle", "json"])
def test_messages_are_read_by_ranks_of_their_group(form: str, tmp_path: Path) -> None:
    path = tmp_path / "trace_4"
    whole = dump(
        entry(1, "nccl:recv 0<-1", state="scheduled"),
        entry(0, "nccl:send 0->1"),
        entry(2, "nccl:all_reduce", process_group=("0", "default_pg")),
        entry(3, "nccl:send 0->1", input_dtypes=["Byte"], input_sizes=[[77]]),
    )
    path.write_bytes(pickle.dumps(whole, 2) if form == "pickle" else json.dumps(whole).encode())
    read = read_dump(path, 4)
    assert [each.message for each in read.entries] == [
        ChannelEnd(True, 0, 1),
        ChannelEnd(False, 1, 0),
        None,
        ChannelEnd(True, 0, 1),
    ]
    assert [each.state for each in read.entries][:2] == ["completed", "scheduled"]
    assert [each.is_object for each in read.entries] == [False, False, False, True]
    assert read.groups == {("1", "pp"): (4, 6)}


def test_a_message_of_a_batch_has_the_state_of_the_batch(tmp_path: Path) -> None:
    path = tmp_path / "trace_0"
    batch = [
        entry(k, name, p2p_seq_id=1, state="scheduled") for k, name in enumerate(("nccl:send 0->1", "nccl:recv 0<-1"))
    ]
    path.write_bytes(pickle.dumps(dump(*batch, entry(2, "nccl:coalesced", p2p_seq_id=1)), 2))
    assert [(each.state, each.in_batch) for each in read_dump(path, 0).entries[:2]] == [("completed", True)] * 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty; the rank was ended while it wrote it"),
        (b"hello", "neither a pickle nor JSON"),
        (b'{"version": "2.10"', "is no JSON"),
        (b'{"version": "3.0", "entries": []}', "version 3.0 of the format, and 2.x is read"),
        (b'{"entries": []}', "it has no version"),
        (json.dumps(dump(entry(0, "nccl:send 0->1", state="odd"))).encode(), "entries[0].state is 'odd'"),
        (json.dumps(dump(entry(0, "nccl:send 0->1", p2p_seq_id=-1))).encode(), "entries[0].p2p_seq_id"),
        (json.dumps(dump(entry(0, "nccl:send 0->1"), ranks="__import__('os')")).encode(), "is not a list of ranks"),
        (pickle.dumps([1, 2], 2), "it holds list, not a dictionary"),
    ],
)
def test_a_file_that_is_no_dump_is_named_with_what_is_wrong(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "trace_0"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="trace_0") as error:
        read_dump(path, 0)
    assert said in str(error.value)


def test_a_directory_is_of_one_prefix(tmp_path: Path) -> None:
    for name in ("trace_0", "trace_1", "old_0"):
        (tmp_path / name).write_bytes(pickle.dumps(dump(), 2))
    with pytest.raises(ValueError, match="'old_', 'trace_'; choose the run's with --prefix"):
        read_dumps([tmp_path])
    assert sorted(read_dumps([tmp_path], "trace_")) == [0, 1]
    with pytest.raises(ValueError, match="other_<rank>"):
        read_dumps([tmp_path], "other_")
