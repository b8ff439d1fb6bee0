"""Jobs drawn for the round trip through a trainer's configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from treadle.estimate import Job, ModelShape, load_cluster
from treadle.passes.cut import cut_evenly
from treadle.planner.space import overlaps_alone
from treadle.schedules import default_schedule, family, known
from treadle.trainers import TrainerFormat

NOT_OF_TORCH = ("etp", "precision", "offload", "gradient_bytes", "moment_bytes", "saved", "cuda_graph")
CLUSTER = load_cluster("b200:64")


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    """Draw a model, dense or with experts, of GQA or MLA."""
    size = st.sampled_from
    layers, heads, biased = draw(size((8, 12, 16))), draw(size((8, 16))), draw(st.booleans())
    given: dict[str, Any] = {
        "num_key_value_heads": draw(size((heads, 8))),
        "head_dim": draw(size((64, 128))),
        "intermediate_size": draw(size((2048, 5632))),
        "gated_mlp": draw(st.booleans()),
        "tie_word_embeddings": draw(st.booleans()),
        "attention_bias": biased,
        "mlp_bias": biased,
        "qk_norm": draw(st.booleans()),
        "num_nextn_predict_layers": draw(size((0, 0, 1))),
        "max_position_embeddings": draw(size((0, 0, 8192))),
    }
    if draw(st.booleans()):
        given |= {"num_experts": 64, "num_experts_per_tok": draw(size((2, 6))), "moe_intermediate_size": 1024}
        given |= draw(size(({}, {"n_shared_experts": 2}, {"shared_expert_intermediate_size": 1536})))
        given |= {"first_k_dense_replace": draw(size((0, 1, 3)))} | draw(size(({}, {"n_group": 8, "topk_group": 4})))
    if draw(st.booleans()):
        given |= {"kv_lora_rank": 512, "q_lora_rank": draw(size((0, 1536))), "qk_nope_head_dim": 128}
        given |= {"qk_rope_head_dim": 64, "v_head_dim": 128, "num_key_value_heads": heads}
    elif draw(st.booleans()):
        given |= {"sliding_window": 128, "num_windowed_layers": draw(size((layers, layers // 2)))}
    return ModelShape("drawn", 2048, layers, 32_000, heads, **given)


@st.composite
def jobs(draw: st.DrawFn, trainer: TrainerFormat) -> Job:
    """Draw a job that a trainer can run, with its stages."""
    size = st.sampled_from
    model = draw(shapes())
    pp, tp = draw(size((1, 2, 4))), draw(size((1, 2, 4)))
    names = [name for name in sorted(known()) if pp > 1 or name == default_schedule() or overlaps_alone(name)]
    schedule = draw(size(names))
    vpp = draw(size(family(schedule).vpps or (2,))) if pp > 1 else 1
    given: dict[str, Any] = {
        "tp": tp,
        "cp": draw(size((1, 2))),
        "pp": pp,
        "vpp": vpp,
        "micro_batch_size": draw(size((1, 2))),
        "global_batch_size": 512,
        "seq_len": draw(size((4096, 8192))),
        "schedule": schedule,
        "precision": draw(size(("bf16", "fp8", "mxfp8"))),
        "recompute": draw(size(((), ("full",), ("layernorm",), ("core_attn", "mla_up_proj"), ("moe_act",)))),
        "offload": draw(size(((), (), ("core_attn", "attn_proj")))),
        "sequence_parallel": tp == 1 or draw(st.booleans()),
        "cuda_graph": draw(size(("none", "none", "partial", "whole"))),
        "sharding": draw(size(("none", "optimizer", "gradients", "parameters"))),
        "gradient_bytes": draw(size((4, 2))),
        "moment_bytes": draw(size((4, 2))),
        "saved": draw(size(("bf16", "bf16", "fp8"))),
    }
    if model.is_moe:
        given |= {"ep": draw(size((1, 2, 8))), "etp": draw(size((1, tp)))}
    if trainer.shardings:  # PyTorch's: FSDP, whole layers recomputed, bf16 with everything else in FP32
        given = {name: value for name, value in given.items() if name not in NOT_OF_TORCH}
        given |= {"sharding": draw(size(trainer.shardings)), "recompute": draw(size(((), ("full",))))}
        given |= {"schedule": draw(size([name for name in names if of_torch(name)])), "vpp": 1}
        given["vpp"] = draw(size(family(given["schedule"]).vpps or (2,))) if pp > 1 else 1
        given["cuda_graph"] = draw(size(("none", "whole"))) if pp == 1 else "none"
    elif given["recompute"] == ("full",):
        given["recompute_layers"] = draw(size((0, 1, 2)))
    try:
        job = Job(model, CLUSTER, **given)
        family(job.schedule).size(pp, job.vpp, job.num_microbatches)
        stages = cut_evenly(model.blocks, job.num_stages)
        if pp > 1 and draw(st.booleans()) and len(stages[1]) > 1:  # one layer more at the front
            stages = (stages[0] + stages[1][0], stages[1][1:], *stages[2:])
        job = replace(job, layout=stages)
    except ValueError:
        assume(False)
    assume(trainer.runs(job))
    return job


def of_torch(name: str) -> bool:
    """Return True if torch.distributed.pipelining has a schedule."""
    return any(trainer.startswith("torch") for trainer in family(name).trainers)


def same(job: Job) -> Job:
    """Return a job without what no configuration has: where its model's sizes are published, and its name."""
    return replace(job, model=replace(job.model, name="", source=""))
