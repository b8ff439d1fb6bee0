"""Reads a dump of torch's Flight Recorder: one file a rank, a pickle or JSON, version 2 of the format.

Fields are those that torch 2.13 writes (`FlightRecorder.hpp`, version 2.10). Ranks in names such as `nccl:send 0->1`
are those of the process group.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from treadle.fields.plain_pickle import MOST_BYTES, UnreadablePickleError, load_plain

State: TypeAlias = Literal["scheduled", "started", "completed"]
GroupName: TypeAlias = tuple[str, str]
"""A process group as entries name it: its name, and its description."""

_MESSAGE = re.compile(r"[a-z]+:(?:send (\d{1,6})->(\d{1,6})|recv (\d{1,6})<-(\d{1,6}))")
_COALESCED = re.compile(r"[a-z]+:coalesced")
_STATES = ("scheduled", "started", "completed")
_PICKLE, _JSON = b"\x80", b"{"


class ChannelEnd(NamedTuple):
    """A send or a receive, by ranks of its group."""

    is_send: bool
    src: int
    dst: int


@dataclass(frozen=True)
class RecorderEntry:
    """One entry of the buffer. `message` is None for a collective."""

    record_id: int
    group: GroupName
    name: str
    message: ChannelEnd | None
    state: State
    p2p_seq_id: int
    op_id: int
    is_object: bool
    """A message of pickled Python objects, as torch exchanges shapes with before its first step."""

    in_batch: bool = False


@dataclass(frozen=True)
class RankDump:
    """The dump of one rank: its entries in order, and the ranks of the groups that it names."""

    path: Path
    rank: int
    entries: tuple[RecorderEntry, ...]
    groups: Mapping[GroupName, tuple[int, ...]]


def read_dump(path: Path, rank: int) -> RankDump:
    """Read the dump of a rank.

    Raises:
        ValueError: the file is damaged, of another form, or a pickle with something else than plain values.
        OSError: the file cannot be read.

    """
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{path}: {path.stat().st_size:,} bytes, and dumps of at most {MOST_BYTES:,} are read")
    whole = _plain(path, path.read_bytes())
    version, entries = whole.get("version"), whole.get("entries")
    if not isinstance(version, str) or not isinstance(entries, Sequence) or isinstance(entries, str):
        raise ValueError(f"{path}: no dump of Flight Recorder: it has no version and no list of entries")
    if not re.fullmatch(r"2\.\d+", version):
        raise ValueError(f"{path}: version {version} of the format, and 2.x is read; torch 2.5 and later write it")
    read = [_entry(f"{path}: entries[{place}]", entry) for place, entry in enumerate(entries)]
    read.sort(key=lambda entry: entry.record_id)
    groups = _groups(path, whole.get("pg_config"), {entry.group for entry in read})
    return RankDump(path, rank, tuple(_with_batches(read)), groups)


def _plain(path: Path, data: bytes) -> Mapping[str, Any]:
    if not data:
        raise ValueError(f"{path}: empty; the rank was ended while it wrote it: leave the file out")
    try:
        if data.startswith(_PICKLE):
            whole = load_plain(data)
        elif data.lstrip()[:1] == _JSON:
            whole = json.loads(data)
        else:
            raise ValueError(f"{path}: neither a pickle nor JSON, so no dump of Flight Recorder")
    except UnreadablePickleError as error:
        raise ValueError(f"{path}: not read as a dump of Flight Recorder: {error}") from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: is no JSON: {error}; the file is cut off or damaged") from error
    if not isinstance(whole, Mapping):
        raise ValueError(f"{path}: no dump of Flight Recorder: it holds {type(whole).__name__}, not a dictionary")
    return whole


def _entry(where: str, entry: object) -> RecorderEntry:
    if not isinstance(entry, Mapping):
        raise ValueError(f"{where} is not a dictionary")
    name, state, group = entry.get("profiling_name"), entry.get("state"), entry.get("process_group")
    if not isinstance(name, str):
        raise ValueError(f"{where}.profiling_name is not a text")
    if state not in _STATES:
        raise ValueError(f"{where}.state is {state!r}, and one of {', '.join(_STATES)} is read")
    if not isinstance(group, Sequence) or len(group) != 2 or not all(isinstance(part, str) for part in group):
        raise ValueError(f"{where}.process_group is not a name and a description")
    record_id, p2p_seq_id, op_id = (_number(where, entry, key) for key in ("record_id", "p2p_seq_id", "op_id"))
    sizes, dtypes = entry.get("input_sizes"), entry.get("input_dtypes")
    is_object = dtypes == ["Byte"] or (dtypes == ["Long"] and sizes == [[1]])
    return RecorderEntry(record_id, (group[0], group[1]), name, _message(name), state, p2p_seq_id, op_id, is_object)


def _number(where: str, entry: Mapping[str, Any], key: str) -> int:
    value = entry.get(key)
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{where}.{key} is not a whole number from 0")
    return value


def _message(name: str) -> ChannelEnd | None:
    match = _MESSAGE.fullmatch(name)
    if match is None:
        return None
    return (
        ChannelEnd(True, int(match[1]), int(match[2])) if match[1] else ChannelEnd(False, int(match[4]), int(match[3]))
    )


def _with_batches(entries: Sequence[RecorderEntry]) -> Iterator[RecorderEntry]:
    """Give messages of a batch the state of its `coalesced` entry: torch follows the batch, not what is in it."""
    states = {(e.group, e.p2p_seq_id): e.state for e in entries if _COALESCED.fullmatch(e.name)}
    for entry in entries:
        key = entry.group, entry.p2p_seq_id
        batched = entry.message is not None and key in states
        yield replace(entry, state=states[key], in_batch=True) if batched else entry


def _groups(path: Path, config: object, named: set[GroupName]) -> dict[GroupName, tuple[int, ...]]:
    """The ranks of each group that entries name. gloo's recorder gives its groups no name: a lone one is meant."""
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        raise ValueError(f"{path}: pg_config is not a dictionary")
    ranks = {}
    for name, about in config.items():
        listed = about.get("ranks") if isinstance(about, Mapping) else None
        if not isinstance(listed, str) or not re.fullmatch(r"\[(\d{1,9}(, ?\d{1,9})*)?\]", listed):
            raise ValueError(f"{path}: pg_config[{name!r}].ranks is not a list of ranks such as '[0, 1]'")
        ranks[name] = tuple(sorted(json.loads(listed)))
    lone = ranks.get("") if len(ranks) == 1 else None
    found = {group: ranks.get(group[0], lone) for group in named}
    return {group: listed for group, listed in found.items() if listed}
