"""Every --json output fits its schema, and every schema says what each key is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from typer.testing import CliRunner

from tests.support.json_output import read_json
from tests.support.paths import ROOT
from tests.support.straggler import write_timeline
from treadle.cli.app import COMMANDS, app, make_command
from treadle.cli.output import KINDS, print_json, schema
from treadle.files import json_form
from treadle.weights.bucket_stream import even_stream
from treadle.weights.update_lowering import lower_update
from treadle.weights.update_rates import simulate_update

SIZE = ("--pp", "2", "-m", "4")
LAYERS = ("--layers", "1", "--moe", "--costs", "deepseek-v3-h800")

PLAN = ("plan", "--model", "llama3-8b", "--cluster", "h100:16", "--schedule", "1f1b", "--tp", "2")
DUMPS = ROOT / "examples" / "dumps"
OUTPUTS: dict[str, tuple[str, tuple[str, ...], int]] = {
    "a schedule": ("schedule", ("show", "interleaved-overlap", *SIZE), 0),
    "a schedule with receives": ("schedule", ("show", "received.txt"), 0),
    "the schedules": ("schedules", ("schedules",), 0),
    "all findings": ("explain", ("explain",), 0),
    "one finding": ("explain", ("explain", "t201"), 0),
    "a clean schedule": ("verify", ("verify", "dualpipe", *SIZE), 0),
    "a schedule with findings": ("verify", ("verify", "zb-v", "--pp", "4", "-m", "8", "--receives", "use"), 1),
    "rows that are unsound": ("verify", ("verify", "unsound.txt"), 1),
    "a clean program": ("verify", ("verify", "1f1b", *SIZE, *LAYERS), 0),
    "a program over its limit": ("verify", ("verify", "1f1b", *SIZE, *LAYERS, "--memory-limit", "1MB"), 1),
    "a program without bytes": ("verify", ("verify", "1f1b", *SIZE, "--layers", "2"), 0),
    "an update verified": ("verify", ("verify", "update.npz"), 0),
    "an update over its limit": ("verify", ("verify", "update.npz", "--memory-limit", "2B"), 1),
    "cells simulated": ("simulate", ("simulate", "zb-h1", *SIZE), 0),
    "layers simulated": ("simulate", ("simulate", "interleaved-overlap", *SIZE, *LAYERS, "--offload"), 0),
    "a model simulated": ("simulate", ("simulate", "1f1b", *SIZE, "--model-layers", "8", "--by-layer", "--moe"), 0),
    "many ranks": ("simulate", ("simulate", "1f1b", "--pp", "32", "-m", "64"), 0),
    "every GPU simulated": (
        "simulate",
        ("simulate", "1f1b", *SIZE, *LAYERS, "--ep", "2", "--dp", "4", "--every-gpu", "--stragglers", "10%"),
        0,
    ),
    "a trace": ("simulate", ("simulate", "first.npz"), 0),
    "an update": ("simulate-update", ("simulate-update", "--devices", "4", "--rounds", "2"), 0),
    "schedules": ("compare", ("compare", "1f1b", "zb-v", "interleaved:vpp=4", "--pp", "4", "-m", "8"), 0),
    "sizes that differ": ("compare", ("compare", "1f1b", "first.npz", "--pp", "4", "-m", "8"), 0),
    "trace against trace": ("compare", ("compare", "first.npz", "slow.npz"), 0),
    "a trace with an outlier past all numbers": ("compare", ("compare", "first.npz", "odd.npz"), 0),
    "a profile": ("import", ("import", str(ROOT / "tests" / "data" / "primus" / "pp8")), 0),
    "a run and why it is slow": ("why", ("why", "timeline.json.gz"), 0),
    "a step and why it is slow": ("why", ("why", "slow.npz"), 0),
    "a hang": ("hang", ("hang", str(DUMPS / "stalled"), "--schedule", "1f1b", "--pp", "4", "-m", "4"), 0),
    "a circle": ("hang", ("hang", str(DUMPS / "circle"), "--schedule", "1f1b", *SIZE), 0),
    "cuts": ("balance", ("balance", "--pp", "4", "--costs", "deepseek-v3-model"), 0),
    "cuts with steps": (
        "balance",
        ("balance", *SIZE, "--costs", "unit", "--layout", "Ett|ttL", "--schedule", "1f1b"),
        0,
    ),
    "a plan": ("plan", PLAN, 0),
    "a plan under stragglers": (
        "plan",
        (*PLAN, "--pp", "2", "--schedule", "zb-h1", "--micro-batch-size", "1", "--stragglers", "10%", "--draws", "3"),
        0,
    ),
    "constants fitted": ("calibrate", ("calibrate", "--cluster", "h100:16", "--measured", "runs.csv"), 0),
    "constants fitted to one run": ("calibrate", ("calibrate", "--cluster", "h100:16", "--measured", "one.csv"), 0),
    "an order": ("synthesize", ("synthesize", *SIZE, "--max-activations", "1"), 0),
    "an order that is a schedule of ours": ("synthesize", ("synthesize", *SIZE, "--max-activations", "2"), 0),
    "a costs file": ("costs-check", ("costs", "check", "right.toml"), 0),
    "a costs file with problems": ("costs-check", ("costs", "check", "wrong.toml"), 1),
    "a costs file that is no TOML": ("costs-check", ("costs", "check", "unsound.txt"), 1),
    "rows of an update": ("update-rows", ("show", "update.npz"), 0),
}
"""By name: the kind, the command (--json is added), and its exit code. dryrun, selfcheck and update have their own."""


def run(*args: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, args)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that commands read."""
    import numpy as np

    import treadle

    place = tmp_path_factory.mktemp("made")
    (place / "unsound.txt").write_text("0: F0.0 F1.0 B0.0 B0.0\n1: B0.0 F0.0 W7.0\n")
    (place / "received.txt").write_text("# receive 0>1: F0.0\n0: F0.0 B0.0\n1: F0.0 B0.0\n")
    (place / "right.toml").write_text("[cells]\nf = 1\nb = 2\n")
    (place / "wrong.toml").write_text("[cells]\nf = -1\ng = 2\n")
    rows = [f"llama3-8b,{tp},2,64,{step}\n" for tp, step in ((1, 3.0), (2, 3.3), (4, 3.9))]
    (place / "runs.csv").write_text("model,tp,pp,global_batch_size,step_s\n" + "".join(rows))
    (place / "one.csv").write_text("model,tp,pp,global_batch_size,step_s\n" + rows[0])
    unit = treadle.load_costs("unit")
    program = treadle.lower(treadle.generate("1f1b", pp=2, microbatches=4), unit)
    first = treadle.simulate(program, unit)
    treadle.save_trace(first, place / "first.npz")
    treadle.save_trace(simulate_update(lower_update(even_stream(4, 2))), place / "update.npz")
    treadle.save_trace(treadle.simulate(program, unit, slowness=0.1, seed=3), place / "slow.npz")
    last = np.flatnonzero(first.end > first.start)[-1]
    end = np.where(np.arange(program.num_ops) == last, 99 * first.end, first.start)
    odd = treadle.Trace(program, first.start, end, first.clock, "all ops but one take no time")
    treadle.save_trace(odd, place / "odd.npz")
    write_timeline("ST", place / "timeline.json.gz")
    return place


