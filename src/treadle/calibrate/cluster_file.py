"""A fitted cluster as a TOML file that `load_cluster` reads: what differs from its preset, and all its constants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from treadle.calibrate.calibration_report import show_constant
from treadle.calibrate.constants_of_job import value_of
from treadle.estimate import Cluster, load_cluster
from treadle.estimate.cluster import PRESETS
from treadle.fields.input_files import toml_value

_TABLES = ("peak_flops", "efficiency")


def cluster_text(cluster: Cluster, before: Cluster, about: str) -> str:
    """Return a cluster's file.

    Args:
        cluster: the fitted one.
        before: what it was fitted from; constants that differ are marked.
        about: a line for the head of the file.

    """
    preset = load_cluster(cluster.gpu) if (PRESETS / f"{cluster.gpu}.toml").is_file() else None
    lines = [f"# {about}", f"name = {toml_value(cluster.name)}"]
    if preset is not None:
        lines.append(f"gpu = {toml_value(cluster.gpu)}")
    lines.append(f"num_gpus = {cluster.num_gpus}")
    plain = [each.name for each in fields(Cluster) if each.name not in ("name", "gpu", "num_gpus", *_TABLES)]
    for name in plain:
        value = getattr(cluster, name)
        if preset is None or value != getattr(preset, name):
            lines.append(f"{name} = {toml_value(value)}")
    if preset is None or cluster.peak_flops != preset.peak_flops:
        lines += ["", "[peak_flops]", *_entries(cluster.peak_flops)]
    lines += ["", "[efficiency]"]
    for name, value in cluster.efficiency.items():
        former = value_of(before, name)
        lines.append(
            f"{name} = {toml_value(value)}" + (f"  # it was {show_constant(former)}" if value != former else "")
        )
    return "\n".join(lines) + "\n"


def _entries(table: Mapping[str, float]) -> list[str]:
    return [f"{name} = {toml_value(value)}" for name, value in table.items()]
