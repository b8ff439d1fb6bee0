"""The JSON that commands print: one object, whose first key is its kind and the version of that.

    {"treadle-verify": 1, "clean": true, ...}

The other keys are those of a TypedDict beside the code that makes the object; `treadle schema NAME` prints the JSON
schema made from that type.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from treadle.cli.terminal import plain


class OutputKind(NamedTuple):
    """A kind of output; `printed` is the module and the name of its type, which is imported for its schema only."""

    version: int
    title: str
    about: str
    printed: str


KINDS = {
    "schedule": OutputKind(
        1,
        "A schedule",
        "treadle show TARGET --json. Every command that takes a schedule reads it.",
        "treadle.files.json_form:ScheduleJson",
    ),
    "schedules": OutputKind(1, "The schedules", "treadle schedules --json.", "treadle.cli.printed:SchedulesJson"),
    "verify": OutputKind(
        1,
        "The report of the verifier",
        "treadle verify --json. The exit code is 0 if clean, 1 if not.",
        "treadle.verifier.printed_report:VerifyJson",
    ),
    "explain": OutputKind(1, "Findings explained", "treadle explain [CODE] --json.", "treadle.cli.printed:ExplainJson"),
    "simulate": OutputKind(
        1,
        "A step in numbers",
        "treadle simulate --json, of a pipeline: predicted, or measured where a trace was given.",
        "treadle.cli.printed:SimulateJson",
    ),
    "simulate-update": OutputKind(
        1,
        "A weight update in numbers",
        "treadle simulate --json, of a weight update.",
        "treadle.cli.printed:SimulateUpdateJson",
    ),
    "compare": OutputKind(
        1, "A comparison with the first row", "treadle compare --json.", "treadle.simulator.printed_step:CompareJson"
    ),
    "import": OutputKind(1, "A profile as it was read", "treadle import --json.", "treadle.cli.printed:ImportJson"),
    "why": OutputKind(1, "Why a run is slow", "treadle why --json.", "treadle.diagnosis.printed_why:WhyJson"),
    "hang": OutputKind(1, "Why a run hangs", "treadle hang --json.", "treadle.recorder.printed_hang:HangJson"),
    "balance": OutputKind(
        1, "Cuts of a model into stages", "treadle balance --json.", "treadle.cli.printed:BalanceJson"
    ),
    "plan": OutputKind(
        1, "Schedule and parallelism of a run", "treadle plan --json.", "treadle.planner.printed_plan:PlanJson"
    ),
    "judged": OutputKind(
        1,
        "A trainer's configuration, judged",
        "treadle plan --from FILE --json.",
        "treadle.planner.printed_plan:JudgedJson",
    ),
    "calibrate": OutputKind(
        1,
        "Constants of a cluster fitted to runs",
        "treadle calibrate --json.",
        "treadle.calibrate.printed_calibration:CalibrateJson",
    ),
    "synthesize": OutputKind(
        1, "A schedule found by a solver", "treadle synthesize --json.", "treadle.cli.printed:SynthesizeJson"
    ),
    "costs-check": OutputKind(
        1,
        "Problems of a costs file",
        "treadle costs check FILE --json. The exit code is 0 if the file is right, 1 if not.",
        "treadle.cli.printed:CostsCheckJson",
    ),
    "dryrun": OutputKind(
        1,
        "A step as one rank of a simulated world",
        "treadle dryrun --json. The exit code is 1 if there are disagreements.",
        "treadle.cli.printed:DryrunJson",
    ),
    "selfcheck": OutputKind(
        1,
        "What passed, was skipped and failed on a machine",
        "treadle selfcheck --json. The exit code is 1 if a check failed.",
        "treadle.cli.printed:SelfcheckJson",
    ),
    "update": OutputKind(
        1,
        "A committed weight update",
        "treadle update --json. An update that fails prints no JSON: exit code 1, and the reason on stderr.",
        "treadle.cli.printed:UpdateJson",
    ),
    "update-rows": OutputKind(
        1,
        "A weight update, buffer by buffer",
        "treadle show --json of a weight update.",
        "treadle.view.printed_rows:UpdateRowsJson",
    ),
}
"""The kinds of output. A key that comes, goes or changes its meaning or unit makes a new version."""


def print_json(kind: str, body: Mapping[str, Any]) -> None:
    """Print an object of a kind on stdout."""
    plain(json_text(kind, body))


def json_text(kind: str, body: Mapping[str, Any]) -> str:
    """Return an object of a kind as JSON, after the key that names the kind and its version."""
    return json.dumps({f"treadle-{kind}": KINDS[kind].version, **body}, indent=1, allow_nan=False) + "\n"


def schema(kind: str) -> dict[str, Any]:
    """Return the JSON schema of a kind of output."""
    from importlib import import_module

    from treadle.fields.kinds import DIALECT
    from treadle.fields.typed import versioned

    found = KINDS[kind]
    module, _, name = found.printed.partition(":")
    described = versioned(kind, found.version, getattr(import_module(module), name))
    return {"$schema": DIALECT, "title": found.title, "description": found.about, **described.schema()}
