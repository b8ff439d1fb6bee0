"""What does not run on the device of threads, and why: by the beginning of a test's id."""

from __future__ import annotations

SIM_SKIPS = {
    "tests/update/test_devices.py": "its device takes torch's one place for devices of others, where sim is",
}


def why_not_on_sim(nodeid: str) -> str | None:
    """The reason why a test does not run there; None where it does."""
    return next((why for begin, why in SIM_SKIPS.items() if nodeid.startswith(begin)), None)
