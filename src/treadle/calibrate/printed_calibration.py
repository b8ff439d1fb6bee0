"""A calibration as `treadle calibrate --json` prints it."""

from __future__ import annotations

from typing import Annotated, TypedDict

from treadle.fields.kinds import Amount, Count, CountFrom1, Positive, Share


class RunJson(TypedDict):
    """A measured run as it is printed."""

    name: Annotated[str, "What the run is called: its column name, or its job."]
    line: Annotated[CountFrom1, "Its line in the file."]
    measured_s: Annotated[Positive, "The measured step, in seconds."]
    before_s: Annotated[Amount, "The estimate with the cluster's own constants, in seconds."]
    after_s: Annotated[Amount, "The estimate with the fitted ones, in seconds."]
    left_out_s: Annotated[
        Amount | None,
        "The estimate with constants fitted to all runs of other jobs, in seconds; null with fewer than three runs.",
    ]
    memory_bytes: Annotated[Count, "Bytes that the fullest GPU holds, by the estimate."]
    over_bytes: Annotated[Count, "Bytes of them that do not fit, though the run did; 0 where they fit."]
    suspicious: Annotated[bool, "The estimate after fitting is off by more than 15 %."]


class MedianErrorJson(TypedDict):
    """Errors as they are printed."""

    before: Annotated[Amount, "With the cluster's own constants."]
    after: Annotated[Amount, "With the fitted ones."]
    left_out: Annotated[Amount | None, "Each with constants fitted to the others; null with fewer than three runs."]


class MovedJson(TypedDict):
    """A fitted constant as it is printed."""

    name: Annotated[str, "Its name in [efficiency]."]
    before: Annotated[Amount, "What it was."]
    after: Annotated[Amount, "What it is."]
    told: Annotated[
        Share,
        "How far the runs constrain it: the share of the prior's variance that they remove, from 0 to 1.",
    ]


class CalibrateJson(TypedDict):
    """A calibration as it is printed."""

    cluster: Annotated[str, "The cluster's name."]
    gpus: Annotated[CountFrom1, "Its GPUs."]
    runs: Annotated[list[RunJson], "The measured runs, in the order of the file."]
    median_error: Annotated[
        MedianErrorJson,
        "Medians of the absolute errors of all runs, as shares of what was measured.",
    ]
    moved: Annotated[
        list[MovedJson],
        "Constants of [efficiency] that the fit changed, the best constrained first.",
    ]
    untold: Annotated[list[str], "Constants that no run depends on; they keep their values."]
    efficiency: Annotated[dict[str, Amount], "[efficiency] of the cluster with fitted constants."]
