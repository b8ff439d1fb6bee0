"""Text, TOML and JSON of files: mistakes have the file and the line, and what is written is read back."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.fields.fields import Fields
from treadle.fields.input_files import parse_json, read_json, read_text, read_toml, toml_value
from treadle.fields.kinds import Number


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no file .*none\.txt$"):
        read_text(tmp_path / "none.txt")
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        read_text(tmp_path)
    (tmp_path / "odd.txt").write_bytes(b"ab\xff")
    with pytest.raises(ValueError, match=r"odd\.txt is not UTF-8 text: .* at byte 2; save it as UTF-8"):
        read_text(tmp_path / "odd.txt")
    (tmp_path / "marked.txt").write_bytes(b"\xef\xbb\xbfx")
    assert read_text(tmp_path / "marked.txt") == "x"


def test_a_field_of_toml_has_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text('name = """\n[b]\n"""\n[a]\n\nx = 1\ny.z = 2\n')
    found = read_toml(path)
    assert found.table == {"name": "[b]\n", "a": {"x": 1, "y": {"z": 2}}}
    places = {("name",): 1, ("a",): 4, ("a", "x"): 6, ("a", "y", "z"): 7, ("a", "q"): 4}
    assert {where: found.at(*where) for where in places} == {where: f"{path}:{n}" for where, n in places.items()}
    assert found.at("b") == str(path)


@pytest.mark.parametrize(("text", "line"), [("a = 1\nb =\n", 2), ("a = 1\n[b", 2), ("a = 1\na = 2", 2)])
def test_what_is_not_toml_has_its_line(text: str, line: int, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(ValueError, match=rf"a\.toml:{line}: not TOML: "):
        read_toml(tmp_path / "a.toml")


def test_what_is_no_json_object_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"a": 1,\n "b" 2}')
    with pytest.raises(ValueError, match=r"a\.json:2: not JSON: .* \(column 6\)"):
        read_json(path)
    path.write_text("3")
    with pytest.raises(ValueError, match=r"a\.json has a JSON object, got 3"):
        read_json(path)


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', "[NaN]", "[-Infinity]"])
def test_strict_json_has_no_key_twice_and_no_nan(text: str) -> None:
    with pytest.raises(ValueError, match=r"is given twice in one object|is no number of JSON"):
        parse_json(text)


plain = st.one_of(
    st.text(), st.integers(-(2**62), 2**62), st.booleans(), st.floats(allow_nan=False, allow_infinity=False)
)


@given(st.one_of(plain, st.lists(plain)))
def test_values_written_as_toml_are_read_back(value: object) -> None:
    assert tomllib.loads(f"a = {toml_value(value)}\n") == {"a": value}


def test_fields_are_named_with_their_place() -> None:
    fields = Fields("f.json", "top", {"a": 1, "inner": {"b": "x"}})
    assert fields.whole("a") == 1
    assert fields.given("none", Number(), 7) == 7
    with pytest.raises(ValueError, match=r"^f\.json: top\.inner\.b is a whole number from 0, got 'x'$"):
        fields.inner("inner").whole("b")
    with pytest.raises(ValueError, match=r"^f\.json: top\.inner is not known; known are a$"):
        fields.expect(("a",))
    with pytest.raises(ValueError, match=r"^f\.json: top\.c is missing; it has a, inner, c$"):
        fields.expect(("a", "inner", "c"))
    with pytest.raises(ValueError, match=r"^f\.json: top is an object, got 3$"):
        Fields.of(3, "f.json", "top")
