"""The decisions of a weight update as pure functions: `(state, event) -> (state, actions)`, without sockets or clocks.

The coordinator, the update ranks, the workers and the log call them, and so does the model checker of the tests
(`tests/support/update/model_checker.py`): what it explores is what runs.
"""
