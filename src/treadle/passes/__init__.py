"""Small passes, each to a Program: Schedule -> Program -> Program.

    cells.py        a schedule, sound or not, at cell granularity: what the verifier of schedules judges
    layers.py       templates of what a cell does on its lanes
    layer_lanes.py  templates as columns, with messages in the sender's order, copies, and dependencies by the rule
    step_end.py     reductions, ties, clipping, the optimizer and gathered parameters, appended (append.py)
    launch.py       one launch order a rank over all its communicators, taken from the execution, so no two ranks
                    contradict each other
    mesh.py         copies of a pipeline side by side, joined in expert and data-parallel groups

Lanes are never joined at the ends of cells. A host wait holds up only the dispatch that needs it, as if a thread of
its own waited; a runtime that waits in the launching thread is slower when its queues run dry.
"""
