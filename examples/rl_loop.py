"""Train a little, update the engine, generate; three times: torchrun --nproc-per-node 2 examples/rl_loop.py

It needs: pip install '.[update]'

Each rank trains beside an engine in a process of its own. The engine starts closed, with random weights, and gets every
version by an update. The task: token t is followed by 5 t + 7 (mod 32). The engine's answers get better with each
version.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM

from treadle.update import Endpoint, Source, Updated, UpdateOptions, Updater
from treadle.update.adapters.transformers import Transformers, named_weights
from treadle.update.worker.asking import ask
from treadle.weights.buffer_sizes import Memory

VOCABULARY, LENGTH = 32, 12


def make_model(seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCABULARY, num_key_value_heads=2, head_dim=16, **small))


def serve(directory: Path, worker: int) -> None:
    """The engine: it continues the tokens it is asked for, and answers with the version that did so."""
    engine = Transformers(make_model(seed=100 + worker).eval())

    def answer(body: bytes) -> tuple[int, bytes]:
        version, tokens = engine.generate(torch.tensor([list(body)]), max_new_tokens=6, do_sample=False)
        return version, bytes(tokens[0].tolist())

    with Endpoint(engine, directory, worker, answer=answer):
        sys.stdin.read()  # until the trainer ends


def follow(token: torch.Tensor) -> torch.Tensor:
    return (5 * token + 7) % VOCABULARY


def train(model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, steps: int) -> float:
    for _ in range(steps):
        tokens = torch.randint(0, VOCABULARY, (64, 1))
        while tokens.shape[1] < LENGTH:
            tokens = torch.cat([tokens, follow(tokens[:, -1:])], 1)
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def where_time_went(done: Updated) -> str:
    """The first update waits until the engines have started, which takes longer than all the rest."""
    waited, moved, kilobytes = done.seconds["enter"], done.seconds["load"], done.size_bytes / 1000
    agreed = done.seconds["total"] - waited - moved
    return f"waited {waited:.2f} s for engines, moved {kilobytes:.0f} kB in {moved:.2f} s, agreed in {agreed:.2f} s"


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    place = [tempfile.mkdtemp(prefix="treadle-rl-") if rank == 0 else ""]
    dist.broadcast_object_list(place)
    directory = Path(place[0])
    engine = subprocess.Popen([sys.executable, __file__, str(directory), str(rank)], stdin=subprocess.PIPE)
    model = make_model(seed=0)
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    options = UpdateOptions(Memory(64 << 20), deadline_s=180)  # the engines start meanwhile
    if rank == 0:
        print("starting the engines, which takes longer than all the rest", flush=True)  # noqa: T201
    with Updater(directory, ledger=directory / "ledger", options=options) as updater:
        for version in (1, 2, 3):
            loss = train(model, optimizer, 3)
            done = updater.update(Source.of(named_weights(model)), version)
            served, body = ask(directory, rank, bytes([1, 12, 3]))
            written = torch.tensor(list(body))
            right = int((written[3:] == follow(written[2:-1])).sum())
            if rank == 0:
                learned = f"loss {loss:.3f}  {list(body)}  {right} of 6 right"
                print(f"version {served}  {learned}  {where_time_went(done)}")  # noqa: T201
        dist.barrier()
    engine.kill()
    engine.wait()
    dist.barrier()
    if rank == 0:
        shutil.rmtree(directory)
    dist.destroy_process_group()


if __name__ == "__main__":
    main() if len(sys.argv) == 1 else serve(Path(sys.argv[1]), int(sys.argv[2]))
