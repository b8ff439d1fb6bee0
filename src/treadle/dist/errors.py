"""Which errors are this rank's own, and which a communicator's."""

from __future__ import annotations

import torch

from treadle.host.errors import TreadleError

OWN_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError)
"""Errors of this rank's own device, wherever they come up: a call that sends or receives may be the first to tell of a
kernel that failed before it."""


class CommunicatorError(TreadleError, RuntimeError):
    """A communicator of a device has met an error that no wait has raised, as waits only order streams there."""
