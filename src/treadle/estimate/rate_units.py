"""Units of a cluster's rates: a number that no GPU has is refused, with what it was probably meant to be."""

from __future__ import annotations

from typing import NamedTuple

from treadle.fields.kinds import Number

_RATE = Number(0, above=True)


class RateUnit(NamedTuple):
    """What a rate is counted in, the range that is taken for one, and other units that people count it in.

    `others` are (name, how many of the right unit it is); the first that brings a number into the range is named.
    """

    unit: str
    least: float
    most: float
    others: tuple[tuple[str, float], ...]


_MEMORY = RateUnit("GiB", 1, 4096, (("MiB", 2**-10), ("bytes", 2**-30)))
_FLOPS = RateUnit("operations a second", 1e12, 1e18, (("TFLOP/s", 1e12), ("PFLOP/s", 1e15)))
_GPU_MEMORY = RateUnit("bytes a second", 1e11, 1e14, (("TB/s", 1e12), ("GB/s", 1e9)))
_LINK = RateUnit("bytes a second", 1e9, 1e13, (("GB/s", 1e9), ("TB/s", 1e12)))
_NIC = RateUnit("bytes a second", 1e8, 3e11, (("Gb/s", 0.125e9), ("bits a second", 0.125)))

UNITS = {
    "memory_gib": _MEMORY,
    "host_memory_gib": _MEMORY,
    "memory_bandwidth": _GPU_MEMORY,
    "nvlink_bandwidth": _LINK,
    "nic_bandwidth": _NIC,
    "pcie_bandwidth": _LINK,
    "peak_flops": _FLOPS,
}
"""Fields of a cluster that are amounts, and their units."""


def check_rate(name: str, value: object) -> None:
    """Raise a ValueError if a cluster's rate is no number, or none in its unit. `peak_flops.fp8` is one of peak_flops.

    Example:
        >>> check_rate("nic_bandwidth", 400)
        Traceback (most recent call last):
        ...
        ValueError: nic_bandwidth of a cluster is bytes a second, from 1e+08 to 3e+11, got 400; 400 Gb/s are 5e+10

    """
    _RATE.check(value, f"{name} of a cluster")
    assert isinstance(value, int | float)
    unit, least, most, others = UNITS[name.partition(".")[0]]
    if not least <= value <= most:
        meant = next(
            (f"; {value:g} {other} are {value * of:g}" for other, of in others if least <= value * of <= most), ""
        )
        raise ValueError(f"{name} of a cluster is {unit}, from {least:g} to {most:g}, got {value:g}{meant}")
