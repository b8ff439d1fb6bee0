"""Why a measured run is slow: its Program executed again with one thing after another set to its usual duration.

An op's duration is its transfer, from the last start of its group to its own end, so waiting counts once, where the
late rank is. Of what stands out by itself, the cause is what costs a step most. What-ifs scale durations and keep how
they vary, so that long sequences on the last stage count as unequal micro-batches and not as a slow stage.
"""

from __future__ import annotations

from treadle.diagnosis.cause import StragglerCause
from treadle.diagnosis.why_report import WhyReport, analyse

__all__ = ["StragglerCause", "WhyReport", "analyse"]
