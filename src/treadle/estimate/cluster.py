"""A cluster: what its GPUs can do at most, and how they are joined.

name = "2,048 H800"
num_gpus = 2048                 # without it: one host of the preset
gpu = "h800"                    # a preset to start from; entries below replace its
memory_gib = 80
memory_bandwidth = 3.35e12      # bytes a second
nvlink_domain = 8               # GPUs that NVLink joins; a file's own divides num_gpus
nvlink_bandwidth = 200e9        # bytes a second, each way, of a GPU
nic_bandwidth = 50e9            # the same to other domains: 400 Gb/s
pcie_bandwidth = 50e9           # to the host, each way
gpus_per_pcie = 1               # GPUs that share it
host_memory_gib = 256           # a GPU's share of its host's memory, for offload; without it none
[peak_flops]                    # dense, a second
bf16 = 989e12
[efficiency]                    # achieved shares and times; `treadle.estimate.efficiency` has their meaning
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from treadle.estimate.efficiency import check_efficiency, replace_constants
from treadle.estimate.rate_units import check_rate
from treadle.fields.input_files import Toml, read_toml
from treadle.fields.kinds import FROM_1, OneOf
from treadle.fields.nearest import did_you_mean

PRESETS = Path(__file__).parent / "presets" / "clusters"
GIB = 1 << 30
PRECISIONS = ("bf16", "fp8", "mxfp8", "nvfp4")
_FAMILY = {"mxfp8": "fp8"}
_SECTIONS, _TEXTS = ("peak_flops", "efficiency"), ("name", "gpu", "source")
_POSITIVE = ("memory_gib", "memory_bandwidth", "nvlink_bandwidth", "nic_bandwidth", "pcie_bandwidth")


@dataclass(frozen=True)
class Cluster:
    """GPUs of one kind, joined by NVLink in domains, and by NICs between them.

    Raises:
        ValueError: a size or a rate is no positive number, or none in its unit; the message names the field.

    """

    name: str
    num_gpus: int
    memory_gib: float
    memory_bandwidth: float
    """Bytes a second of a GPU's own memory."""

    nvlink_domain: int
    """GPUs that NVLink joins."""

    nvlink_bandwidth: float
    """Bytes a second, each way, of one GPU."""

    nic_bandwidth: float
    """Bytes a second, each way, of one GPU to other domains."""

    pcie_bandwidth: float
    """Bytes a second, each way, between a GPU and its host."""

    gpus_per_pcie: int = 1
    """GPUs that share one such link."""

    host_memory_gib: float = 0.0
    """A GPU's share of its host's memory, which bounds offload. 0: nothing can be offloaded."""

    peak_flops: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Floating-point operations a second, dense, by precision: bf16, fp8, mxfp8 (from Blackwell on), nvfp4."""

    efficiency: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Achieved shares and times (`treadle.estimate.efficiency`); defaults where absent."""

    gpu: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("num_gpus", "nvlink_domain", "gpus_per_pcie"):
            FROM_1.check(getattr(self, name), f"{name} of a cluster")
        rates = {f"peak_flops.{name}": value for name, value in self.peak_flops.items()}
        rates |= {name: getattr(self, name) for name in _POSITIVE}
        rates |= {"host_memory_gib": self.host_memory_gib} if self.host_memory_gib != 0 else {}
        for name, rate in rates.items():
            check_rate(name, rate)
        if not self.peak_flops.keys() <= set(PRECISIONS):
            unknown = sorted(self.peak_flops.keys() - set(PRECISIONS))
            raise ValueError(f"peak_flops has rates for {', '.join(PRECISIONS)}, got {', '.join(unknown)}")
        check_efficiency(self.efficiency)

    @property
    def memory_bytes(self) -> int:
        """Bytes of a GPU's memory."""
        return int(self.memory_gib * GIB)

    @property
    def host_memory_bytes(self) -> int:
        """Bytes of a GPU's share of its host's memory."""
        return int(self.host_memory_gib * GIB)

    def peak(self, precision: str) -> float:
        """Return the operations a second in a precision.

        Raises:
            ValueError: there is no such precision, or the GPU has no units for it; the message names those there are.

        """
        OneOf(PRECISIONS).check(precision, "a precision", f"{self.name} computes in {', '.join(self.peak_flops)}")
        found = self.peak_flops.get(precision)
        if found is None:
            instead = "take bf16 or another GPU, or " if "bf16" in self.peak_flops else ""
            raise ValueError(
                f"{self.name} computes in {', '.join(self.peak_flops)}, got {precision}; "
                f"{instead}add its rate to [peak_flops] of a cluster file"
            )
        return found


def family_of(precision: str) -> str:
    """Return the precision whose achieved shares it has where it has none of its own: fp8 for mxfp8."""
    return _FAMILY.get(precision, precision)


