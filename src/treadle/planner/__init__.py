"""Searching: the ways to train a model on a cluster, bounded, simulated and ranked.

space.py           which jobs there are: every knob and its values
stage_layout.py    which blocks each stage gets
structure.py       Programs by what they depend on, lowered once
simulated_step.py  a job's step, simulated; the makespan of many micro-batches from that of few
least_time.py      a time that no order of a job's ops can beat
front.py           the jobs that no other beats in both time and memory
moving_parts.py    what makes a job less simple, in order
advised_job.py     the simplest job within the error of the fastest
offload_choice.py  as little offload as makes a job fit
ranked_search.py   all of it in a row
alternatives.py    the chosen job beside those that differ in one knob
planned_step.py    the chosen job in full: verified, measured
plan_directory.py  its files, as a target of other commands
plan_page.py       its page, with charts by front_chart.py, plan_bars.py and step_picture.py
uncertainty.py     what is uncertain about it, by source
"""

from treadle.planner.find_plan import find_plan
from treadle.planner.job_estimate import JobEstimate
from treadle.planner.ranked_search import SearchResult, search
from treadle.planner.space import SearchSpace

__all__ = ["JobEstimate", "SearchResult", "SearchSpace", "find_plan", "search"]
