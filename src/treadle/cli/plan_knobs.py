"""Options of `treadle plan` that narrow its search, as they are typed: they become a SearchSpace."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from treadle.estimate import Job, ModelShape
from treadle.estimate.job import (
    CUDA_GRAPHS,
    DISPATCHES,
    GRADIENT_BYTES,
    MOMENT_BYTES,
    OFFLOADED,
    RECOMPUTED,
    SAVED,
    SHARDINGS,
)
from treadle.fields.nearest import did_you_mean
from treadle.ir.blocks import parse_layout
from treadle.planner.plan_files import untrainable_model
from treadle.planner.space import TRAINED_RECOMPUTE, SearchSpace, recompute_sets
from treadle.schedules import family, known


def _option(help: str, *names: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="What is searched")


_SIZES = _option("Only these: 1,2,4; a range has its powers of two: 1-8.")


@dataclass(frozen=True)
class Knobs:
    """The options as given; those that are left out are searched."""

    schedule: Annotated[list[str] | None, _option("Only this schedule; several times.")] = None
    tp: Annotated[str | None, _SIZES] = None
    cp: Annotated[str | None, _SIZES] = None
    pp: Annotated[str | None, _SIZES] = None
    vpp: Annotated[
        str | None, _option("Stages on each rank, under schedules that leave a choice; only these: 2,4 or 2-8.")
    ] = None
    ep: Annotated[str | None, _SIZES] = None
    micro_batch_size: Annotated[str | None, _SIZES] = None
    layout: Annotated[
        str | None, _option("Blocks of each stage, as Megatron writes them: 'Et|(tt|)*30L'; else balanced.")
    ] = None
    recompute: Annotated[
        str | None,
        _option("no, yes (something), or modules as Megatron names them: core_attn,moe_act; full is the whole layer."),
    ] = None
    offload: Annotated[
        str | None,
        _option("no, yes (all), or modules: core_attn,moe_act. By default as little as fits, if nothing fits without."),
    ] = None
    gradients: Annotated[str, _option("Main gradients: fp32, or bf16 (Megatron's grad_reduce_in_fp32 off).")] = "fp32"
    moments: Annotated[str, _option("Moments of Adam: fp32, or bf16 (Megatron's exp_avg_dtype).")] = "fp32"
    saved: Annotated[
        str,
        _option("Saved inputs of activations and of attention's output projection: bf16, or fp8 as DeepSeek-V3's."),
    ] = "bf16"
    sharding: Annotated[
        str | None, _option("What is cut over DP; only these: none, optimizer, gradients (ZeRO-2), parameters (FSDP).")
    ] = None
    precision: Annotated[str, _option("Of GEMMs: bf16, fp8, mxfp8, nvfp4.")] = "bf16"
    dispatch: Annotated[str, _option("Of tokens sent to experts: bf16, or fp8 as DeepSeek-V3 sends them.")] = "bf16"
    cuda_graph: Annotated[
        str | None,
        _option("none, partial or whole; several: none,partial. By default none, and what partial would change."),
    ] = None
    trainable: Annotated[bool, _option("Only what treadle.train can run: no TP and no CP.", "--trainable")] = False

    def space(self, model: ModelShape) -> SearchSpace:
        """Return the space to search.

        Raises:
            ValueError: a value is none of its option's, or `treadle.train` cannot run it with --trainable.

        """
        names = tuple(family(name).name for name in self.schedule) if self.schedule else None
        vpps = parse_sizes(self.vpp, "--vpp")
        if vpps is not None and names is not None:
            _check_vpp(vpps, names)
        if self.trainable:
            self._check_trainable(model)
        return SearchSpace(
            tp=(1,) if self.trainable else parse_sizes(self.tp, "--tp"),
            cp=(1,) if self.trainable else parse_sizes(self.cp, "--cp"),
            pp=parse_sizes(self.pp, "--pp"),
            vpp=vpps,
            ep=parse_sizes(self.ep, "--ep"),
            micro_batch_size=parse_sizes(self.micro_batch_size, "--micro-batch-size") or SearchSpace.micro_batch_size,
            schedules=names,
            layout=None if self.layout is None else (parse_layout(self.layout),),
            recompute=self._recompute(model),
            offload=self._offload(),
            gradient_bytes=(GRADIENT_BYTES[_one_of("--gradients", self.gradients, tuple(GRADIENT_BYTES))],),
            moment_bytes=(MOMENT_BYTES[_one_of("--moments", self.moments, tuple(MOMENT_BYTES))],),
            saved=(_one_of("--saved", self.saved, SAVED),),
            sharding=self._sharding(),
            cuda_graph=self._cuda_graph(),
            precision=(self.precision,),
            dispatch=(_one_of("--dispatch", self.dispatch, DISPATCHES),),
            balanced=(True,),
        )

    def _recompute(self, model: ModelShape) -> tuple[tuple[str, ...], ...] | None:
        if self.recompute is None:
            return TRAINED_RECOMPUTE if self.trainable else None
        if self.recompute == "no":
            return ((),)
        if self.recompute == "yes":
            return tuple(filter(None, TRAINED_RECOMPUTE if self.trainable else recompute_sets(model)))
        modules = _modules("--recompute", self.recompute, RECOMPUTED)
        if self.trainable and not set(modules) <= {"attn", "mlp"}:
            raise ValueError(
                f"treadle.train recomputes attn and mlp, got --recompute {self.recompute}; leave one of the two out"
            )
        return (modules,)

    def _offload(self) -> tuple[tuple[str, ...], ...] | None:
        if self.offload is None:
            return None
        if self.offload in ("no", "yes"):
            return (OFFLOADED if self.offload == "yes" else (),)
        return (_modules("--offload", self.offload, OFFLOADED),)

    def _cuda_graph(self) -> tuple[str, ...] | None:
        if self.cuda_graph is None:
            return None
        return tuple(_one_of("--cuda-graph", name, CUDA_GRAPHS) for name in self.cuda_graph.split(","))

    def _sharding(self) -> tuple[str, ...] | None:
        if self.sharding is None:
            return (Job.sharding,) if self.trainable else None
        return tuple(_one_of("--sharding", name, SHARDINGS) for name in self.sharding.split(","))

    def _check_trainable(self, model: ModelShape) -> None:
        """Refuse what `treadle.train` cannot run, before anything is searched."""
        reason = untrainable_model(model)
        if reason is not None:
            raise ValueError(f"treadle.train cannot train {model.name}: {reason}; leave --trainable out")
        has = {
            "computes in bf16": ("--precision", self.precision, ("bf16",)),
            "has gradients in fp32": ("--gradients", self.gradients, ("fp32",)),
            "has moments in fp32": ("--moments", self.moments, ("fp32",)),
            "saves activations in bf16": ("--saved", self.saved, ("bf16",)),
            "shards the optimizer": ("--sharding", self.sharding, (None, Job.sharding)),
            "has no TP": ("--tp", self.tp, (None, "1")),
            "has no CP": ("--cp", self.cp, (None, "1")),
        }
        for fact, (option, value, allowed) in has.items():
            if value not in allowed:
                raise ValueError(f"treadle.train {fact}, got {option} {value}; leave one of the two out")


def parse_sizes(text: str | None, option: str) -> tuple[int, ...] | None:
    """`1,2,4`; `1-8` for the powers of two from 1 to 8; `1-4,6`."""
    if text is None:
        return None
    number = "[1-9][0-9]{0,5}"
    if re.fullmatch(rf"{number}(-{number})?(,{number}(-{number})?)*", text) is None:
        raise ValueError(f"{option} takes whole numbers from 1 such as 1,2,4, or a range such as 1-8, got {text!r}")
    sizes: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        sizes += _powers_within(int(first), int(last), option) if last else [int(first)]
    return tuple(dict.fromkeys(sizes))


def _powers_within(first: int, last: int, option: str) -> list[int]:
    powers = [1 << power for power in range(last.bit_length()) if first <= 1 << power <= last]
    if not powers:
        raise ValueError(
            f"{option} {first}-{last} has no power of two; name the sizes, such as {option} {min(first, last)},"
            f"{max(first, last)}"
        )
    return powers


def _modules(option: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    modules = tuple(text.split(","))
    for module in modules:
        if module in ("no", "yes"):
            raise ValueError(f"{option} {module} is given alone, got {text!r}; leave {module} or the modules out")
        if module not in known:
            raise ValueError(
                f"{option} is no, yes or modules of a layer, got {module!r}; "
                f"{did_you_mean(module, ('no', 'yes', *known))}"
            )
    return modules


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ValueError(f"{option} is {' or '.join(allowed)}, got {value!r}; leave it out for the default")
    return value


def _check_vpp(vpps: tuple[int, ...], names: tuple[str, ...]) -> None:
    """Refuse numbers of stages that none of the schedules takes; 1 may stand beside one that is taken."""
    lost = [vpp for vpp in vpps if not any(_takes(name, vpp) for name in names)]
    if [vpp for vpp in lost if vpp > 1] or lost == [*vpps]:
        takers = [name for name in known() if all(_takes(name, vpp) for vpp in lost)]
        wayout = f"; {', '.join(takers)} can" if takers else ""
        raise ValueError(
            f"{' and '.join(names)} cannot put {' or '.join(map(str, lost))} stages on each rank, got --vpp "
            f"{','.join(map(str, vpps))}{wayout}; name such a schedule, or leave --vpp out"
        )


def _takes(name: str, vpp: int) -> bool:
    return vpp in family(name).vpps if family(name).vpps else vpp > 1
