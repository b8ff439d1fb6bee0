"""What commands print with --json, held to its schema."""

from __future__ import annotations

import json
from typing import Any

import jsonschema

from treadle.cli.output import KINDS, schema


def read_json(kind: str, text: str) -> dict[str, Any]:
    """Parse an output; fail unless it is one JSON object that fits the schema of its kind and begins with the kind."""

    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    read: dict[str, Any] = json.loads(text, parse_constant=no_constant)
    validator = jsonschema.Draft202012Validator(schema(kind))
    problems = [f"{error.json_path}: {error.message}" for error in validator.iter_errors(read)]
    assert not problems, "\n".join(problems)
    assert next(iter(read.items())) == (f"treadle-{kind}", KINDS[kind].version)
    return read
