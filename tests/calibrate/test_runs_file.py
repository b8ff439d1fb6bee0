"""Measured runs from a file: defaults as plan has them, and mistakes named by line, column and way out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from treadle.calibrate import read_runs
from treadle.calibrate.run_columns import COLUMNS, REQUIRED, SIZES
from treadle.estimate import load_cluster

CLUSTER = load_cluster("h100:64")


def write(directory: Path, text: str) -> Path:
    file = directory / "runs.csv"
    file.write_text(text)
    return file


def test_absent_columns_and_empty_cells_have_the_defaults_of_plan(tmp_path: Path) -> None:
    file = write(tmp_path, "# ours\nmodel,pp,global_batch_size,step_s,name\n\nllama3-8b,2,128,1.5,\n")
    (named,) = read_runs(file, CLUSTER)
    job = named.job
    assert (named.line, named.seconds) == (4, 1.5)
    assert named.name == "llama3-8b 64 GPUs 1f1b TP1 PP2 DP32 MBS1"
    assert (job.tp, job.vpp, job.seq_len, job.schedule, job.precision) == (1, 1, 4096, "1f1b", "bf16")
    assert (job.cuda_graph, job.recompute, job.offload, job.cluster) == ("none", (), (), CLUSTER)
    assert job.layout == ("E" + "t" * 16, "t" * 16 + "L")


def test_every_column_is_read(tmp_path: Path) -> None:
    given = {"model": "qwen3-30b-a3b", "step_s": "2.5e0", "name": "mine, and ours", "gpu": "H100", "num_gpus": "16",
             "tp": "2", "cp": "1", "pp": "2", "vpp": "2", "ep": "4", "etp": "1", "micro_batch_size": "2",
             "tokens_per_batch": "524288", "seq_len": "8192", "schedule": "interleaved-overlap", "precision": "fp8",
             "layout": "Et*12|t*12|t*12|t*12L", "recompute": "attn mlp", "offload": "moe_act core_attn",
             "cuda_graph": "none", "gradients": "bf16", "sharding": "none", "dispatch": "fp8"}  # fmt: skip
    assert {*given, "global_batch_size", "recompute_layers"} == set(COLUMNS)
    text = ", ".join(given) + "\n" + ", ".join(f'"{value}"' for value in given.values()) + "\n"
    (named,) = read_runs(write(tmp_path, text), CLUSTER)
    job = named.job
    assert named.name == "mine, and ours"
    assert (job.cluster.num_gpus, job.tp, job.pp, job.vpp, job.ep) == (16, 2, 2, 2, 4)
    assert (job.global_batch_size, job.micro_batch_size, job.seq_len) == (64, 2, 8192)
    assert (job.schedule, job.precision) == ("interleaved-overlap", "fp8")
    assert (job.recompute, job.offload, job.cuda_graph) == (("attn", "mlp"), ("moe_act", "core_attn"), "none")
    assert (job.gradient_bytes, job.sharding, job.dispatch) == (2, "none", "fp8")
    assert job.layout == ("E" + "t" * 12, "t" * 12, "t" * 12, "t" * 12 + "L")


def test_a_schedule_without_chunks_has_its_own_number(tmp_path: Path) -> None:
    head = "model,pp,vpp,schedule,global_batch_size,step_s\n"
    rows = "llama3-8b,2,,zb-v,128,1\nllama3-8b,2,4,,128,1\n"
    runs = read_runs(write(tmp_path, head + rows), CLUSTER)
    assert [(each.job.schedule, each.job.vpp) for each in runs] == [("zb-v", 2), ("interleaved", 4)]


def test_a_model_is_beside_the_file(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 8, "vocab_size": 32000,
              "num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 4096}  # fmt: skip
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "config.json").write_text(json.dumps(config))
    rows = "ours,64,1\nours/config.json,64,1\n"
    runs = read_runs(write(tmp_path, "model,global_batch_size,step_s\n" + rows), CLUSTER)
    assert [each.job.model.hidden_size for each in runs] == [1024, 1024]


HEAD = "model,pp,global_batch_size,step_s\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is empty; its first line names columns: model, step_s"),
        ("# nothing\n\n", "is empty"),
        (HEAD, "has a header and no run"),
        ("model,step,global_batch_size\n", ":1: 'step' is no column; did you mean 'step_s'?"),
        ("model,pp,pp,global_batch_size,step_s\n", "column pp is there twice"),
        ("model,global_batch_size\n", ":1: column step_s is missing: measured seconds of a step"),
        ("model,step_s\n", "a batch is global_batch_size or tokens_per_batch, got neither"),
        ("model,step_s,global_batch_size,tokens_per_batch\n", "got both"),
        (HEAD + "llama3-8b,2,64\n", ":2: it has 3 cells, and the header 4 columns"),
        (HEAD + "llama3-8b,2,64,1\nllama3-8b,two,64,1\n", ":3: pp is a whole number from 1, got 'two'"),
        (HEAD + "llama3-8b,0,64,1\n", ":2: pp is a whole number from 1, got '0'"),
        (HEAD + "llama3-8b,2,64,fast\n", ":2: step_s is a number above 0, got 'fast'"),
        (HEAD + "llama3-8b,2,64,-1\n", "above 0, got '-1'"),
        (HEAD + "llama3-8b,2,64,nan\n", "above 0, got 'nan'"),
        (HEAD + "llama3-8b,2,64,\n", "step_s is measured seconds of a step, got ''"),
        (HEAD + "llama3-9b,2,64,1\n", ":2: a model is a preset"),
        (HEAD + "llama3-8b,3,64,1\n", ":2: tp x cp x pp is 3 and does not divide 64 GPUs"),
        (HEAD + "llama3-8b,2,63,1\n", ":2: the global batch is a multiple of micro_batch_size x dp"),
        (HEAD + "llama3-8b,64,64,1\n", ":2: 1f1b has 64 stages, and the model 32 layers"),
        ("model,tokens_per_batch,step_s\nllama3-8b,5000,1\n", "tokens_per_batch is a multiple of seq_len"),
        ("model,num_gpus,global_batch_size,step_s\nllama3-8b,128,128,1\n",
         "num_gpus is at most the 64 GPUs of the cluster (--cluster h100:128 has more), got '128'"),
        ("model,gpu,global_batch_size,step_s\nllama3-8b,b200,64,1\n", "gpu is the cluster's GPU, h100;"),
        ("model,offload,global_batch_size,step_s\nllama3-8b,no,64,1\n", ":2: offload is one of attn_norm, qkv_linear"),
        ("model,schedule,global_batch_size,step_s\nllama3-8b,2f2b,64,1\n", ":2: '2f2b' is not a schedule"),
        ("model,precision,global_batch_size,step_s\nllama3-8b,nvfp4,64,1\n", ":2: 64 h100 computes in bf16, fp8"),
        ("model,recompute,global_batch_size,step_s\nllama3-8b,atn,64,1\n", ":2: recompute is one of full, attn"),
        ("model,layout,global_batch_size,step_s\nllama3-8b,Et|tL,64,1\n", "a layout of llama3-8b has 32 layers"),
    ],
)  # fmt: skip
def test_mistakes_are_named(text: str, told: str, tmp_path: Path) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ValueError, match=r"runs\.csv") as error:
        read_runs(file, CLUSTER)
    assert told in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no file .*none\.csv"):
        read_runs(tmp_path / "none.csv", CLUSTER)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_bytes(b"model\xff\xfe")
    with pytest.raises(ValueError, match="is not UTF-8 text"):
        read_runs(tmp_path / "runs.csv", CLUSTER)


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_bytes(b"\xef\xbb\xbf" + (HEAD + "llama3-8b,2,64,1\n").encode())
    assert len(read_runs(tmp_path / "runs.csv", CLUSTER)) == 1


def test_names_of_sizes_and_required_columns_are_columns() -> None:
    assert {*SIZES, *REQUIRED} <= set(COLUMNS)
