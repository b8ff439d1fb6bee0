"""A rank of a trainer that sends through vLLM's interface; what vLLM's client calls goes through its stdout and stdin.

python -m tests.support.update.vllm_trainer '{"rank": 0, ...}'

Its model is sharded by FSDP2 over all ranks. Each line of stdin is a checkpoint to take weights from and to send; the
answer to it is a line of stdout. In between rank 0 writes calls of the client, and reads their answers.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory

from tests.support.update.vllm import SMALL
from treadle.update import UpdateError, UpdateOptions
from treadle.update.adapters.vllm.vllm_trainer import TreadleTrainerInit, register


def say(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


class Client:
    """vLLM's VLLMWeightSyncClient, by the process that started this one."""

    def _call(self, method: str, *args: Any) -> None:
        say({"call": method, "args": args})
        answer = json.loads(sys.stdin.readline())
        if answer:
            raise RuntimeError(answer)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self._call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._call("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        assert weight_version is not None
        self._call("finish_weight_update")


def load(model: torch.nn.Module, checkpoint: str) -> None:
    """Take a checkpoint's weights into the shards."""
    new = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).state_dict()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            place = parameter.device_mesh, parameter.placements
            parameter.copy_(torch.distributed.tensor.distribute_tensor(new[name], *place))


def main() -> None:
    task = json.loads(sys.argv[1])
    rank, world = task["rank"], task["world"]
    torch.set_num_threads(1)
    store = FileStore(task["store"], world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=300))
    model = AutoModelForCausalLM.from_pretrained(task["model"], dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (world,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    register()
    init = TreadleTrainerInit(
        task["directory"],
        task["ledger"],
        num_trainers=world,
        num_workers=task["workers"],
        port=task["port"],
        options=UpdateOptions(SMALL, rollback="host", deadline_s=120),
        rank=rank,
    )
    trainer = WeightTransferTrainerFactory.trainer_init(init, client=Client(), source=ModuleSource(model))
    say({"up": True})
    for line in iter(sys.stdin.readline, ""):
        load(model, json.loads(line))
        try:
            trainer.send_weights()
            done = trainer.done
            say({"version": done.version, "bytes": done.size_bytes, "pieces": len(done.shares.plan.buckets)})
        except UpdateError as error:
            say({"error": str(error)})
    dist.barrier()
    trainer.shutdown()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