@pytest.mark.parametrize("name", OUTPUTS)
def test_output_fits_its_schema(name: str, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, args, code = OUTPUTS[name]
    monkeypatch.chdir(made)
    exit_code, printed = run(*args, "--json")
    read = read_json(kind, printed)
    assert exit_code == code
    if kind == "verify":
        assert read["clean"] == (code == 0) == (not read["findings"])


def test_an_outlier_past_all_numbers_has_no_score(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made)
    ops = read_json("compare", run("compare", "first.npz", "odd.npz", "--json")[1])["ops"]
    assert [outlier["score"] for outlier in ops["outliers"]] == [None]


def test_every_command_with_json_is_covered() -> None:
    """A command that gets --json gets a kind, a schema and a case here."""
    with_json = {name for name in COMMANDS for option in _options(make_command(name)) if "--json" in option}
    elsewhere = {"dryrun", "selfcheck", "update"}  # tests of runtime, selfcheck and cli/test_update.py
    judged = {"judged"}  # of `plan --from`: cli/test_judged.py
    assert with_json == {args[0] for _, args, _ in OUTPUTS.values()} | elsewhere
    assert set(KINDS) == {kind for kind, *_ in OUTPUTS.values()} | elsewhere | judged


def _options(command: Any) -> Iterator[list[str]]:
    for inner in getattr(command, "commands", {}).values():
        yield from _options(inner)
    yield from (parameter.opts for parameter in command.params)


def test_the_schema_of_a_schedule_is_that_of_its_file() -> None:
    assert {key: schema("schedule")[key] for key in ("properties", "required")} == {
        key: json_form.FORM.schema()[key] for key in ("properties", "required")
    }


@pytest.mark.parametrize("kind", KINDS)
def test_schema_describes_every_key_and_allows_no_other(kind: str) -> None:
    made = schema(kind)
    jsonschema.Draft202012Validator.check_schema(made)
    assert made["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert made["title"]
    assert made["required"][0] == f"treadle-{kind}"
    assert made["properties"][f"treadle-{kind}"]["const"] == KINDS[kind].version
    for part in _objects(made):
        for key, value in part.get("properties", {}).items():
            assert value.get("description"), key
        if "properties" in part:
            assert part["additionalProperties"] is False
            assert set(part["required"]) <= set(part["properties"])
        else:
            assert isinstance(part["additionalProperties"], dict), "a mapping says what its values are"


def _objects(part: Any) -> Iterator[dict[str, Any]]:
    """Every schema of an object inside a schema, itself among them."""
    if isinstance(part, list):
        for entry in part:
            yield from _objects(entry)
    if isinstance(part, dict):
        if "object" in (part.get("type"), *(part["type"] if isinstance(part.get("type"), list) else ())):
            yield part
        for entry in part.values():
            yield from _objects(entry)


def test_schema_is_listed_and_printed() -> None:
    listed = run("schema")[1]
    assert [line.split()[0] for line in listed.splitlines()[1:]] == list(KINDS)
    for name in ("verify", "treadle-verify"):
        assert json.loads(run("schema", name)[1]) == schema("verify")


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("schema", "verfy"), "did you mean 'verify'?"),
        (("schema", "x"), "known are schedule, schedules, "),
        (("show", "1f1b", *SIZE, "--lower", "--layers", "1", "--json"), "-o program.npz writes the program"),
        (("compare", "1f1b", *SIZE, "--fit", "fitted.toml", "--json"), "takes at least two, got 1f1b"),
    ],
)
def test_json_that_a_command_does_not_have_is_refused(args: tuple[str, ...], told: str) -> None:
    error = CliRunner().invoke(app, args).exception
    assert isinstance(error, ValueError)
    assert told in str(error)


def test_numbers_that_json_lacks_are_not_printed() -> None:
    with pytest.raises(ValueError, match="JSON"):
        print_json("verify", {"peak": float("nan")})
