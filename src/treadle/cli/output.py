"""The JSON that commands print: one object, whose first key says what it is and in which version.

    {"treadle-verify": 1, "clean": true, ...}

A schema of each is in `treadle/cli/schemas`, and `treadle schema NAME` prints it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from treadle.cli.terminal import plain

VERSIONS = {
    "schedule": 1,
    "schedules": 1,
    "verify": 1,
    "explain": 1,
    "simulate": 1,
    "simulate-update": 1,
    "compare": 1,
    "import": 1,
    "why": 1,
    "balance": 1,
    "plan": 1,
    "calibrate": 1,
    "synthesize": 1,
    "costs-check": 1,
    "dryrun": 1,
    "selfcheck": 1,
    "update": 1,
    "update-rows": 1,
}
"""The kinds of output and their versions. A key that comes, goes or changes its meaning or unit makes a new version."""


def print_json(kind: str, body: Mapping[str, Any]) -> None:
    """Print an object of a kind on stdout, after the key that names the kind and its version."""
    plain(json.dumps({f"treadle-{kind}": VERSIONS[kind], **body}, indent=1, allow_nan=False) + "\n")


def schema_text(kind: str) -> str:
    """The schema of a kind of output, as JSON."""
    from importlib.resources import files

    return files("treadle.cli").joinpath("schemas", f"{kind}.json").read_text("utf-8")
