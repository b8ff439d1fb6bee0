"""Entries of a JSON object, one by one: as json reads them, wherever the pieces end."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from treadle.profiles import entries as module
from treadle.profiles.entries import entries, events

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.dictionaries(st.text(), VALUES, max_size=5), piece=st.integers(1, 9), packed=st.booleans())
def test_entries_are_those_of_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: dict[str, object], piece: int, packed: bool
) -> None:
    monkeypatch.setattr(module, "_PIECE_BYTES", piece)
    text = json.dumps(content, indent=piece % 3, ensure_ascii=False).encode("utf-8", "surrogatepass")
    path = tmp_path / "a.json"
    path.write_bytes(gzip.compress(text) if packed else text)
    if any(0xD800 <= ord(letter) < 0xE000 for letter in text.decode("utf-8", "surrogatepass")):
        return
    assert dict(entries(path)) == content


@pytest.mark.parametrize("text", ["", "[1]", '{"a": 1', '{"a" 1}', '{"a": 1, }', '{"a": [1, 2', '{"a": 1 "b": 2}'])
def test_what_is_no_object_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"a\.json: is no JSON object: .*cut off or damaged"):
        list(entries(path))


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.lists(VALUES, max_size=5), piece=st.integers(1, 9), inside=st.booleans())
def test_events_are_those_of_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: list[object], piece: int, inside: bool
) -> None:
    monkeypatch.setattr(module, "_PIECE_BYTES", piece)
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"a": [1], "traceEvents": content, "b": 2} if inside else content, indent=piece % 3))
    assert list(events(path)) == content


@pytest.mark.parametrize("text", ["", "7", "[1", "[1 2]", '{"traceEvents": [1', '{"traceEvents": 1}'])
def test_what_is_no_chrome_trace_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"a\.json: is no Chrome trace: .*cut off or damaged"):
        list(events(path))
