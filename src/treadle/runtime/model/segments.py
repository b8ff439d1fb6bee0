"""Segments: the parts of a layer that run when the Program says, each with an autograd cut of its own.

    def segments(self):
        return [
            compute("attn", self.attn, reads="x", writes="h tokens gates plan"),
            exchange("dispatch", self.dispatch, reads="tokens plan", writes="received"),
            compute("mlp", self.experts, reads="received plan", writes="made"),
            exchange("combine", self.combine, reads="made h gates plan", writes="x"),
        ]

What segments hand each other is named, residuals too; nothing crosses by a module's state. A value may be a tensor,
with or without gradient, or anything else. `x` goes from layer to layer. The gradient of a value is the sum of what
its readers say, so a segment's backward runs as soon as all of them have.

A name that no segment of the layer writes is a side value, which `Pipeline.step` is given for each micro-batch:
`reads="x positions"` with `pipe.step(inputs, targets, side={"positions": positions})`. It has no gradient.

What computes may talk to a group of the layer's own while it does, as tensor parallelism wants to: with parameters that
are plain tensors, the parts of this rank, and a Pipeline on the mesh without tp. All ranks of such a group come to
their segments in one order. Of their losses only those in one's own pipeline are told by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from treadle.dist.streams import keep
from treadle.ir.ops import COMPUTE_PARTS, LAYER_PARTS
from treadle.runtime.model.edge import edge_of

COMPUTE = tuple(map(str, COMPUTE_PARTS))
ORDER = tuple(map(str, LAYER_PARTS))
EXCHANGE = tuple(name for name in ORDER if name not in COMPUTE)
"""The segments a layer may have, in order. Without `counts` and `host` a dispatch is padded."""


@dataclass(frozen=True)
class Segment:
    """One part of a layer. `run` takes the values it reads, and returns the one it writes or a tuple of them.

    Example:
        >>> class Block(nn.Linear):
        ...     def segments(self):
        ...         return [
        ...             compute("attn", self.forward, reads="x", writes="h"),
        ...             compute("mlp", torch.tanh, reads="h", writes="x"),
        ...         ]
        >>> reference_forward(Block(2, 2), torch.zeros(1, 2))["x"].shape
        torch.Size([1, 2])

    """

    name: str
    run: Callable[..., Any]
    reads: tuple[str, ...]
    writes: tuple[str, ...]


def compute(name: str, run: Callable[..., Any], *, reads: str, writes: str) -> Segment:
    """Make a segment that computes.

    Args:
        name: attn or mlp.
        run: takes the values it reads, returns the one it writes or a tuple of them.
        reads: names of values, apart by spaces; `x` is the layer's input.
        writes: names of values; the last segment writes `x`, which the next layer reads.

    Returns:
        The Segment.

    Raises:
        ValueError: another name.

    Example:
        >>> compute("attn", torch.tanh, reads="x", writes="h").writes
        ('h',)

    """
    if name not in COMPUTE:
        raise ValueError(f"a compute segment is one of {', '.join(COMPUTE)}, got {name!r}")
    return Segment(name, run, tuple(reads.split()), tuple(writes.split()))


def exchange(name: str, run: Callable[..., Any], *, reads: str, writes: str) -> Segment:
    """Make a segment that the ranks of an expert group run together.

    Args:
        name: counts, host (waits for the counts on the host), dispatch or combine.
        run: takes the values it reads, returns the one it writes or a tuple of them.
        reads: names of values, apart by spaces.
        writes: names of values.

    Returns:
        The Segment.

    Raises:
        ValueError: another name.

    Example:
        >>> exchange("dispatch", torch.clone, reads="tokens plan", writes="received").reads
        ('tokens', 'plan')

    """
    if name not in EXCHANGE:
        raise ValueError(f"an exchange segment is one of {', '.join(EXCHANGE)}, got {name!r}")
    return Segment(name, run, tuple(reads.split()), tuple(writes.split()))


class Segmented(Protocol):
    """A layer that names its segments: `nn.Module`s with a method `segments`.

    The contract: a pipeline's forward of the layer equals `reference_forward`, and so do its gradients. In order:

        attn       reads x: mixes tokens, routes them, and writes the rows that leave and the residual h
        counts     tells the expert group how many rows go where            (left out where a dispatch is padded)
        host       waits for those counts on the host                       (left out with counts)
        dispatch   sends the rows to the ranks of their experts
        mlp        runs this rank's experts on the rows that came
        combine    sends the results back and adds them to h: writes x, which the next layer reads

    The residual is added in combine, not in mlp: the rows that mlp sees belong to tokens of other ranks, and h stays on
    the rank of its token. So h is among the values that combine reads. Without experts a layer is attn and mlp alone.
    """

    def segments(self) -> Sequence[Segment]:
        """Return the layer's parts, in order."""
        ...


