"""Counts of `benchmarks/device_counts.py`: a module for each room, with a function `counts` that takes nothing.

`counts` returns numbers by their names; a name ends with its unit. `before.json` has those of the tree that the table
compares with, written by the same modules.
"""
