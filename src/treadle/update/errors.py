"""What an update that did not come about raises, on every update rank."""

from __future__ import annotations

from treadle.host.errors import PortableError
from treadle.update.protocol.control import Fault, Phase


class UpdateError(PortableError, RuntimeError):
    """An attempt ended. `committed`: its version had been decided before, so workers that live will serve it."""

    def __init__(self, fault: Fault, *, committed: bool = False) -> None:
        self.who, self.phase, self.bucket, self.text = fault.who, fault.phase, fault.bucket, fault.text
        self.epoch, self.committed, self.corrupt = fault.epoch, committed, fault.corrupt
        where = f"in phase {fault.phase}" + (f", bucket {fault.bucket}" if fault.bucket >= 0 else "")
        after = "; its version is committed, and served by every worker that can" if committed else ""
        super().__init__(f"{fault.who}, {where} of attempt {fault.epoch}: {fault.text}{after}")

    @property
    def fault(self) -> Fault:
        """As it is told to others."""
        return Fault(self.epoch, self.who, self.phase, self.bucket, self.text, self.corrupt)


def failure(epoch: int, who: str, phase: Phase, text: str, bucket: int = -1) -> UpdateError:
    """An error of this rank's own finding."""
    return UpdateError(Fault(epoch, who, phase, bucket, text))
