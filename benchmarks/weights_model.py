"""The tensors of a trillion-parameter model, and how long the plan of an update of all of them takes to make."""

from __future__ import annotations

import re
import resource
import time
from collections.abc import Callable

import msgspec

from treadle.weights.buffer_sizes import Memory
from treadle.weights.layouts import Parallel
from treadle.weights.tensor_boxes import Holding, Tensor
from treadle.weights.update_plan import plan_update

TP = 16
ATTENTION = {"q_a": (1536, 7168), "q_b": (12288, 1536), "kv_a": (576, 7168), "kv_b": (16384, 512), "o": (7168, 8192)}


def kimi_k2() -> list[Tensor]:
    """All tensors of Kimi-K2's FP8 checkpoint by its published configuration: 1029 GB."""
    tensors = []

    def linear(name: str, rows: int, columns: int) -> None:
        scale = (-(-rows // 128), -(-columns // 128))
        tensors.append(Tensor(f"{name}.weight", (rows, columns), "float8_e4m3fn", name))
        tensors.append(Tensor(f"{name}.weight_scale_inv", scale, "float32", name))

    def mlp(name: str, width: int) -> None:
        for part, shape in (("gate_proj", (width, 7168)), ("up_proj", (width, 7168)), ("down_proj", (7168, width))):
            linear(f"{name}.{part}", *shape)

    tensors.append(Tensor("embed_tokens.weight", (163840, 7168), "bfloat16"))
    for layer in range(61):
        attention = {
            "q_a": (1536, 7168),
            "q_b": (12288, 1536),
            "kv_a": (576, 7168),
            "kv_b": (16384, 512),
            "o": (7168, 8192),
        }
        for name, shape in attention.items():
            linear(f"layers.{layer}.self_attn.{name}_proj", *shape)
        tensors.append(Tensor(f"layers.{layer}.norm.weight", (7168,), "bfloat16"))
        if layer == 0:
            mlp("layers.0.mlp", 18432)
            continue
        tensors.append(Tensor(f"layers.{layer}.router.weight", (384, 7168), "bfloat16"))
        for expert in range(384):
            mlp(f"layers.{layer}.experts.{expert}", 2048)
        mlp(f"layers.{layer}.shared", 2048)
    tensors.append(Tensor("lm_head.weight", (163840, 7168), "bfloat16"))
    return tensors


def telling_time(had: Holding, wanted: Holding) -> dict[str, float]:
    """What update ranks tell each other of these layouts: bytes to every rank, seconds to make and to read them."""
    from treadle.update.protocol.catalogue import (  # with torch: the plan does without
        layout_digest,
        list_layouts,
        read_layouts,
    )
    from treadle.update.protocol.update_messages import WeightLayout

    layouts = {
        id(pieces): WeightLayout(tuple(had.tensors[name] for name in dict.fromkeys(p.tensor for p in pieces)), pieces)
        for pieces in (*had.pieces, *wanted.pieces)
    }
    digests = {key: layout_digest(layout) for key, layout in layouts.items()}
    told = {digests[key]: layout for key, layout in layouts.items()}
    has, wants = ([digests[id(pieces)] for pieces in holding.pieces] for holding in (had, wanted))
    begin = time.perf_counter()
    body = list_layouts(told, has, wants, [60 << 30] * len(has))
    listed = time.perf_counter()
    known = read_layouts(body)
    read = time.perf_counter()
    assert tuple(side.pieces for side in known.wants) == wanted.pieces
    largest = max(len(msgspec.msgpack.encode(layout)) for layout in told.values())
    return {
        "layouts": len(told),
        "message_mb": len(body) / 1e6,
        "largest_layout_mb": largest / 1e6,
        "list_s": listed - begin,
        "read_s": read - listed,
    }


def plan_time() -> dict[str, float]:
    """PP16 x EP64, two replicas, into TP16 x 128, all tensors of the model."""
    tensors = kimi_k2()
    layer, expert = re.compile(r"layers\.(\d+)\."), re.compile(r"experts\.(\d+)\.")

    def number(pattern: re.Pattern[str], parts: int, of: int) -> Callable[[str], int | None]:
        return lambda name: int(found[1]) * parts // of if (found := pattern.search(name)) is not None else None

    def dim(name: str) -> int | None:
        if "norm" in name or "router" in name or "_a_proj" in name:
            return None
        return 1 if "down_proj" in name or "o_proj" in name else 0

    have = Parallel(pp=16, ep=64, replicas=2, stage=number(layer, 16, 61), expert=number(expert, 64, 384))
    begin = time.perf_counter()
    had, wanted = have.holding(tensors), Parallel(tp=TP, replicas=128, dim=dim).holding(tensors)
    laid_out = time.perf_counter()
    plan = plan_update(had, wanted, Memory(60 << 30))
    planned = time.perf_counter()
    digest = plan.digest()
    digested = time.perf_counter()
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return {
        "tensors": len(tensors),
        "pieces": sum(len(p) for p in {id(p): p for h in (had, wanted) for p in h.pieces}.values()),
        "buckets": len(plan.buckets),
        "layouts_s": laid_out - begin,
        "plan_s": planned - laid_out,
        "digest_s": digested - planned,
        **telling_time(had, wanted),
        "bucket_bytes": plan.bucket_bytes,
        "peak_gb": peak_gb,
        "notes": len(plan.notes) + (not digest),
    }
