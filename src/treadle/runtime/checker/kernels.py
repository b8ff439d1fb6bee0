"""Notes every kernel that torch runs: which storages it reads and writes, and whether the host waits for it.

A dispatch mode sees kernels. A function mode sees what a CPU answers without one, as `tolist`, and whether a new tensor
is the host's: one that is made without a device, or in HOST_MEMORY, is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from treadle.dist.streams import HOST_MEMORY
from treadle.runtime.checker.aside import not_noted
from treadle.runtime.checker.log import HOST
from treadle.runtime.checker.stream_recorder import StreamRecorder

_READS_BACK = frozenset(
    [
        "_local_scalar_dense",
        "bincount",
        "nonzero",
        "masked_select",
        "_unique",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "equal",
        "is_nonzero",
    ]
)
"""Kernels that bring a size or a value to the host, which waits for it."""

_NO_KERNEL = frozenset(["set_", "detach_", "as_strided_", "resize_", "is_same_size", "record_stream", "_version"])
_EMPTY = frozenset(["empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"])
_COPIES = frozenset(("copy_", "_to_copy"))
_NOT_VIEWS = frozenset(("reshape", "contiguous", "_reshape_alias_copy"))

_MAKERS: frozenset[Any] = frozenset(
    getattr(torch, name)
    for name in (
        *("arange", "as_tensor", "empty", "eye", "frombuffer", "from_numpy", "full", "linspace", "ones", "rand"),
        *("randint", "randn", "randperm", "tensor", "zeros"),
    )
)
_TO_HOST: dict[Any, str] = {
    Tensor.tolist: "tolist",
    Tensor.cpu: "cpu",
    Tensor.numpy: "numpy",
    Tensor.__array__: "numpy",
}


class _Kind(NamedTuple):
    """What the schema of a kernel says."""

    name: str
    is_view: bool
    names: tuple[str, ...]
    written: frozenset[str]


@functools.cache
def _kind(func: Any) -> _Kind:
    schema = func._schema
    name = schema.name.partition("::")[2]
    written = frozenset(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    aliases = any(result.alias_info is not None for result in schema.returns)
    is_view = name in _NO_KERNEL or name.startswith("sym_") or (aliases and not written and name not in _NOT_VIEWS)
    return _Kind(name, is_view, tuple(a.name for a in schema.arguments), written)


def _tensors(value: Any) -> Sequence[Tensor]:
    """Returns the tensors of an argument; lists are one deep in aten."""
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, (list, tuple)):
        return [part for part in value if isinstance(part, Tensor)]
    return ()


class Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes kernels."""

    def __init__(self, recorder: StreamRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder
        self.makes_pageable = False
        """Is the tensor that is made now the host's."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind, recorder = _kind(func), self.recorder
        read, written = self._operands(kind, args, kwargs)
        given = {storage for storage, _ in (*read, *written)}
        on_host = bool(given) and all(recorder.is_pageable(s) or recorder.is_pinned(s) for s in given)
        pageable = self.makes_pageable or on_host
        made = func(*args, **kwargs)
        home = recorder.current().number
        for tensor in _tensors(made):
            storage = recorder.storage_of(tensor, home=home, pageable=pageable)
            if storage is not None and storage not in given:
                written.append((storage, tensor))
        if not kind.is_view and kind.name not in _EMPTY:
            self._note(kind, args, kwargs, read, written)
        return made

    def _operands(
        self, kind: _Kind, args: Any, kwargs: Any
    ) -> tuple[list[tuple[int, Tensor]], list[tuple[int, Tensor]]]:
        read: list[tuple[int, Tensor]] = []
        written: list[tuple[int, Tensor]] = []
        for name, value in (*zip(kind.names, args, strict=False), *kwargs.items()):
            for tensor in _tensors(value):
                # One number that no kernel has made is a scalar of Python's, which goes with the launch.
                storage = self.recorder.storage_of(tensor, pageable=self.makes_pageable or tensor.dim() == 0)
                if storage is not None:
                    (written if name in kind.written else read).append((storage, tensor))
        return read, written

    def _note(self, kind: _Kind, args: Any, kwargs: Any, read: list[Any], written: list[Any]) -> None:
        recorder = self.recorder
        pageable = [tensor for storage, tensor in (*read, *written) if recorder.is_pageable(storage)]
        pinned = [tensor for storage, tensor in (*read, *written) if recorder.is_pinned(storage)]
        reads = [storage for storage, _ in read if not recorder.is_pageable(storage)]
        writes = [storage for storage, _ in written if not recorder.is_pageable(storage)]
        if not reads and not writes:
            return  # the host's own
        if len(pageable) + len(pinned) == len(read) + len(written):
            recorder.use(HOST, reads, writes, kind.name)
            return
        if kind.name in _COPIES:
            non_blocking = kwargs.get("non_blocking") or (kind.name == "copy_" and len(args) > 2 and args[2])
            if pageable:
                recorder.host_waits("a copy of memory that is not pinned")
            elif pinned and not non_blocking:
                recorder.host_waits("a copy without non_blocking")
        else:
            for tensor in pageable:
                if tensor.dim():
                    recorder.misplace(kind.name, tensor)
        node = torch._C._current_autograd_node()
        recorder.use(
            recorder.current().number, reads, writes, kind.name + (f" of {node.name()}" if node is not None else "")
        )
        if kind.name in _READS_BACK or (kind.name in ("index", "index_put_") and _has_mask(args)):
            recorder.host_waits(kind.name)
        if node is not None:
            self._check_stream(node)

    def _check_stream(self, node: Any) -> None:
        """Autograd runs a node on the stream of its forward, whatever stream is current in backward."""
        forward, backward = node.metadata.get("stream"), self.recorder.current()
        if forward is not None and forward is not backward:
            key = node.name(), forward.name, backward.name, self.recorder.where()
            self.recorder.stray[key] = self.recorder.stray.get(key, 0) + 1


def _has_mask(args: Any) -> bool:
    """Returns whether a tensor is indexed by a mask, which is counted on the host; one value is filled in without."""
    indices = _tensors(args[1])
    by_mask = any(tensor.dtype in (torch.bool, torch.uint8) for tensor in indices)
    return by_mask and not (len(args) > 2 and isinstance(args[2], Tensor) and args[2].numel() == 1)


class Functions(TorchFunctionMode):
    """Notes what a CPU does without a kernel, which tensors are the host's, and on which stream a graph was made."""

    def __init__(self, recorder: StreamRecorder, kernels: Kernels) -> None:
        super().__init__()
        self.recorder, self.kernels = recorder, kernels

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, recorder = kwargs or {}, self.recorder
        if func in _TO_HOST:
            return self._to_host(func, args, kwargs)
        if func is Tensor.to and any(map(_is_host, (*args[1:], kwargs.get("device")))):
            return self._to_host(Tensor.cpu, args[:1], {}).to(*(a for a in args[1:] if not _is_host(a)))
        if func in _MAKERS and not (args and isinstance(args[0], Tensor)):
            return self._make(func, args, kwargs)
        if func is Tensor.to and recorder.is_pageable(recorder.storage_of(args[0])) and _names_device(args, kwargs):
            recorder.host_waits("a copy of memory that is not pinned")
            moved: Tensor = self._outside(lambda: func(args[0], *args[1:], **kwargs).clone())
            storage = recorder.storage_of(moved, home=recorder.current().number)
            recorder.use(recorder.current().number, [], [storage] if storage is not None else [], "to")
            return moved
        made = func(*args, **kwargs)
        for tensor in _tensors(made):
            if tensor.grad_fn is not None:
                _tag(tensor.grad_fn, recorder.current())
        return made

    def _make(self, func: Any, args: Any, kwargs: Any) -> Any:
        if kwargs.get("device") is not None and not _is_host(kwargs["device"]):
            if func in (torch.tensor, torch.as_tensor):
                self.recorder.host_waits(f"torch.{func.__name__} of numbers of the host")
            return func(*args, **kwargs)
        before, self.kernels.makes_pageable = self.kernels.makes_pageable, True
        try:
            made = func(*args, **kwargs)
            self.recorder.storage_of(made, pageable=True)
            return made
        finally:
            self.kernels.makes_pageable = before

    def _to_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        recorder, tensor = self.recorder, args[0]
        storage = recorder.storage_of(tensor)
        if storage is None or recorder.is_pageable(storage):
            return func(*args, **kwargs)
        if recorder.is_pinned(storage):
            recorder.use(HOST, [storage], [], _TO_HOST[func])
            return func(*args, **kwargs)
        recorder.use(recorder.current().number, [storage], [], _TO_HOST[func])
        recorder.host_waits(_TO_HOST[func])
        if func is not Tensor.cpu:
            return func(*args, **kwargs)
        there: Tensor = self._outside(lambda: tensor.detach().clone())
        recorder.storage_of(there, pageable=True)
        return there

    @staticmethod
    def _outside(run: Callable[[], Any]) -> Any:
        with not_noted():
            return run()


def _is_host(device: Any) -> bool:
    """Returns whether a device is the host's memory, by the name that control messages use."""
    return isinstance(device, torch.device) and device == HOST_MEMORY


def _names_device(args: Any, kwargs: Any) -> bool:
    return "device" in kwargs or any(isinstance(value, (torch.device, str)) for value in args[1:])


def _tag(node: Any, stream: Any) -> None:
    """Notes the stream on the nodes of a graph that were made just now."""
    todo = [node]
    while todo:
        node = todo.pop()
        if node is None or "stream" in node.metadata or hasattr(node, "variable"):
            continue
        node.metadata["stream"] = stream
        todo += [before for before, _ in node.next_functions]
