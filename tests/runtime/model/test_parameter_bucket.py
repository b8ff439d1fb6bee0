"""A gather of parameters: the right elements, copied out in one call."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import Tensor, nn

from counted.kernels import CalledKernels
from tests.support.ranks import check, run_ranks
from treadle.dist.groups import Group, control_wait
from treadle.runtime.model.parameter_bucket import ParameterBucket

WAIT = timedelta(seconds=600)


def gather(rank: int, num_ranks: int, dtype: torch.dtype) -> tuple[list[Tensor], dict[str, int]]:
    """Two parameters in rows of unequal lengths; each rank has written its own elements alone."""
    device = torch.get_default_device()
    params = [nn.Parameter(torch.zeros(4, 3, dtype=dtype)), nn.Parameter(torch.zeros(7, dtype=dtype))]
    first, second = ((param,) for param in params)
    rows = [[(first, 0, 5)], [(first, 5, 12), (second, 0, 2)], [(second, 2, 7)], []][:num_ranks]
    if num_ranks == 2:
        rows[1].append((second, 2, 7))
    for objects, begin, end in rows[rank]:
        objects[0].detach().view(-1)[begin:end] = torch.arange(begin, end).to(dtype) + 1
    group = Group("params", list(range(num_ranks)), rank, WAIT, control_wait(WAIT), device)
    bucket = ParameterBucket(rows, group)
    with CalledKernels() as called:
        bucket.launch()
        bucket.arrive()
    group.close()
    return [param.detach().clone() for param in params], dict(called.kernels)


def test_every_rank_gets_the_elements_of_all() -> None:
    for num_ranks in (2, 4):
        for params, kernels in check(run_ranks(num_ranks, gather, num_ranks, torch.bfloat16)):
            assert params[0].flatten().tolist() == list(range(1, 13))
            assert params[1].tolist() == list(range(1, 8))
            assert kernels["_foreach_copy_"] == 1
