"""A vLLM engine that takes new weights while it runs: see docs/vllm.md for the launch lines.

It needs: pip install '.[update]' beside vLLM

python examples/vllm_serve.py checkpoints   writes two versions of a small model: v1 and v2
python examples/vllm_serve.py serve engine  serves from the directory `engine` until version 2 has answered
"""

import os
import sys
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

PROMPT = {"prompt_token_ids": list(range(3, 40))}


def checkpoints() -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen3Config(vocab_size=512, num_key_value_heads=2, head_dim=32, initializer_range=0.2, **shape)
    for version in (1, 2):
        torch.manual_seed(version)
        Qwen3ForCausalLM(config).save_pretrained(f"v{version}")


def serve(directory: Path) -> None:
    from vllm import LLM, SamplingParams

    from treadle.update.adapters.vllm import Offline, Replica

    directory.mkdir(mode=0o700, exist_ok=True)
    llm = LLM(
        "v1",
        worker_extension_cls="treadle.update.adapters.vllm.Extension",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=256,
        kv_cache_memory_bytes=32 << 20,
    )
    greedy = SamplingParams(temperature=0, max_tokens=6, detokenize=False)
    version = 0
    with Replica(Offline(llm), directory) as replica:
        print("closed until the first update", flush=True)  # noqa: T201
        while version < 2:
            with replica.serving(wait_s=600) as served:  # waits while the engine is closed
                tokens = list(llm.generate(PROMPT, greedy, use_tqdm=False)[0].outputs[0].token_ids)
            if served != version:
                version = served
                print(f"version {version}: {tokens}", flush=True)  # noqa: T201


if __name__ == "__main__":
    checkpoints() if sys.argv[1] == "checkpoints" else serve(Path(sys.argv[2]))
