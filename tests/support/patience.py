"""How long tests wait. Benchmarks judge speed; tests only tell an end from a hang, on a machine with other work too."""

from __future__ import annotations

SOON_S = 100.0
"""A process reacts within so many seconds to a fault that it is told of. On two idle cores it takes less than one."""

PATIENT_S = 300.0
"""A deadline that processes in good health keep."""

HUNG_S = 1200.0
"""After so many seconds a test gives its processes up and shows their stacks."""
