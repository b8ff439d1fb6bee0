"""Peaks of activations against memory that was measured: 1F1B and interleaved 1F1B of one model on eight GPUs.

AMD-AGI/Primus (MIT), tools/visualization/pp_vis/pp_data_example/gpu8_layer64_gbs16: PP 8, 64 layers, 16 micro-batches;
the reserved memory of each rank in GB, in the last of 20 steps.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

import treadle
from treadle.lowering import LoweringOptions

ONE_F_ONE_B = np.array([104.330, 95.566, 88.113, 80.334, 73.146, 65.852, 58.072, 52.203])
INTERLEAVED = np.array([130.604, 122.340, 115.396, 108.461, 101.027, 93.135, 85.166, 78.383])


def peaks(name: str, vpp: int | None = None) -> npt.NDArray[np.float64]:
    """Layers of activations that each rank holds at once."""
    schedule = treadle.generate(name, pp=8, microbatches=16, vpp=vpp)
    report = treadle.verify(treadle.lower(schedule, options=LoweringOptions(model_layers=64)))
    assert report.peak_unit == "layers"
    return np.array(report.peaks, np.float64)


def test_a_layers_bytes_fitted_on_1f1b_predict_the_memory_of_interleaved_within_two_percent() -> None:
    before, after = peaks("1f1b"), peaks("interleaved", 2)
    gb_a_layer, _ = np.polyfit(before, ONE_F_ONE_B, 1)
    assert 0.92 < gb_a_layer < 0.95
    assert (after - before == 28).all()
    predicted = ONE_F_ONE_B + gb_a_layer * (after - before)
    assert np.abs(predicted / INTERLEAVED - 1).max() < 0.02
