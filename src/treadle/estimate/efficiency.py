"""What a cluster achieves of its peak rates, and times besides: names, defaults, meanings, and checks of a file's."""

from __future__ import annotations

from collections.abc import Mapping

from treadle.fields.kinds import SHARE, Number
from treadle.fields.nearest import did_you_mean

EFFICIENCY: dict[str, tuple[float, str]] = {
    "gemm": (0.75, "share of the peak rate that GEMMs achieve, their bytes aside; gemm_fp8 in FP8, and so on"),
    "grouped": (0.6, "share of the peak rate of grouped GEMMs, those of experts; grouped_fp8 in FP8"),
    "attention": (0.55, "share of the BF16 peak rate of attention's core"),
    "attention_narrow": (0.4, "the same of heads of at most 64"),
    "memory": (0.75, "share of the memory's bandwidth of GEMMs, norms and activations"),
    "cast": (0.6, "share of the memory's bandwidth of casts to FP8, MXFP8 or NVFP4; cast_nvfp4 in NVFP4"),
    "permute": (0.5, "share of the memory's bandwidth of sorting tokens by expert"),
    "tp": (1.0, "share of the link's bandwidth of collectives of tensor parallelism, some of them hidden"),
    "cp": (1.4, "share of the link's bandwidth of exchanged keys and values, most of them hidden"),
    "ep_nvlink": (0.6, "share of NVLink's bandwidth of the exchange with experts"),
    "ep_nic": (0.7, "share of the NIC's bandwidth of the exchange with experts"),
    "pp": (0.7, "share of the link's bandwidth of a message between stages"),
    "dp": (0.7, "share of the link's bandwidth of reduced gradients and gathered parameters"),
    "pcie": (0.85, "share of PCIe's bandwidth of copies to the host and back"),
    "launch_us": (50.0, "microseconds of the host for a launch (`treadle.estimate.block_work`) outside graphs"),
    "expert_us": (50.0, "microseconds of the host for a local expert in FP8 and NVFP4, outside whole graphs"),
    "overlap_us": (35.0, "microseconds of the host more for a launch where exchanges are overlapped with computation"),
    "latency_us": (15.0, "microseconds of a message or collective besides its bytes"),
    "optimizer": (0.6, "share of the memory's bandwidth of the optimizer's step"),
    "step_us": (50000.0, "microseconds of a step besides all else: norms over ranks, data, logging"),
    "dp_hidden": (0.8, "share of parameter gathering that runs beside computation"),
}
"""Name, default, and meaning of each constant."""

_KINDS = {
    "gemm": ("bf16", "fp8", "mxfp8", "nvfp4"),
    "grouped": ("bf16", "fp8", "mxfp8", "nvfp4"),
    "cast": ("bf16", "fp8", "mxfp8", "nvfp4"),
    "launch_us": ("none", "partial", "whole"),
}
"""Constants that may differ by precision, or by how much of the step is a CUDA graph: gemm_fp8, launch_us_partial."""

_PRODUCTS = ("gemm", "grouped", "attention")
_MOST_SHARE, _MOST_HIDDEN_SHARE, _MOST_US = 2.0, 10.0, 1e8
"""The largest share that is taken for one: of the peak rate of GEMMs; of memory and links, whose bytes fused kernels
spare and other work hides; and the longest time."""

NAMES = (*EFFICIENCY, *(f"{name}_{kind}" for name, kinds in _KINDS.items() for kind in kinds))
"""All that an [efficiency] section may have."""


def replace_constants(preset: Mapping[str, float], given: Mapping[str, float]) -> dict[str, float]:
    """Return a preset's constants with a file's in their place; its gemm replaces gemm_bf16 and the like.

    Example:
        >>> replace_constants({"gemm": 0.7, "gemm_fp8": 0.9, "tp": 1.0}, {"gemm": 0.5})
        {'gemm': 0.5, 'tp': 1.0}

    """
    replaced = {f"{name}_{kind}" for name in given for kind in _KINDS.get(name, ())}
    return {**{name: value for name, value in preset.items() if name not in replaced}, **given}


def check_efficiency(given: Mapping[str, float]) -> None:
    """Raise a ValueError if a name is not known, or a value is no share or time.

    Shares are above 0, of GEMMs up to 2, else up to 10; what is hidden is from 0 to 1, and microseconds are from 0.

    Example:
        >>> check_efficiency({"dp": 0})
        Traceback (most recent call last):
        ...
        ValueError: efficiency.dp of a cluster is a number above 0, up to 10, got 0; 1 is the whole peak rate

    """
    for name, value in given.items():
        if name not in NAMES:
            raise ValueError(f"{name} is no constant of [efficiency]; {did_you_mean(name, NAMES)}")
        if name.endswith("_hidden"):
            kind, meant = SHARE, "1 hides all of it"
        elif "_us" in name:
            kind, meant = Number(0, _MOST_US), "in microseconds"
        else:
            most = _MOST_SHARE if name.startswith(_PRODUCTS) else _MOST_HIDDEN_SHARE
            kind, meant = Number(0, most, above=True), "1 is the whole peak rate"
        kind.check(value, f"efficiency.{name} of a cluster", meant)
