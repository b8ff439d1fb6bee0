"""Who has which bytes of which tensor, who wants which, and the plan that moves them. Pure: no torch.

A weight update is a Program: a Layout without forward parts, and ops H2D, BROADCAST and RELOAD. An update rank has
boxes of tensors, a worker wants boxes of tensors. `plan_update` chooses a source for every wanted byte, fills buckets
(families together, large tensors cut) and assigns the parts of each bucket to workers. `update_rule.py` states the
dependencies once.
"""
