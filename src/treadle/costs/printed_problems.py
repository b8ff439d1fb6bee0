"""Problems of a costs file as `treadle costs check --json` prints them."""

from __future__ import annotations

from typing import Annotated, TypedDict

from treadle.fields.kinds import CountFrom1


class ProblemJson(TypedDict):
    """A problem as it is printed."""

    line: Annotated[CountFrom1 | None, "The line, from 1; null where not known."]
    field: Annotated[str, "The section and the key; empty for the whole file."]
    message: Annotated[str, "The problem in a sentence."]
