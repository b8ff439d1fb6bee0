"""Searching: the ways to train a model on a cluster, bounded, simulated and ranked.

space.py       which jobs there are: every knob and its values
layout.py      which blocks each stage gets
structure.py   Programs by what they depend on, lowered once
step.py        a job's step, simulated; the makespan of many micro-batches from that of few
bound.py       a time that no order of a job's ops can beat
front.py       the jobs that no other beats in both time and memory
search.py      all of it in a row
why.py         the chosen job beside those that differ in one knob
chosen.py      the chosen job in full: verified, measured, as files
"""

from treadle.search.find_plan import find_plan
from treadle.search.judged import Judged
from treadle.search.search import Found, search
from treadle.search.space import SearchSpace

__all__ = ["Found", "Judged", "SearchSpace", "find_plan", "search"]
