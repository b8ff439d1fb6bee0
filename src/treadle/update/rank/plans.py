"""Plans of updates, made of the layouts of all ranks and kept for the next update."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from treadle.host.errors import TreadleError
from treadle.update.protocol.catalogue import Known, read_layouts
from treadle.update.protocol.control import Layouts
from treadle.update.protocol.update_messages import WeightLayout
from treadle.update.rank.shares import Shares
from treadle.weights.buffer_sizes import Memory
from treadle.weights.chosen_plan import Transfer, plan_transfer
from treadle.weights.missing import near, unwanted_tensors
from treadle.weights.tensor_boxes import Holding, Tensor

MOST_PLANS = 4


class UnplannableError(TreadleError, ValueError):
    """No plan can be made. All ranks make it of the same layouts, so `who` is not the rank that raises."""

    def __init__(self, who: str, text: str) -> None:
        super().__init__(text)
        self.who = who


class Plans:
    """The layouts of all ranks, and the plans made of them."""

    def __init__(self, memory: Memory | None) -> None:
        self._memory = memory
        self._known = Known((), (), ())
        self._made: dict[tuple[object, ...], Shares] = {}

    def of(self, layouts: Layouts, transfer: Transfer, *, delta: bool = False) -> Shares:
        """Return the plan of an attempt. Raises UnplannableError, or WireError for a malformed catalogue.

        `delta`: changed elements alone may move with it.
        """
        if layouts.catalogue is not None:
            self._known = read_layouts(layouts.catalogue)
            self._made.clear()
        key = layouts.loads, layouts.holds, layouts.only, transfer, delta
        if key not in self._made:
            while len(self._made) >= MOST_PLANS:
                del self._made[next(iter(self._made))]
            self._made[key] = self._make(layouts, transfer, delta=delta)
        return self._made[key]

    def tied(self, layouts: Layouts) -> list[tuple[str, str]]:
        """Names that engines of an attempt's workers have tied, each with the name under which they take the tensor."""
        sides = {id(side): side for side in (self._known.wants[rank] for rank in layouts.loads)}
        return sorted({pair for side in sides.values() for pair in side.tied})

    def _make(self, layouts: Layouts, transfer: Transfer, *, delta: bool) -> Shares:
        known = self._known
        everyone, free = range(len(known.has)), known.free_bytes
        have = _holding(known.wants, layouts.holds) if layouts.holds else _holding(known.has, everyone)
        want = replace(
            _holding(known.wants, layouts.loads), workers=dict(zip(layouts.loads, layouts.workers, strict=True))
        )
        if self._memory is not None:
            memory = replace(self._memory, free_bytes=free)
        else:  # all that is free: engines need some of it
            copies = max((known.wants[rank].copies for rank in layouts.loads), default=0)
            memory = Memory(free, copies=copies + delta)  # a delta is decoded into one more
        tied = self.tied(layouts)
        _check_changed(layouts.only, have, want)
        _check_tied(tied, have)
        try:
            if any(name in have.tensors for name, _ in tied):  # compared by ranks that see every bucket
                transfer = "broadcast"
            plan = plan_transfer(have, want, memory, layouts.only, transfer=transfer, shared=delta)
        except ValueError as error:
            raise UnplannableError("the update ranks", f"{error}{_instead(layouts)}") from error
        if layouts.only is None and not layouts.holds:
            left = sorted(have.tensors.keys() - want.tensors.keys() - {name for name, _ in tied})
            plan = replace(plan, notes=(*plan.notes, *([unwanted_tensors(left)] if left else [])))
        straight = layouts.holds and not plan.is_targeted  # a worker exports into the IPC buffer
        return Shares(replace(plan, num_h2d=0) if straight else plan)


def _check_changed(changed: Collection[str] | None, have: Holding, want: Holding) -> None:
    for name in sorted(set(changed or ()) - want.tensors.keys()):
        if name in have.tensors:
            text = "which no worker wants; name the tensor it is tied to, or leave it out"
        else:
            text = f"a tensor that no rank has and no worker wants{near(name, want.tensors.keys())}; leave it out"
        raise UnplannableError("the caller", f"changed= names {name!r}, {text}")


def _check_tied(tied: Collection[tuple[str, str]], have: Holding) -> None:
    for name, taken in tied:
        mine, other = have.tensors.get(name), have.tensors.get(taken)
        if mine is not None and other is not None and (mine.shape, mine.dtype) != (other.shape, other.dtype):
            raise UnplannableError(
                "the caller",
                f"engines have tied {name!r} to {taken!r}, and the source has {_words(mine)} and {_words(other)}; "
                "use engines that do not tie them",
            )


def _instead(layouts: Layouts) -> str:
    """Return the way out, for an error in a recovery from peers."""
    if not layouts.holds:
        return ""
    version = layouts.version
    return (
        f"; the workers that serve version {version} do not have all of it: call recover(source, version={version}) "
        "with a source that has"
    )


def _holding(sides: Sequence[WeightLayout], of: Collection[int]) -> Holding:
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for rank, side in enumerate(sides):
        for tensor in side.tensors if id(side) not in seen else ():
            if tensors.setdefault(tensor.name, tensor) != tensor:
                raise UnplannableError(
                    f"update rank {rank}",
                    f"{tensor.name} is {_words(tensor)} there and {_words(tensors[tensor.name])} on a rank before it; "
                    "all must describe a tensor alike",
                )
        seen.add(id(side))
    among = set(of)
    return Holding(tensors, tuple(side.pieces if rank in among else () for rank, side in enumerate(sides)))


def _words(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tensor.shape}" + (f" of family {tensor.family}" if tensor.family else "")