_FIELDS = {each.name for each in fields(Cluster)}


def load_cluster(name: str | Path) -> Cluster:
    """Read a cluster: a preset's name with how many GPUs (h100:2048), or a TOML file. Without a number it is one host.

    Raises:
        ValueError: there is no such preset or file, or it is no cluster.

    Example:
        >>> load_cluster("h100").name, load_cluster("h100:2048").name
        ('8 h100', '2,048 h100')

    """
    text = str(name)
    if Path(text).suffix == ".toml":
        return _from_table(read_toml(text), Path(text).stem)
    product = re.fullmatch(r"([0-9]+)[x*]([a-z]+[0-9]+)|([a-z]+[0-9]+)[x*]([0-9]+)", text.lower())
    if product is not None:
        raise ValueError(
            f"the number of GPUs follows a colon, got {text!r}; write {product[2] or product[3]}:"
            f"{product[1] or product[4]}"
        )
    preset, _, count = text.partition(":")
    preset = preset.lower()
    if count and not count.isdecimal():
        raise ValueError(f"after the colon is the number of GPUs, got {count!r}; for example h100:2048")
    table = {"gpu": preset} | ({"num_gpus": int(count), "name": f"{int(count):,} {preset}"} if count else {})
    return _from_table(Toml(text, table, {}), preset)


def _from_table(file: Toml, name: str) -> Cluster:
    source, table = file.source, file.table
    _check_kinds(file)
    base: dict[str, Any] = _preset(str(table["gpu"]), source) if "gpu" in table else {}
    merged = {**base, **{key: value for key, value in table.items() if not isinstance(value, dict)}}
    for key, value in table.items():
        if isinstance(value, dict):
            from_preset = base.get(key, {})
            merged[key] = replace_constants(from_preset, value) if key == "efficiency" else {**from_preset, **value}
    unknown = sorted(set(merged) - _FIELDS)
    if unknown:
        way_out = did_you_mean(unknown[0], sorted(_FIELDS))
        raise ValueError(f"{file.at(unknown[0])}: {unknown[0]} is no field of a cluster; {way_out}")
    needed = [each for each in ("num_gpus", "nvlink_domain", *_POSITIVE, "peak_flops") if each not in merged]
    if needed:
        raise ValueError(f"{source}: a cluster lacks {', '.join(needed)}; give them, or gpu = a preset")
    _check_domain(table, merged, source)
    if "num_gpus" not in table:  # one host: its name says how many
        count = merged["num_gpus"]
        merged["name"] = f"{merged['name']}, {count:,} GPUs" if "name" in merged else f"{count:,} {name}"
    return Cluster(**{"name": name, **merged})


def _check_kinds(file: Toml) -> None:
    """Refuse a section where a value belongs, a value where a section does, and a name that is no text."""
    for key in sorted(_FIELDS & file.table.keys()):
        value, place = file.table[key], f"{file.at(key)}: {key} of a cluster"
        if key in _SECTIONS and not isinstance(value, dict):
            raise ValueError(f"{place} is a section, got {value!r}; write [{key}], a line each")
        if key not in _SECTIONS and isinstance(value, dict):
            raise ValueError(f"{place} is a value, got a section; write {key} = ...")
        if key in _TEXTS and not isinstance(value, str):
            raise ValueError(f'{place} is text in quotes, got {value!r}; write {key} = "{value}"')


def _check_domain(table: Mapping[str, Any], merged: Mapping[str, Any], source: str) -> None:
    """Refuse a domain of a file that leaves a rest. Of a preset's domains some GPUs may be left unused."""
    domain, num_gpus = merged["nvlink_domain"], merged["num_gpus"]
    if "nvlink_domain" not in table or type(domain) is not int or type(num_gpus) is not int or domain < 1:
        return
    if num_gpus > domain and num_gpus % domain:
        nearest = max(size for size in range(1, domain) if num_gpus % size == 0)
        raise ValueError(
            f"{source}: nvlink_domain divides num_gpus ({num_gpus:,}), got {domain}; the next smaller that does is "
            f"{nearest}: say how many GPUs of each domain are used"
        )


def _preset(name: str, source: str) -> dict[str, Any]:
    file = PRESETS / f"{name}.toml"
    if not file.is_file():
        known = sorted(path.stem for path in PRESETS.glob("*.toml"))
        said = f"{source}: gpu is" if source.endswith(".toml") else "a cluster is a .toml file or"
        example = "" if source.endswith(".toml") else " (h100:2048)"
        other = "no other chip has its rates: for another GPU write a .toml file that starts from one of them"
        raise ValueError(f"{said} one of {', '.join(known)}{example}, got {name!r}; {other}")
    return read_toml(file).table
