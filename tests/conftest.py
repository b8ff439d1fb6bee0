"""What holds for all tests: workers side by side compute with a thread each, and hypothesis counts no seconds."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

if "PYTEST_XDIST_WORKER" in os.environ:
    # Before torch is imported, and for the processes that tests start. With as many threads as cores in each, threads
    # wait for one another while they keep the cores busy: a test of 5 s then takes 60.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("treadle", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("treadle")
