"""Random small searches by a seed: a model, a cluster, a batch, a few sizes and a memory limit."""

from __future__ import annotations

import random
from dataclasses import replace

from treadle.estimate import load_cluster, load_model
from treadle.planner import SearchSpace
from treadle.planner.find_plan import usable_bytes
from treadle.planner.space import Candidate, candidates

_MODELS = ("llama3-8b", "llama3-70b", "qwen3-30b-a3b", "gpt-oss-120b", "deepseek-v2")
_GPUS = ("h100", "h800", "b200", "gb200")


def random_search(seed: int) -> tuple[list[Candidate], int]:
    """Return the candidates of a random small search, and the bytes that a rank may hold."""
    rng = random.Random(seed)
    while True:
        model, layers = load_model(rng.choice(_MODELS)), rng.choice((8, 12, 16, 24))
        windowed = layers // 2 if model.num_windowed_layers else 0
        model = replace(model, num_hidden_layers=layers, num_windowed_layers=windowed)
        cluster = load_cluster(f"{rng.choice(_GPUS)}:{rng.choice((8, 16, 32))}")
        space = SearchSpace(
            tp=tuple(rng.sample((1, 2, 4), 2)),
            pp=tuple(rng.sample((1, 2, 4), 2)),
            ep=tuple(rng.sample((1, 4, 8), 2)) if model.is_moe else None,
            micro_batch_size=tuple(rng.sample((1, 2, 4, 8), 2)),
            vpp=(2,),
            offload=((),),
            balanced=(True,),
            precision=(rng.choice(("bf16", "fp8")),),
            gradient_bytes=(rng.choice((2, 4)),),
        )
        batch, seq_len = cluster.num_gpus * rng.choice((1, 2, 4, 8)), rng.choice((2048, 4096, 8192))
        found = list(candidates(model, cluster, space, global_batch_size=batch, seq_len=seq_len))
        if found:
            return found, int(usable_bytes(cluster) * rng.choice((0.5, 0.8, 1.0)))
