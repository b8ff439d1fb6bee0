"""Sums the gradients of a rank's parameters over micro-batches and reduces them over replicas.

Main gradients stand in flat buckets (`gradient_bucket`), float32 for parameters of two bytes; whole backwards and
weight gradients add into them. Without an optimizer of shards, `.grad` gets the whole sum at the end of a step, in the
parameter's type, and a chunk has one reduction. With one (`divide`), a chunk has several, each rank keeps its shard,
and `.grad` stays None. A parameter that no replica used has no gradient, as in a single process. Where no other rank
holds a parameter, and its type is that of its sum, torch's own `.grad` is the sum.

Tied parameters that the same ranks hold are reduced together, with no chunk, over those ranks. Several objects of one
on a rank are one summand, and all of them get the sum.

A step is all or nothing: `begin` leaves the gradients of earlier steps alone and works on others, `keep` puts the
result into them, and `give_back` restores them, whatever a step that failed has done.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from treadle.dist.groups import Group
from treadle.runtime.model.exchange import RankOwned
from treadle.runtime.model.gradient_bucket import LOW, BucketState, GradientBucket, OuterProduct, main_dtype
from treadle.runtime.model.parameter_bucket import BucketNumber, DividedBuckets
from treadle.runtime.model.tied import Tie

BUCKET_SIZE = 40_000_000
"""Elements of a bucket, at most, unless one parameter has more."""

ReducedByOp: TypeAlias = BucketNumber | int
"""What an op reduces: a chunk or one of its buckets, or a tie by the number of its reduction."""


@dataclass
class _Before:
    """The state before a step: `.grad` where there was one, what buckets had, whether gradients are reduced."""

    grads: dict[nn.Parameter, Tensor]
    buckets: list[tuple[GradientBucket, BucketState]]
    reduced: bool


class _SumHook:
    """Adds each gradient of a parameter to its main gradient. It does not keep the `Gradients` alive."""

    def __init__(self, gradients: Gradients) -> None:
        self.gradients = weakref.ref(gradients)

    def __call__(self, param: Tensor) -> None:
        gradients = self.gradients()
        if gradients is not None:
            gradients._into_sum(param)


class Gradients:
    """The gradients of all chunks of a rank, in the order in which the chunks are reduced over `group`.

    Those of `RankOwned` modules are reduced over `expert_dp_group` instead, and those of ties with the number n over
    `tied_groups[n]`, where other ranks hold them too.
    """

    def __init__(
        self,
        chunks: Mapping[int, nn.Module],
        order: Sequence[int],
        group: Group | None,
        expert_dp_group: Group | None = None,
        ep: int = 1,
        ties: Sequence[Tie] = (),
        tied_groups: Mapping[int, Group] | None = None,
        bucket_size: int = BUCKET_SIZE,
    ) -> None:
        self.ties, self.tied_groups = tuple(ties), dict(tied_groups or {})
        self.group, self.expert_dp_group, self.order = group, expert_dp_group, list(order or chunks)
        self.owned: set[nn.Parameter] = set()
        for module in chunks.values() if ep > 1 else ():
            for part in module.modules():
                self.owned |= set(part.parameters()) if isinstance(part, RankOwned) else set()
        self._before: _Before | None = None
        self._taking = threading.Lock()
        """Held while sums are completed for a reduction, which a lane's thread may do late."""
        self._hooks: dict[nn.Parameter, RemovableHandle] = {}
        weakref.finalize(self, _remove, self._hooks).atexit = False
        self._held: dict[nn.Parameter, Tensor] = {}
        self.tied: set[nn.Parameter] = {p for tie in self.ties for p in tie.params if p.requires_grad}
        self.chunk_of = {p: chunk for chunk in self.order for p in chunks[chunk].parameters() if p.requires_grad}
        """The chunk with which a parameter is reduced: the last of those that share it."""
        self._everything = list(self.chunk_of)
        self.reduced = True
        self.bucket_size = bucket_size
        self._use(dict(self._whole()), dict(self._whole_ties()))

    @property
    def reduces(self) -> bool:
        """True if a step of this pipeline reduces gradients, on this rank or on another of it."""
        return self.group is not None or bool(self.ties)

    def close(self) -> None:
        """Removes the hooks from the parameters."""
        _remove(self._hooks)

    # -- buckets -----------------------------------------------------------------------------------------------------

    def group_of(self, param: nn.Parameter) -> Group | None:
        """Return the ranks that sum the gradients of an untied parameter."""
        return self.expert_dp_group if param in self.owned else self.group

    def _whole(self) -> Iterator[tuple[BucketNumber, list[GradientBucket]]]:
        """Yield the buckets of each chunk whose sums every rank gets."""
        for chunk in self.order:
            alike: dict[tuple[torch.dtype, bool], list[tuple[nn.Parameter, ...]]] = {}
            for param, of in self.chunk_of.items():
                if of == chunk and param not in self.tied and (param.dtype in LOW or self.group_of(param) is not None):
                    alike.setdefault((main_dtype(param), param in self.owned), []).append((param,))
            yield (chunk, 0), list(self._cut(alike.values()))

    def _whole_ties(self) -> Iterator[tuple[int, list[GradientBucket]]]:
        """Yield the buckets of each reduction of ties."""
        for number in dict.fromkeys(tie.number for tie in self.ties):
            alike: dict[torch.dtype, list[tuple[nn.Parameter, ...]]] = {}
            for tie in self.ties:
                params = tuple(param for param in tie.params if param in self.tied)
                if tie.number == number and params:
                    alike.setdefault(main_dtype(params[0]), []).append(params)
            yield number, [GradientBucket.whole(params, self.tied_groups.get(number)) for params in alike.values()]

    def _cut(self, families: Iterable[list[tuple[nn.Parameter, ...]]]) -> Iterator[GradientBucket]:
        for params in families:
            group, bucket, size = self.group_of(params[0][0]), list[tuple[nn.Parameter, ...]](), 0
            for objects in params:
                if bucket and size + objects[0].numel() > self.bucket_size:
                    yield GradientBucket.whole(bucket, group)
                    bucket, size = [], 0
                bucket.append(objects)
                size += objects[0].numel()
            yield GradientBucket.whole(bucket, group)

    def divide(self, buckets: DividedBuckets) -> None:
        """Leave reduced gradients in the shards of these buckets, and not in `.grad`: an optimizer reads them there.

        The buckets have all elements that train.
        """
        assert self._before is None, "no step is under way"
        self._use(dict(buckets.gradients), dict(buckets.tied_gradients))

    def _use(self, chunks: dict[BucketNumber, list[GradientBucket]], ties: dict[int, list[GradientBucket]]) -> None:
        self._of_op = dict[ReducedByOp, list[GradientBucket]]()
        self._of_op |= {number: made for number, made in chunks.items()}  # noqa: C416 - a dict of the wider type of key
        self._of_op |= {tie: made for tie, made in ties.items()}  # noqa: C416
        self.buckets = list(chain.from_iterable(self._of_op.values()))
        self._places: dict[Tensor, list[tuple[GradientBucket, int]]] = {}
        for bucket in self.buckets:
            for number, slot in enumerate(bucket.slots):
                for param in slot.params:
                    self._places.setdefault(param, []).append((bucket, number))
                    if param not in self._hooks:
                        self._listen(param)

    @property
    def is_divided(self) -> bool:
        """True if reduced gradients stay in shards."""
        return any(bucket.is_sharded for bucket in self.buckets)

    def _listen(self, param: nn.Parameter) -> None:
        """Adds each gradient of a parameter to its main gradient, behind all other hooks."""
        hook = param.register_post_accumulate_grad_hook(_SumHook(self))  # type: ignore[no-untyped-call]
        self._hooks[param] = hook

    # -- a step ------------------------------------------------------------------------------------------------------

    def add(self, param: Tensor, grad: Tensor | OuterProduct) -> None:
        """Adds a weight gradient that ran apart from its input gradient."""
        places = self._places.get(param)
        if places is not None:
            for bucket, number in places:
                bucket.add(number, grad)
            return
        grad = grad.made() if isinstance(grad, OuterProduct) else grad
        if param.grad is None:
            param.grad = grad.to(param.dtype)
        else:
            param.grad.add_(grad)

    def _into_sum(self, param: Tensor) -> None:
        """Take over what torch has accumulated. The hook also fires when this weight gradient was deferred."""
        if param.grad is not None and self._before is not None:  # else the caller runs backwards of his own
            self.add(param, param.grad)
            param.grad = None

    def refuse_mixture(self, *, reduce: bool) -> None:
        """Refuses a local step on top of reduced gradients. All ranks call it alike, so none is lost by it."""
        if reduce or not self.reduced or not self.reduces:
            return
        if any(p.grad is not None for p in self._everything) or self.shards():
            raise ValueError(
                "a step in no_sync() after a reduced step would mix reduced and local gradients in .grad; set the "
                "gradients to None first, or reduce only at the last of the steps that are accumulated"
            )

    def begin(self) -> None:
        """Begins a step.

        It adds to the gradients that earlier steps left, and does not reduce those again.
        """
        for param, hook in list(self._hooks.items()):
            if next(reversed(param._post_accumulate_grad_hooks)) != hook.id:  # another was put on since
                hook.remove()
                self._listen(param)
        grads = {param: param.grad for param in self._everything if param.grad is not None}
        shown = {param: self._shown(param) for param in grads}
        self._before = _Before(grads, [(bucket, bucket.begin()) for bucket in self.buckets], self.reduced)
        self._held = {}
        for param, grad in grads.items():
            if param not in self._places:
                param.grad = grad.clone()
                continue
            param.grad = None
            bucket, number = self._places[param][0]
            if bucket.is_sharded:
                continue  # whoever divides gradients has none in `.grad`
            if self.reduced:
                self._held[param] = grad
            elif not bucket.filled[number]:  # the objects of a tied parameter show one sum
                bucket.add(number, _continued(shown[param], grad))

    def _shown(self, param: nn.Parameter) -> Tensor | None:
        """Return the sum that `.grad` was rounded from, of a step that did not reduce."""
        bucket, number = self._places.get(param, [(None, 0)])[0]
        if bucket is None or bucket.is_sharded or bucket.flat is None or self.reduced:
            return None
        return bucket.main(number) if bucket.filled[number] else None

    def gather(self, what: ReducedByOp) -> None:
        """Completes the sums that an op reduces."""
        with self._taking:
            assert self._before is not None, "a step that was given up takes nothing any more"
            for bucket in self._of_op.get(what, ()):
                bucket.complete()

    def reduce(self, what: ReducedByOp) -> None:
        """Launches the reduction of an op."""
        for bucket in self._of_op.get(what, ()):
            bucket.launch()

    def arrive(self, what: ReducedByOp) -> None:
        """Waits for a reduction. The host reads at the end of the step which parameters were used."""
        for bucket in self._of_op.get(what, ()):
            bucket.arrive()

    def finish(self, *, reduce: bool) -> None:
        """Puts sums, and gradients held back before, into `.grad`, in tensors of the step; shards stay where they are.

        The step can still be undone.
        """
        self.reduced = reduce or not self.reduces
        for bucket in self.buckets:
            bucket.finish(reduced=self.reduced)
            if bucket.is_sharded:
                continue
            for number, slot in enumerate(bucket.slots):
                if bucket.filled[number]:
                    self._show(slot.params, bucket.main(number))
            if self.reduced:
                bucket.let_go()
        for param, before in self._held.items():
            if param.grad is None:
                param.grad = before
        self._held = {}

    def _show(self, params: tuple[nn.Parameter, ...], main: Tensor) -> None:
        """Put a sum into `.grad`, for each object of a tied parameter in a tensor of its own."""
        for param in params:
            held = self._held.get(param)
            whole = main if held is None else main + held
            param.grad = whole.to(param.dtype, copy=whole is main and param is not params[0])

    def keep(self) -> None:
        """Ends a step. A `.grad` that was there before is the same tensor, with the new values."""
        assert self._before is not None, "a step has begun"
        for param, before in self._before.grads.items():
            if param.grad is not None and param.grad is not before and param.grad.layout == before.layout:
                before.copy_(param.grad)
                param.grad = before
        self._before = None

    def give_back(self) -> None:
        """Undoes a step that failed: gradients are as they were before. Does nothing where no step has begun."""
        with self._taking:
            before, self._before = self._before, None
            if before is None:
                return
            for param in self._everything:
                param.grad = before.grads.get(param)
            for bucket, kept in before.buckets:
                bucket.restore(kept)
        self.reduced = before.reduced

    def clear(self) -> None:
        """Forget the gradients of all parameters."""
        for param in self._everything:
            param.grad = None
        for bucket in self.buckets:
            bucket.clear()

    # -- what there is -----------------------------------------------------------------------------------------------

    def whole(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield (parameter, its gradient) where gradients are whole."""
        for param in self._everything:
            if param.grad is not None:
                yield param, param.grad

    def shards(self) -> list[Tensor]:
        """Return this rank's shards: over all ranks, each element of the model's gradient once."""
        return [bucket.shard for bucket in self.buckets if bucket.is_sharded and any(bucket.filled)]

    def num_bad(self) -> int:
        """Returns how many parameters, or shards, have a gradient that is not finite."""
        grads = [*(grad for _, grad in self.whole()), *self.shards()]
        grads = [grad.coalesce().values() if grad.is_sparse else grad for grad in grads]
        grads = [grad for grad in grads if grad.numel()]
        if not grads or grads[0].is_meta:
            return 0
        largest = torch.stack([n.double() for n in torch._foreach_norm(grads, float("inf"))])
        return int((~largest.isfinite()).sum())


def _remove(hooks: dict[nn.Parameter, RemovableHandle]) -> None:
    for hook in hooks.values():
        hook.remove()
    hooks.clear()


def _continued(total: Tensor | None, grad: Tensor) -> Tensor:
    """Returns the sum that `.grad` was rounded from, or `.grad` itself if the user changed it since.

    Values are compared, as no version counts what is written to `.grad.data`; on the device, without a wait.
    """
    if total is None or grad.dtype not in LOW:
        return grad
    rounded = total.to(grad.dtype)
    same = (rounded.view(torch.int16) == grad.to_dense().view(torch.int16)).all()
    return torch.where(same, total, grad.float())
