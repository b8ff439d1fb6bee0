"""`treadle explain`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from treadle.cli.common_options import Json
from treadle.cli.output import print_json
from treadle.cli.terminal import out, plain, suggest
from treadle.cli.wording import as_typed
from treadle.verifier import CODES
from treadle.verifier import explain as explain_code

if TYPE_CHECKING:
    from treadle.cli.printed import ExplainJson
    from treadle.verifier.codes import Explanation


def explain(
    code: Annotated[
        str | None, typer.Argument(metavar="[CODE]", help="A finding's code; all of them if left out.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Says what a finding means, why it matters, and the way out."""
    found = CODES if code is None else {code.upper(): explain_code(code)}
    codes = {name: each._replace(wayout=as_typed(each.wayout)) for name, each in found.items()}
    if as_json:
        print_json("explain", _as_dict(codes))
        return
    for name, each in codes.items():
        out.print(f"[bold]{name}[/] {escape(each.title)}")
        if code is not None:
            out.print(f"\n{escape(each.meaning)}\n\nFor example:")
            plain("".join(f"    {line}\n" for line in each.example.splitlines()))
            out.print(f"\nThe way out: {escape(each.wayout)}")
    suggest("treadle explain T201" if code is None else "treadle verify --help")


def _as_dict(codes: Mapping[str, Explanation]) -> ExplainJson:
    return {
        "findings": {
            name: {"title": code.title, "meaning": code.meaning, "example": code.example, "wayout": code.wayout}
            for name, code in codes.items()
        }
    }
