"""Orders of cells found by a solver: no worse than any schedule here, and how far from the best there can be."""

from treadle.synthesize.limits import MemoryLimits
from treadle.synthesize.result import Standing, Synthesis
from treadle.synthesize.solver import SolverOptions
from treadle.synthesize.synthesis import synthesize_schedule

__all__ = ["MemoryLimits", "SolverOptions", "Standing", "Synthesis", "synthesize_schedule"]
