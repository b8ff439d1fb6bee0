"""YAML of trainers: read with PyYAML, which nothing else here needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treadle.host.extras import brought_by


def parse_yaml(text: str) -> Mapping[str, Any] | None:
    """Return the mapping that a text is, or None if it is none.

    Raises:
        MissingPackageError: PyYAML is not installed.

    """
    yaml = _yaml()
    try:
        table = yaml.safe_load(text)
    except yaml.YAMLError:
        return None
    return table if isinstance(table, dict) else None


def write_yaml(table: Mapping[str, Any]) -> str:
    """Return a mapping as YAML, its keys in their order."""
    return str(_yaml().safe_dump(dict(table), sort_keys=False, width=120))


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted names as sections: `{"train.seed": 1}` as `{"train": {"seed": 1}}`."""
    table: dict[str, Any] = {}
    for name, value in settings.items():
        *sections, last = name.split(".")
        place = table
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return table


def dotted(table: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Return the settings of sections by dotted names."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, dict) and value:
            found |= dotted(value, f"{before}{name}.")
        else:
            found[f"{before}{name}"] = value
    return found


def _yaml() -> Any:
    with brought_by("plan", needed_by="a trainer's YAML"):
        import yaml

        return yaml
