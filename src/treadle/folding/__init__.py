"""Folding: a mesh of 131,072 GPUs simulated exactly, with what is alike simulated once.

Replicas that are alike are simulated once, and so are members of an expert group that are alike. That holds while
nothing inside the step waits for a reduction; otherwise every GPU is simulated.

folding.py         a folded step: the end of every rank, exact
replicas.py        replicas of a pipeline, each simulated alone with one GPU column of each kind
step_tail.py       the end of a step over all replicas: reductions, and what waits for them
folded_metrics.py  metrics as of the Trace of every GPU
folded_path.py     the critical path
stragglers.py      how much longer a step takes when some GPUs are slow
"""

from treadle.folding.folding import Folded, fold
from treadle.folding.stragglers import StragglerStudy, straggler_study

__all__ = ["Folded", "StragglerStudy", "fold", "straggler_study"]
