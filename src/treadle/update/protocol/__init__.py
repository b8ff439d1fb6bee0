"""The decisions of a weight update as pure functions, `(state, event) -> (state, actions)`, and the messages.

There are no sockets and no clocks here: the time comes with a message, and only leases need it. The coordinator, the
update ranks, the workers and the log call these functions, and so does the model checker of the tests
(`tests/support/update/model_checker.py`): it explores the code that runs.

The checker walks all orders of messages, ends of processes, restarts, replaced workers, too few ranks and a second
log, and, where leases end, time, late and lost reports and grants, workers that are cut off, and two coordinators. It
asks in every state whether each serving worker serves the committed version, whole. Without log ids, members
or slots, or a rule of leases, it finds each of the faults that they prevent.
"""
