"""The process of a vLLM engine, for tests of weight updates: orders and answers are lines of JSON over a socket.

python -m tests.support.update.vllm_engine FD '{"model": ..., "kind": "offline" | "online" | "fresh", ...}'

What the engine generates with the weights it started with is told before they are closed for ever. `fresh` loads
checkpoints one after the other, each in an engine of its own, and says what they generate.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from treadle.update import ClosedError
from treadle.update.adapters.vllm import Canary, Offline, Online, Replica

First = tuple[list[int], int]

COMMON = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "max_model_len": 4096,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 32 << 20,
    "block_size": 32,  # a prompt is found again in the prefix cache by whole blocks
}


class Server:
    """Takes orders to the end, each in a thread of its own."""

    def __init__(
        self, fd: int, replica: Replica, generate: Callable[[list[int], int], list[int]], fresh: list[int]
    ) -> None:
        self.replica, self.generate, self.fresh = replica, generate, fresh
        self.stream = socket.socket(fileno=fd)
        self.lock = threading.Lock()

    def run(self) -> None:
        self.say({"up": True, "tokens": self.fresh})
        for line in self.stream.makefile("r"):
            order = json.loads(line)
            if order["do"] == "stop":
                return
            threading.Thread(target=self.obey, args=(order,), daemon=True).start()

    def say(self, answer: dict[str, Any]) -> None:
        with self.lock:
            self.stream.sendall(json.dumps(answer).encode() + b"\n")

    def obey(self, order: dict[str, Any]) -> None:
        answer: dict[str, Any] = {"id": order["id"]}
        try:
            if order["do"] == "generate":
                with self.replica.serving(order["wait_s"]) as version:
                    answer |= {"version": version, "tokens": self.generate(order["prompt"], order["num"])}
            else:
                answer |= {"answers": self.replica.engine.rpc(order["do"], *order["args"])}
        except ClosedError as closed:
            answer |= {"closed": str(closed)}
        except Exception as error:
            answer |= {"error": f"{type(error).__name__}: {error}"}
        self.say(answer)


def offline(fd: int, made: dict[str, Any], first: First, directory: Path, canary: Canary | None) -> None:
    from vllm import LLM

    extension = "tests.support.update.vllm_trouble.TroubledExtension"
    engine = Offline(LLM(worker_extension_cls=extension, **COMMON, **made))
    tokens = engine.greedy(*first)
    with Replica(engine, directory, canary=canary) as replica:
        Server(fd, replica, engine.greedy, tokens).run()


def online(fd: int, made: dict[str, Any], first: First, directory: Path, canary: Canary | None) -> None:
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    async def start() -> Any:
        args = AsyncEngineArgs(weight_transfer_config=WeightTransferConfig(backend="treadle"), **COMMON, **made)
        return AsyncLLM.from_engine_args(args)

    engine = Online(asyncio.run_coroutine_threadsafe(start(), loop).result(), loop)
    tokens = engine.greedy(*first)
    with Replica(engine, directory, canary=canary, transfer=True) as replica:
        Server(fd, replica, engine.greedy, tokens).run()


def fresh(fd: int, models: list[dict[str, Any]], prompts: list[list[int]], num: int) -> None:
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    tokens = []
    for made in models:
        engine = Offline(LLM(**COMMON, **made))
        tokens.append([engine.greedy(prompt, num) for prompt in prompts])
        engine.shutdown()
        del engine
        gc.collect()
        cleanup_dist_env_and_memory()
    socket.socket(fileno=fd).sendall(json.dumps(tokens).encode() + b"\n")


def main() -> None:
    fd, task = int(sys.argv[1]), json.loads(sys.argv[2])
    kind = task.pop("kind")
    if kind == "fresh":
        fresh(fd, **task)
        return
    right = {int(version): tokens for version, tokens in task.pop("canary", {}).items()}
    first = task.pop("prompt"), task.pop("num")
    canary = Canary(first[0], right.get) if right else None
    directory = Path(task.pop("directory"))
    (offline if kind == "offline" else online)(fd, task, first, directory, canary)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # vLLM's threads may wait for processes that are gone
