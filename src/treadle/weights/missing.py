"""Words for tensors that only one side has: wanted and not there, or there and not wanted."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from treadle.fields.nearest import nearest
from treadle.weights.tensor_boxes import Box, Holding

_MOST_NAMED = 4
_MOST_WORKERS = 8


def missing_tensors(names: list[str], have: Holding, want: Holding) -> str:
    """Make the error message for tensors that no rank has."""
    wanted = set(names)
    workers = [
        want.workers.get(w, w)
        for w, pieces in enumerate(want.pieces)
        if any(piece.tensor in wanted for piece in pieces)
    ]
    unused = have.tensors.keys() - want.tensors.keys()
    named = ", ".join(f"{name!r}{near(name, unused)}" for name in names[:_MOST_NAMED])
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    count = "a tensor" if len(names) == 1 else f"{len(names)} tensors"
    return f"{_workers(workers)} {count} that no rank has: {named}{more}; give a source with all that workers want"


def unwanted_tensors(names: list[str]) -> str:
    """Make the note on tensors that ranks have and no worker wants."""
    named = ", ".join(map(repr, names[:_MOST_NAMED]))
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    count = "a tensor" if len(names) == 1 else f"{len(names)} tensors"
    return f"no worker wants {count} that the source has, not sent: {named}{more}"


def near(name: str, known: Collection[str]) -> str:
    """Return an aside with the nearest known name; nothing if none is close."""
    found = nearest(name, sorted(known))
    return f" (near: {found!r})" if found is not None else ""


def who_wants(want: Holding, name: str, box: Box) -> str:
    """The workers that want this box of a tensor."""
    wants = (w for w, pieces in enumerate(want.pieces) if any(p.tensor == name and p.box == box for p in pieces))
    return _workers(want.workers.get(w, w) for w in wants)


def _workers(workers: Iterable[int]) -> str:
    found = list(workers)
    more = f" and {len(found) - _MOST_WORKERS} more" if len(found) > _MOST_WORKERS else ""
    listed = ", ".join(map(str, found[:_MOST_WORKERS]))
    return f"worker {listed} wants" if len(found) == 1 else f"workers {listed}{more} want"
