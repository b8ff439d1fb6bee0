"""The costs file: its format, schema, errors with line and field, and what it lacks."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import jsonschema
import pytest

import treadle
from tests.support.paths import ROOT
from treadle.costs import PRESETS, UNIT_COSTS, Costs, costs_text, dump, lacks, load_costs, missing, parse, read, schema
from treadle.costs.format import NUMBERED, SECTIONS
from treadle.lowering import LoweringOptions, lower

PAGE = (ROOT / "docs" / "costs.md").read_text()
EXAMPLE = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)[-1]


def fits(table: object) -> bool:
    return not list(jsonschema.Draft202012Validator(schema()).iter_errors(table))


def test_the_schema_describes_every_key() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())
    for name, section in SECTIONS.items():
        keys = schema()["properties"][name]["properties"]
        assert all(key.meaning in keys[key.name]["description"] for key in section.keys)


@pytest.mark.parametrize("name", ["unit", *PRESETS])
def test_presets_fit_the_schema_and_survive_a_round_trip(name: str) -> None:
    assert fits(tomllib.loads(costs_text(name)))
    for comments in (False, True):
        assert parse(dump(load_costs(name), comments=comments)) == load_costs(name)


def test_the_example_of_the_page_has_every_key_and_works() -> None:
    table = tomllib.loads(EXAMPLE)
    assert fits(table)
    absent = {
        (name, key) for name, section in SECTIONS.items() for key in section.names if key not in table.get(name, {})
    }
    alone = {("microbatch", "factors"), ("microbatch", "saved_factors")}  # not beside lengths
    assert absent == {("model", "b"), *(("cells", key) for key in SECTIONS["cells"].names)} | alone
    assert {key for entries in table["stage"].values() for key in entries} == set(NUMBERED["stage"].names) - {
        "stages"
    }  # the page cuts it into 4 and 8
    costs = parse(EXAMPLE)
    assert lacks(costs) == ()
    for name in ("1f1b", "interleaved"):
        program = lower(
            treadle.generate(name, pp=4, microbatches=8), costs, LoweringOptions(by_layer=True, offload=True, moe=True)
        )
        assert program.layout.model_layers == 32
        assert missing(program, costs) == ()
    sums = {"f": "attn_f counts host dispatch_f mlp_f combine_f", "w": "mlp_w attn_w"}
    assert costs.of_layer("f") == 400_000 < sum(costs.layer[part] for part in sums["f"].split())
    assert costs.of_layer("w") == sum(costs.layer[part] for part in sums["w"].split())


def test_the_page_explains_every_key() -> None:
    for name, section in {**SECTIONS, "stage.N": NUMBERED["stage"]}.items():
        part = PAGE.split(f"## `[{name}]`")[1].split("\n## ")[0]
        for key in section.names:
            assert f"`{key}`" in part, f"[{name}] {key}"


WRONG = [
    ("[cells]\nf = -3\n", 2, "[cells] f", "a number from 0, below 1e+12, got -3"),
    ("[cells]\n\nf = 3\nlayers = 0\n", 4, "[cells] layers", "a whole number from 1"),
    ("[cells]\nlayers = 1.5\n", 2, "[cells] layers", "a whole number from 1"),
    ("[cells]\nf = true\n", 2, "[cells] f", "got true"),
    ("[cells]\nf = nan\n", 2, "[cells] f", "got nan"),
    ("[cells]\nf = [1]\n", 2, "[cells] f", "got [1]"),
    ('# f = 3\nunit = "s"\n', 2, "unit", "is one of unit, us, ms, got 's'"),
    ("name = 3\n", 1, "name", "is a text, got 3"),
    ("[model]\nf = 3\n", 1, "[model]", "lacks layers"),
    ("[massage]\nsend = 3\n", 1, "massage", "did you mean 'message'?"),
    ("[layer]\natn_f = 3\n", 2, "[layer] atn_f", "did you mean 'attn_f'?"),
    ("layer = 3\n", 1, "[layer]", "is a section with a number for each of attn_f"),
    ('[ layer ]\n "attn_g"\t= 3\n', 2, "[layer] attn_g", "did you mean"),
    ("cells.f = 3\ncells.g = 3\n", 2, "[cells] g", "is not known"),
    ("\ncells = { f = 3, g = 3 }\n", 2, "[cells] g", "is not known"),
    ("[stage.3]\nfactor = 0\n", 2, "[stage.3] factor", "is a number above 0, up to 1e+06, got 0"),
    ("[stage.3]\nfaktor = 2\n", 2, "[stage.3] faktor", "did you mean 'factor'?"),
    ("[stage.last]\nfactor = 2\n", 1, "[stage.last]", "is not a number of a stage; write [stage.3]"),
    ("stage = 3\n", 1, "[stage]", "is a section for each number, such as [stage.3], got 3"),
    ("[microbatch]\nfactors = [1, 0]\n", 2, "[microbatch] factors[1]", "is a number above 0, up to 1e+06, got 0"),
    ("[microbatch]\nfactors = 2\n", 2, "[microbatch] factors", "one for each micro-batch, got 2"),
    ("[microbatch]\nlengths = [1]\nquadratic = 2\n", 3, "[microbatch] quadratic", "is a number from 0 to 1, got 2"),
    ('about = """\n[cells]\nf = -1\n"""\n[cells]\nf = -3\n', 6, "[cells] f", "got -3"),
]


@pytest.mark.parametrize(("text", "line", "field", "message"), WRONG)
def test_problems_have_line_and_field(text: str, line: int, field: str, message: str) -> None:
    _, problems = read(text)
    assert [(problem.line, problem.field) for problem in problems] == [(line, field)]
    assert message in problems[0].message
    with pytest.raises(ValueError, match=re.escape(f"mine.toml:{line}: {field} {problems[0].message}")):
        parse(text, "mine.toml")


CONTRADICTIONS = [
    ("[model]\nlayers = 3\ndense = 4\n", 3, "[model] dense", "is at most layers, 3, got 4"),
    ("[microbatch]\nfactors = [1]\nlengths = [1]\n", 3, "[microbatch] lengths", "stands beside factors"),
    ("[microbatch]\nfactors = [1]\nreference = 2\n", 3, "[microbatch] reference", "goes with lengths"),
    ("[microbatch]\nfactors = [1]\nsaved_factors = [1, 2]\n", 3, "[microbatch] saved_factors", "as many numbers"),
]


@pytest.mark.parametrize(("text", "line", "field", "message"), CONTRADICTIONS)
def test_entries_that_contradict_each_other_have_line_and_field(text: str, line: int, field: str, message: str) -> None:
    _, problems = read(text)
    assert [(problem.line, problem.field) for problem in problems] == [(line, field)]
    assert message in problems[0].message


@pytest.mark.parametrize("text", [text for text, *_ in WRONG if "nan" not in text])
def test_the_schema_refuses_what_the_parser_refuses(text: str) -> None:
    assert not fits(tomllib.loads(text))


def test_what_is_not_toml_has_its_line() -> None:
    _, problems = read("[cells]\nf = \n")
    assert [(problem.line, problem.field) for problem in problems] == [(2, "")]
    assert "not TOML" in problems[0].message


def test_all_problems_are_listed_in_order() -> None:
    text = "[cells]\nf = -3\n[layer]\natn = 3\nattn_f = -1\n"
    assert [problem.line for problem in read(text)[1]] == [2, 4, 5]
    with pytest.raises(ValueError, match=r"x:2: \[cells\] f .* \(and 2 more: treadle costs check x\)"):
        parse(text, "x")


# What is not said


def test_missing_names_what_is_taken_as_0() -> None:
    schedule = treadle.generate("1f1b", pp=2, microbatches=4)
    whole = {"attn_f": 3, "mlp_f": 4, "attn_b": 6, "mlp_b": 8, "attn_w": 1, "mlp_w": 2}
    moe = LoweringOptions(layers=1, moe=True, padded=True)
    dense = LoweringOptions(layers=1, moe=False)

    def lacking(costs: Costs, options: LoweringOptions) -> tuple[str, ...]:
        return missing(lower(schedule, costs, options), costs)

    clock = UNIT_COSTS.clock
    assert lacking(Costs("", clock, layer=whole), moe) == ("send", "dispatch", "combine")
    assert lacking(Costs("", clock, layer={**whole, "dispatch_f": 0}), moe) == ("send", "combine", "dispatch_b")
    assert lacking(Costs("", clock, layer=whole, message={"send": 0}), dense) == ()
    assert lacking(Costs("", clock, layer={"attn_f": 3}, message={"send": 0}), dense) == ("mlp", "attn_b", "attn_w")
    assert lacking(Costs("", clock, cells={"f": 3}, message={"send": 0}), dense) == ("i", "w")
    assert lacking(Costs("", clock, cells={"f": 3, "b": 3}, message={"send": 0}), LoweringOptions()) == ()
    assert lacking(Costs("", clock, layer=whole), LoweringOptions()) == ("send",)
    for options in (moe, dense, LoweringOptions(), LoweringOptions(layers=1, offload=True, dp=2, moe=True)):
        assert lacking(UNIT_COSTS, options) == ()
        assert lacking(load_costs("deepseek-v3-h800"), options) == ()


def test_weight_halves_that_are_not_split_off_are_asked_for() -> None:
    costs = Costs("", UNIT_COSTS.clock, layer={"attn_f": 3, "mlp_f": 4, "attn_b": 6, "mlp_b": 8}, message={"send": 0})
    program = lower(
        treadle.generate("1f1b", pp=2, microbatches=4), costs, LoweringOptions(layers=1, moe=False, split=())
    )
    assert missing(program, costs) == ("mlp_w", "attn_w")


def test_a_file_is_told_what_it_lacks() -> None:
    found = {name: lack.effect for lack in lacks(parse("[cells]\nf = 3\ni = 3\n")) for name in lack.names}
    assert "taken as 0 with `moe`" in found["[layer] dispatch_f"]
    assert "`memory_limit` of verify is refused" in found["[saved_bytes] mlp"]
    assert "`model_layers` is refused" in found["[cells] layers"]
    assert found["[cells] w"] == "computation that takes 0"
    assert "[cells] f" not in found


def test_files_that_are_read_are_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[cells]\nf = 3\n")
    assert load_costs(str(path)).name == str(path)
    with pytest.raises(ValueError, match="did you mean 'deepseek-v3-h800'"):
        load_costs("deepseek-v3-h80")
