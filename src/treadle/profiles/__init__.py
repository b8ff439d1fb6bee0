"""Profiles of other trainers' runs: read, put on one clock, matched with a schedule, made into measured steps.

    files --reader--> Recording --assemble--> Imported: Schedule, Program, measured steps, remarks

A reader knows one form of file and nothing about pipelines; what comes after it knows pipelines and no file. What
could not be used is a Remark, which every command prints.

A Kineto file is not parsed: wanted categories are searched for in its bytes and only those events decoded, which
relies on `cat` standing before `args`. A kernel belongs to the innermost annotation around its launch. Where a file
names no micro-batches, the order of kinds must be that of a schedule that `generate` makes at this size. `clocks.py`
turns every message into a bound on two clocks and solves all bounds by longest paths; clocks that contradict nothing
stay.
"""
