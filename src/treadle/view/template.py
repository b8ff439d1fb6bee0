"""HTML pages that are one file: a template with the parts of a report put in."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files


def fill_template(package: str, parts: Mapping[str, str]) -> str:
    """Return the page.html of a package, each comment `<!--name-->` replaced by the part of that name."""
    html = files(package).joinpath("page.html").read_text(encoding="utf-8")
    for name, text in parts.items():
        html = html.replace(f"<!--{name}-->", text)
    return html
