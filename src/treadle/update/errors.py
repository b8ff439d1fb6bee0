"""The error of a failed update, which every update rank raises."""

from __future__ import annotations

from treadle.host.errors import PortableError
from treadle.update.protocol.control import Fault, Phase


class UpdateError(PortableError, RuntimeError):
    """An attempt failed. `who` is to blame, in `phase`, at `bucket` (-1 outside of loading).

    `committed`: the version had been decided before, so every worker that can will serve it. `corrupt`: bytes that a
    worker loaded differed from their source's. Another `update` may succeed, unless a rank was lost.
    """

    def __init__(self, fault: Fault) -> None:
        self.who, self.phase, self.bucket, self.text = fault.who, fault.phase, fault.bucket, fault.text
        self.epoch, self.committed, self.corrupt = fault.epoch, fault.committed, fault.corrupt
        where = f"in phase {fault.phase}" + (f", bucket {fault.bucket}" if fault.bucket >= 0 else "")
        after = "; its version is committed, and served by every worker that can" if fault.committed else ""
        super().__init__(f"{fault.who}, {where} of attempt {fault.epoch}: {fault.text}{after}")

    @property
    def fault(self) -> Fault:
        """The error as a message to other ranks."""
        return Fault(self.epoch, self.who, self.phase, self.bucket, self.text, self.corrupt, committed=self.committed)


def failure(epoch: int, who: str, phase: Phase, text: str, bucket: int = -1) -> UpdateError:
    """An error that this rank found itself."""
    return UpdateError(Fault(epoch, who, phase, bucket, text))