def reference_forward(layer: Segmented, x: Any, **side: Any) -> dict[str, Any]:
    """Run a layer's segments one after the other with plain autograd; return the values by name, `x` the output.

    The contract of `Segmented` as code: without cuts, lanes or a pipeline. Exchanges need all ranks of their group.
    """
    values = {**side, "x": x}
    for segment in layer.segments():
        made = run_segment(segment, [values[name] for name in segment.reads])
        values.update(zip(segment.writes, made, strict=True))
    return values


def is_segmented(module: nn.Module) -> TypeGuard[Segmented]:
    """Does a module name its segments."""
    return callable(getattr(module, "segments", None))


class Value:
    """What segments hand each other: the thing, whether a gradient comes back for it, and its sum so far."""

    __slots__ = ("_version", "grad", "needs_grad", "thing")

    def __init__(self, thing: Any, needs_grad: bool) -> None:
        self.thing, self.needs_grad = thing, needs_grad
        self.grad: Tensor | None = None
        self._version = thing._version if isinstance(thing, Tensor) else 0

    @classmethod
    def of(cls, thing: Any) -> Value:
        """A tensor's place in the graph is left behind: the cut."""
        if isinstance(thing, Tensor):
            return cls(thing.detach(), thing.requires_grad)
        return cls(thing, False)

    def read(self) -> Any:
        """What a reader gets."""
        return self.read_as(self.thing)

    def read_as(self, thing: Any) -> Any:
        """The same of a thing that was kept elsewhere. The reader's stream may be another than the maker's."""
        for tensor in tensors_in(thing):
            keep(tensor)
        if not self.needs_grad:
            return thing
        return _Read.apply(thing, self, _START)  # type: ignore[no-untyped-call]

    @property
    def is_void(self) -> bool:
        """Was the thing written to since it was made."""
        return isinstance(self.thing, Tensor) and self.thing._version != self._version

    def add(self, grad: Tensor) -> None:
        """Add one reader's gradient."""
        if self.grad is None:
            self.grad = grad
            return
        keep(self.grad)  # another reader's stream may have made it, and the sum drops the last reference
        self.grad = self.grad + grad


def tensors_in(thing: Any) -> Iterator[Tensor]:
    """A tensor, or those that a dataclass or a tuple holds, as the routing of a micro-batch does."""
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, tuple):
        for part in thing:
            yield from tensors_in(part)
    elif is_dataclass(thing) and not isinstance(thing, type):
        for field in fields(thing):
            yield from tensors_in(getattr(thing, field.name))


def rebuilt(thing: Any, kind: type | tuple[type, ...], change: Callable[[Any], Any]) -> Any:
    """The thing with everything of a kind in it changed, where `tensors_in` looks; itself if there is nothing."""
    if isinstance(thing, kind):
        return change(thing)
    if isinstance(thing, tuple):
        parts = [rebuilt(part, kind, change) for part in thing]
        if all(new is old for new, old in zip(parts, thing, strict=True)):
            return thing
        return type(thing)(*parts) if hasattr(thing, "_fields") else tuple(parts)
    if is_dataclass(thing) and not isinstance(thing, type):
        old = {field.name: getattr(thing, field.name) for field in fields(thing)}
        new = {name: rebuilt(part, kind, change) for name, part in old.items()}
        if any(new[name] is not old[name] for name in old):
            thing = copy(thing)
            for name, part in new.items():
                object.__setattr__(thing, name, part)
    return thing


_START = torch.empty(0, requires_grad=True)
"""What makes autograd keep a graph of what was read; it never gets a gradient."""


class _Read(torch.autograd.Function):
    """Where a segment's graph begins. Unlike a leaf it does not keep its tensor alive: whoever needs it saves it."""

    @staticmethod
    def forward(ctx: Any, thing: Tensor, value: Value, start: Tensor) -> Tensor:
        ctx.value = value
        return thing.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.value.add(grad)
        return None, None, None


