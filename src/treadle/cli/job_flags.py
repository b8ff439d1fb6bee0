"""Options about a model on a cluster, as they are typed: they become a Job and its estimated costs."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields
from typing import Annotated, Any

import typer

from treadle.costs import Costs
from treadle.estimate import Job, load_cluster, load_model
from treadle.estimate.op_costs import estimate_costs
from treadle.ir import Schedule
from treadle.ir.placement import Placement
from treadle.lowering import LoweringOptions
from treadle.planner.structure import Structure


def _option(name: str, help: str) -> Any:
    return typer.Option(f"--{name}", help=help, rich_help_panel="A model on a cluster")


@dataclass(frozen=True)
class JobFlags:
    """The options as given; sizes that are left out have the defaults of Job."""

    model: Annotated[
        str | None, _option("model", "A preset (kimi-k2), a .toml file, or Hugging Face's config.json.")
    ] = None
    cluster: Annotated[str | None, _option("cluster", "A preset with how many GPUs (h800:2048), or a .toml file.")] = (
        None
    )
    tp: Annotated[int | None, _option("tp", "Tensor parallelism.")] = None
    ep: Annotated[int | None, _option("ep", "Expert parallelism.")] = None
    micro_batch_size: Annotated[int | None, _option("micro-batch-size", "Sequences of a micro-batch.")] = None
    seq_len: Annotated[int | None, _option("seq-len", "Tokens of a sequence.")] = None
    precision: Annotated[str | None, _option("precision", "Of GEMMs: bf16, fp8, mxfp8, nvfp4.")] = None

    @property
    def _given(self) -> dict[str, Any]:
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}

    def check(self, costs_name: str | None) -> None:
        """Raise a ValueError unless there are either costs, or a model and a cluster."""
        if costs_name is not None:
            for name, value in self._given.items():
                raise ValueError(
                    f"--costs {costs_name} has what blocks take, got --{name.replace('_', '-')} {value}; leave one out"
                )
            return
        for name in ("model", "cluster"):
            if getattr(self, name) is None:
                raise ValueError(
                    f"what blocks take is not known without --{name}; give --model llama3-8b --cluster h100:64, or "
                    "--costs mine.toml"
                )

    def lowering(self, placement: Placement, schedule: Schedule | None) -> tuple[Costs, LoweringOptions]:
        """Return the job's costs, and how a plan lowers its schedule.

        Raises:
            ValueError: there is no such preset, or sizes do not divide.

        """
        ran: dict[str, Any] = {"schedule": schedule.name, "vpp": placement.vpp} if schedule is not None else {}
        sizes = self._given
        model, cluster = load_model(sizes.pop("model")), load_cluster(sizes.pop("cluster"))
        replicas = max(1, cluster.num_gpus // (placement.pp * (self.tp or 1)))
        batches = schedule.num_microbatches if schedule is not None else 1
        batch = (self.micro_batch_size or 1) * replicas * batches
        job = Job(
            model,
            cluster,
            pp=placement.pp,
            global_batch_size=batch,
            **sizes,
            **ran,
        )
        costs = estimate_costs(job)
        return costs, Structure.of(job, (model.blocks,), costs).options

    def __str__(self) -> str:
        return " ".join(f"--{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in self._given.items())
