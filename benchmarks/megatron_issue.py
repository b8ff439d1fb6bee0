"""The order in which Megatron-core's hosts issue cells and messages: `python benchmarks/megatron_issue.py PP VPP M`.

Prints a line a rank: `3F1` is a cell (stage 3, forward, micro-batch 1), `>2` a send to rank 2, `<2` a receive from it,
`+<2` one in the same batch. Megatron's own schedule functions run, a rank after the other, on torch's fake backend,
which moves nothing; so no numbers mean anything, and their order depends on none. `overlap_p2p_comm` is on where ranks
have several chunks, and messages are batched where they have one, as Megatron's defaults are. Tried with 0.16.1.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from treadle.ir import Action, Kind, Placement, Schedule
from treadle.ir.turn import CELL, Turn, parse_turn


def schedule_of(lines: Sequence[str], vpp: int) -> Schedule:
    """Return what is printed as a schedule with an order of issue."""
    rows: list[tuple[Action, ...]] = []
    issue: list[tuple[Turn, ...]] = []
    pp = len(lines)
    for line in lines:
        turns = [parse_turn(word) for word in line.split()]
        cells = [word for word, turn in zip(line.split(), turns, strict=True) if turn is None]
        parts = [(word, kind, word.split(kind)) for kind in "FB" for word in cells if kind in word]
        place = {word: Action(Kind[kind], int(mb), int(stage) // pp) for word, kind, (stage, mb) in parts}
        rows.append(tuple(place[word] for word in cells))
        issue.append(tuple(turn if turn is not None else CELL for turn in turns))
    num_mb = 1 + max(action.mb for row in rows for action in row)
    return Schedule("megatron", Placement.loop(pp, vpp), num_mb, tuple(rows), issue=tuple(issue))


def record(rank: int, pp: int, vpp: int, num_mb: int) -> list[str]:
    """Run a step as one rank; return what it issued."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch import nn
    from torch._C._distributed_c10d import HashStore
    from torch.overrides import TorchFunctionMode
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the fake backend

    class OnCpu(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = "cpu"
            return func(*args, **kwargs)

    width, length, samples = 4, 2, 1

    class Chunk(nn.Module):
        def __init__(self, stage: int, vp_stage: int) -> None:
            super().__init__()
            self.stage, self.vp_stage, self.config, self.net = stage, vp_stage, config, nn.Linear(width, width)
            self.model_type, self.given = ModelType.encoder_or_decoder, None

        def set_input_tensor(self, given: Any) -> None:
            self.given = given[0] if isinstance(given, list) else given

        def forward(self, x: Any) -> Any:
            return self.net(x if self.stage == 0 else self.given)

    issued: list[str] = []
    counts: dict[int, int] = {}
    made: dict[int, str] = {}
    theirs = SimpleNamespace(
        forward=schedules.forward_step, backward=schedules.backward_step, isend=dist.isend, irecv=dist.irecv
    )

    def forward(step: Any, batches: Any, model: Any, *args: Any, **given: Any) -> Any:
        result = theirs.forward(step, batches, model, *args, **given)
        mb = counts[model.stage] = counts.get(model.stage, -1) + 1
        output = result[0][0] if isinstance(result[0], list) else result[0]
        made[id(output)] = f"{model.stage}B{mb}"
        issued.append(f"{model.stage}F{mb}")
        return result

    def backward(tensor: Any, output: Any, *args: Any, **given: Any) -> Any:
        word = made.pop(id(output[0] if isinstance(output, list) else output))
        result = theirs.backward(tensor, output, *args, **given)
        issued.append(word)
        return result

    def isend(tensor: Any, dst: int, *args: Any, **given: Any) -> Any:
        issued.append(f">{dst}")
        return theirs.isend(tensor, dst, *args, **given)

    def irecv(tensor: Any, src: int, *args: Any, **given: Any) -> Any:
        issued.append(f"<{src}")
        return theirs.irecv(tensor, src, *args, **given)

    def batch_isend_irecv(ops: Any) -> list[Any]:
        words = [(">" if op.op is theirs.isend else "<") + str(op.peer) for op in ops]
        issued.extend([*words[:1], *(f"+{word}" for word in words[1:])])
        return []

    dist.init_process_group("fake", rank=rank, world_size=pp, store=HashStore())
    virtual = vpp if vpp > 1 else None
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=virtual, create_gloo_process_groups=False
    )
    config = TransformerConfig(
        num_layers=pp * vpp,
        hidden_size=width,
        num_attention_heads=2,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=virtual,
        pipeline_dtype=torch.float32,
        params_dtype=torch.float32,
        overlap_p2p_comm=vpp > 1,
        batch_p2p_comm=vpp == 1,
        deallocate_pipeline_outputs=False,
    )
    model = [Chunk(chunk * pp + rank, chunk) for chunk in range(vpp)]
    batches = [iter([torch.randn(length, samples, width) for _ in range(num_mb)]) for _ in model]
    cuda = patch.multiple(torch.cuda, current_device=lambda: torch.device("cpu"), synchronize=lambda *_: None)
    cells = patch.multiple(schedules, forward_step=forward, backward_step=backward)
    batched = patch.object(dist, "batch_isend_irecv", batch_isend_irecv)
    single = patch.multiple(dist, isend=isend, irecv=irecv) if vpp > 1 else nullcontext()
    with cuda, cells, batched, single, OnCpu():
        schedules.get_forward_backward_func()(
            forward_step_func=lambda batch, chunk: (chunk(next(batch)), lambda out: (out.square().mean(), {})),
            data_iterator=batches if vpp > 1 else batches[0],
            model=model if vpp > 1 else model[0],
            num_microbatches=num_mb,
            seq_length=length,
            micro_batch_size=samples,
            forward_only=False,
        )
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return issued


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    size = [int(word) for word in sys.argv[1:4]]
    for each in range(size[0]):
        print(" ".join(record(each, *size)), flush=True)