def run_segment(segment: Segment, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Calls a segment; returns what it writes, a thing for each name."""
    made = segment.run(*inputs)
    things = made if isinstance(made, tuple) else (made,)
    if len(things) != len(segment.writes):
        raise ValueError(
            f"segment {segment.name} writes {', '.join(segment.writes)}, but returned {len(things)} values"
        )
    return things


def refuse_void(segment: Segment, read: Sequence[Value]) -> None:
    """Refuses values that were written to since a segment made them: another micro-batch may have come between."""
    for name, value in zip(segment.reads, read, strict=True):
        if value.is_void:
            raise ValueError(
                f"the value {name!r} was written to before segment {segment.name} read it; a segment writes values "
                "that stay as they are: return a tensor of its own for each micro-batch, buffer.clone() for a buffer "
                "that forwards reuse"
            )


@dataclass
class Cut:
    """One segment of one micro-batch: what its backward starts from. Gradients go to the values it read."""

    outputs: list[tuple[Value, GradientEdge]]

    @classmethod
    def forward(cls, segment: Segment, values: dict[str, Value]) -> Cut:
        """Runs a segment on the values it reads, and puts what it writes among them."""
        read = [values[name] for name in segment.reads]
        refuse_void(segment, read)
        things = run_segment(segment, [value.read() for value in read])
        outputs = []
        for name, thing in zip(segment.writes, things, strict=True):
            values[name] = Value.of(thing)
            if values[name].needs_grad:
                outputs.append((values[name], edge_of(thing)))
        return cls(outputs)

    def backward(self) -> None:
        """From the gradients of what it wrote to those of what it read."""
        known = [(edge, value.grad) for value, edge in self.outputs if value.grad is not None]
        for _, grad in known:
            keep(grad)  # made on the stream of a reader, and let go of below, before this stream has read it
        if known:
            torch.autograd.backward([edge for edge, _ in known], [grad for _, grad in known])
        for value, _ in self.outputs:
            value.grad = None
        self.outputs = []


def leaves_of(cut: Cut) -> list[Tensor]:
    """The tensors whose `.grad` a cut's backward adds to."""
    found: list[Tensor] = []
    seen: set[Any] = set()
    ahead: list[Any] = [edge.node for _, edge in cut.outputs]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.append(variable)
        ahead += [following for following, _ in node.next_functions]
    return found


def drop(values: dict[str, Value], names: Sequence[str]) -> None:
    """Forgets values that nobody reads any more. Their gradients may still come."""
    for name in names:
        values.pop(name).thing = None


@dataclass(frozen=True)
class Plan:
    """A layer's segments by name, which values nobody reads after each of them, and who reads which side value."""

    segments: dict[str, Segment]
    dead: dict[str, tuple[str, ...]]
    module: nn.Module
    side: dict[str, str]
    replaced: dict[str, Any]
    """Methods of the layer that are its own, not its class's, when its segments were asked for."""

    def refuse_replaced(self, where: str) -> None:
        """Raises ValueError if a method was replaced since: segments are the methods that there were."""
        now = _replaced(self.module)
        if now != self.replaced:
            name = next(name for name in {**now, **self.replaced} if now.get(name) is not self.replaced.get(name))
            raise ValueError(
                f"{where} ({type(self.module).__name__}) got another {name} after the Pipeline was made, which nothing "
                "calls: its segments are the methods that it had; close() this Pipeline, and make a new one after the "
                "change"
            )

    @classmethod
    def of(cls, layer: Segmented, where: str) -> Plan:
        """Checks a layer's segments: known, in order, and each value written before it is read."""
        listed = list(layer.segments())
        names = [segment.name for segment in listed]
        if names != [name for name in ORDER if name in names] or not {"attn", "mlp"} <= set(names):
            raise ValueError(
                f"{where} has the segments {', '.join(names)}; they are, in this order: {', '.join(ORDER)}"
            )
        if ("dispatch" in names) != ("combine" in names) or ("counts" in names) != ("host" in names):
            raise ValueError(f"{where}: dispatch goes with combine, and counts with host; got {', '.join(names)}")
        written, side = {"x"}, dict[str, str]()
        everything = {name for segment in listed for name in segment.writes}
        for segment in listed:
            for name in segment.reads:
                if name not in written and name in everything:
                    raise ValueError(f"{where}: segment {segment.name} reads {name!r}, which nothing before it writes")
                if name not in written:
                    side.setdefault(name, f"{where}: segment {segment.name}")
            written |= set(segment.writes)
        if "x" not in listed[-1].writes:
            raise ValueError(f"{where}: the last segment writes x, what the next layer reads; got {listed[-1].writes}")
        dead = {
            segment.name: tuple(
                n for n in {*segment.reads, *segment.writes} if n not in side and _is_dead(n, listed[at + 1 :])
            )
            for at, segment in enumerate(listed)
        }
        assert isinstance(layer, nn.Module)
        return cls({segment.name: segment for segment in listed}, dead, layer, side, _replaced(layer))


def _replaced(layer: nn.Module) -> dict[str, Any]:
    own = type(layer)
    return {name: made for name, made in vars(layer).items() if callable(made) and callable(getattr(own, name, None))}


def _is_dead(name: str, later: list[Segment]) -> bool:
    """Will nobody read this value any more, as far as the layer goes. `x` is the next layer's, unless written again."""
    for segment in later:
        if name in segment.reads:
            return False
        if name in segment.writes:
            return True
    return name != "x"
