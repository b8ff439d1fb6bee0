"""What DeepEP's documentation says its `Buffer` does, in plain torch over the communicator it is given.

Not DeepEP, and no measure of it: it stands in for the library where there is no GPU, so that what Treadle makes of its
results, its handles and its gradients is run by real ranks. Each call puts what everyone has on the table.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tests.support.doubles import double_of


class Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


@double_of("deep_ep.Buffer", own=("_sum", "_pick", "_all"))
class Buffer:
    def __init__(
        self,
        group: None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        *,
        explicitly_destroy: bool = False,
        comm: Any,
    ) -> None:
        """DeepEP v1.2.1 deep_ep/buffer.py:32-125: meets the others over `comm`."""
        assert group is None
        self._explicitly_destroy, self.is_destroyed = explicitly_destroy, False
        assert num_nvl_bytes > 0
        self.rank, self.size, self._comm = comm.Get_rank(), comm.Get_size(), comm
        assert comm.allgather(self.rank) == list(range(self.size))

    def destroy(self) -> None:
        """DeepEP v1.2.1 deep_ep/buffer.py:127-137, csrc/deep_ep.cpp:143-168: a barrier of the group, then the end."""
        assert self._explicitly_destroy, "`explicitly_destroy` flag must be set"
        assert not self.is_destroyed
        self._comm.allgather(self.rank)
        self.is_destroyed = True

    def __del__(self) -> None:
        """DeepEP v1.2.1 csrc/deep_ep.cpp:84-92: destroys unless that was to be explicit; else says that it was not."""
        if not self._explicitly_destroy:
            self._comm.allgather(self.rank)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """DeepEP v1.2.1 deep_ep/buffer.py:220-245: a tuned configuration for this number of ranks."""
        assert num_ranks in (2, 4, 8, 16, 24, 32, 64, 128, 144, 160), f"Unsupported number of EP ranks: {num_ranks}"
        return Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]:
        """DeepEP v1.2.1 deep_ep/buffer.py:276-302: how many tokens go to each rank and expert."""
        assert topk_idx.dtype is torch.int64
        per_rank = num_experts // self.size
        in_rank = torch.stack([(topk_idx // per_rank == rank).any(1) for rank in range(self.size)], 1)
        per_expert = torch.bincount(topk_idx.flatten(), minlength=num_experts)
        return in_rank.sum(0).int(), None, per_expert.int(), in_rank, None

    def dispatch(
        self,
        x: Tensor,
        handle: Any = None,
        *,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
    ) -> tuple[Any, ...]:
        """DeepEP v1.2.1 deep_ep/buffer.py:305-384: a token goes once to each rank that has an expert of it."""
        assert x.dtype is torch.bfloat16
        if handle is not None:
            assert topk_idx is None
            return self._pick(x, handle[0]), None, None, None, None, None
        assert num_tokens_per_rank is not None
        assert num_tokens_per_expert is not None
        assert is_token_in_rank is not None
        assert topk_idx is not None
        assert topk_weights is not None
        assert topk_weights.dtype is torch.float32
        sources = [t[:, self.rank].nonzero().flatten() for t in self._all(is_token_in_rank)]
        came, index, weights = (self._pick(t, sources) for t in (x, topk_idx, topk_weights))
        assert num_tokens_per_rank[self.rank] == len(sources[self.rank])
        own = len(num_tokens_per_expert) // self.size
        index = index - self.rank * own
        away = (index < 0) | (index >= own)
        index, weights = index.masked_fill(away, -1), weights.masked_fill(away, 0)
        counts = [int((index == expert).sum()) for expert in range(own)]
        return came, index, weights, counts, (sources, len(x)), None

    def combine(self, x: Tensor, handle: Any, topk_weights: Tensor | None = None) -> tuple[Tensor, Tensor | None, None]:
        """DeepEP v1.2.1 deep_ep/buffer.py:387-432: adds up what the ranks that got a token made of it."""
        assert x.dtype is torch.bfloat16
        sources, num_tokens = handle
        handles = self._comm.allgather([source.tolist() for source in sources])
        summed = self._sum(x.float(), handles, num_tokens).to(torch.bfloat16)
        return summed, None if topk_weights is None else self._sum(topk_weights, handles, num_tokens), None

    def _sum(self, mine: Tensor, handles: list[list[list[int]]], num_tokens: int) -> Tensor:
        """`handles[s][r]`: which tokens of rank r rank s has got, in the order of its rows."""
        total = mine.new_zeros(num_tokens, mine.shape[-1])
        for rows, theirs in zip(self._all(mine), handles, strict=True):
            first, tokens = sum(map(len, theirs[: self.rank])), theirs[self.rank]
            total.index_add_(0, torch.tensor(tokens, dtype=torch.int64), rows[first : first + len(tokens)])
        return total

    def _pick(self, mine: Tensor, sources: list[Tensor]) -> Tensor:
        return torch.cat([rows[source] for rows, source in zip(self._all(mine), sources, strict=True)])

    def _all(self, tensor: Tensor) -> list[Tensor]:
        """Everyone's."""
        raw = bytearray(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        told = self._comm.allgather((list(tensor.shape), bytes(raw)))
        return [
            torch.frombuffer(bytearray(data), dtype=tensor.dtype).reshape(shape).to(tensor.device)
            if data
            else tensor.new_empty(shape)
            for shape, data in told
        ]


def install() -> None:
    """Makes `import deep_ep` find it, in this process."""
    module = ModuleType("deep_ep")
    module.Buffer = Buffer  # type: ignore[attr-defined]
    sys.modules["deep_ep"] = module
