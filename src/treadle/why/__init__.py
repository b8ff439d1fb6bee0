"""Why a measured run is slow: simulated again with one thing after the other made ordinary."""

from __future__ import annotations

from treadle.why.cause import StragglerCause
from treadle.why.report import WhyReport, analyse

__all__ = ["StragglerCause", "WhyReport", "analyse"]
