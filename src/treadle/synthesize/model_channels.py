"""Channels in a CP-SAT model: messages of a channel go one after another, in the order of the tasks that send them.

Where every task that sends takes at least as long as a message, no message waits for another and nothing is added.
"""

from __future__ import annotations

from itertools import combinations, pairwise

from treadle.ir.schedule import Channel
from treadle.synthesize.task_model import TaskModel


def add_channels(model: TaskModel) -> None:
    """Give messages that may queue a time of arrival."""
    for channel in model.problem.channels:
        if model.problem.queues(channel):
            _add_channel(model, channel)


def _add_channel(model: TaskModel, channel: Channel) -> None:
    problem, senders = model.problem, model.problem.channels[channel]
    sent_at = 0
    for sender in sorted((s for s in senders if model.is_fixed(s)), key=lambda s: (model.end[s], problem.depth[s])):
        sent_at = max(sent_at, model.end[sender]) + problem.send_ticks[sender]
        model.arrival[sender] = sent_at
    moving = [sender for sender in senders if not model.is_fixed(sender)]
    for sender in moving:
        ticks = problem.send_ticks[sender]
        model.arrival[sender] = model.cp.new_int_var(0, model.most, "")
        model.cp.add(model.arrival[sender] >= model.end[sender] + ticks)
        model.cp.add(model.arrival[sender] >= sent_at + ticks)
    _keep_known_orders(model, moving)
    for one, other in combinations([sender for sender in moving if model.is_free(sender)], 2):
        if not (problem.alike and problem.tasks[one].of == problem.tasks[other].of):
            _keep_order(model, one, other)


def _keep_known_orders(model: TaskModel, moving: list[int]) -> None:
    """Messages of one stage, of micro-batches that are alike; those after the window, after the free ones."""
    problem = model.problem
    known = []
    if problem.alike:
        by_class: dict[object, list[int]] = {}
        for sender in moving:
            by_class.setdefault(problem.tasks[sender].of, []).append(sender)
        known += [pair for senders in by_class.values() for pair in pairwise(senders)]
    if model.window is not None and model.window.after:
        rank = problem.tasks[moving[0]].rank if moving else 0
        later = [number for number in model.window.after[rank] if number in set(moving)]
        known += list(pairwise(later))
        known += [(sender, later[0]) for sender in moving if later and model.is_free(sender)]
    for before, after in known:
        model.cp.add(model.arrival[after] >= model.arrival[before] + problem.send_ticks[after])


def _keep_order(model: TaskModel, one: int, other: int) -> None:
    """Two messages are sent in the order of their tasks, whichever that is."""
    first = model.cp.new_bool_var("")
    for before, after, when in ((one, other, first), (other, one, first.negated())):
        model.cp.add(model.start[after] >= model.end[before]).only_enforce_if(when)
        model.cp.add(model.arrival[after] >= model.arrival[before] + model.problem.send_ticks[after]).only_enforce_if(
            when
        )
