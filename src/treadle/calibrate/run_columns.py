"""Columns of a file of measured runs: their names, what a cell may be, and what is taken where there is none."""

from __future__ import annotations

from typing import Any, NamedTuple

from treadle.fields.kinds import Number

REQUIRED = ("model", "step_s")
SIZES = ("num_gpus", "tp", "cp", "pp", "vpp", "ep", "etp", "micro_batch_size", "global_batch_size", "seq_len")
COLUMNS: dict[str, str] = {
    "model": "a preset, a .toml file or Hugging Face's config.json; paths are relative to the file of runs",
    "step_s": "measured seconds of a step",
    "name": "what the run is called here",
    "gpu": "the cluster's GPU, as a check",
    "num_gpus": "GPUs of the run; by default all of the cluster",
    "tp": "tensor parallelism; 1",
    "cp": "context parallelism; 1",
    "pp": "ranks of the pipeline; 1",
    "vpp": "chunks of each; 1, or what the schedule has",
    "ep": "expert parallelism; 1",
    "etp": "tensor parallelism of experts; 1",
    "micro_batch_size": "sequences of a micro-batch; 1",
    "global_batch_size": "sequences of a step, over all GPUs",
    "tokens_per_batch": "tokens of a step, instead",
    "seq_len": "tokens of a sequence; 4096",
    "schedule": "as `treadle schedules` lists them; 1f1b, or interleaved where vpp is above 1",
    "precision": "of GEMMs: bf16, fp8, mxfp8, nvfp4; bf16",
    "layout": "blocks of each stage (Et*4|...|t*3L); layers as even as can be",
    "recompute": "parts recomputed, with spaces between: attn mlp, or full",
    "recompute_layers": "with full: layers of each stage; all",
    "offload": "modules whose saved inputs go to the host, with spaces between: moe_act core_attn; none",
    "cuda_graph": "none, partial or whole; none",
    "gradients": "main gradients: fp32 or bf16; fp32",
    "sharding": "what is cut over replicas: none, optimizer, gradients, parameters; optimizer",
    "dispatch": "of tokens sent to experts: bf16 or fp8; bf16",
}
"""Names and meanings. Behind the semicolon is what an empty cell, or no column, stands for, as in `treadle plan`."""


class Cell(NamedTuple):
    """A cell of a file, and where it is."""

    file: str
    line: int
    column: str
    text: str

    def refuse(self, allowed: str) -> ValueError:
        """Return the error of a cell that is not what is allowed."""
        return ValueError(f"{self.file}:{self.line}: {self.column} is {allowed}, got {self.text!r}")

    def number(self, kind: Number) -> Any:
        """Return the number of a cell, whole if the kind is."""
        found = kind.read(self.text)
        if found is None:
            raise self.refuse(kind.words)
        return found

    def whole(self, least: int = 1) -> int:
        """Return a whole number."""
        number: int = self.number(Number(least, whole=True))
        return number

    def seconds(self) -> float:
        """Return a time."""
        return float(self.number(Number(0, above=True)))
