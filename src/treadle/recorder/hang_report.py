"""What a hang is, and why: a cause for each pipeline of the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from treadle.verifier.communicator_queues import Communicators

if TYPE_CHECKING:
    from treadle.recorder.printed_hang import HangJson, PipelineJson


@dataclass(frozen=True)
class HungPipeline:
    """One pipeline: the cause, and the chain from each rank that waits to it. Ranks are places in the pipeline."""

    cause: str
    sentence: str
    group: str
    ranks: tuple[int, ...]
    at_fault: tuple[int, ...]
    step: int | None
    ops: tuple[str, ...]
    circle: tuple[str, ...]
    waits: dict[int, tuple[str, ...]]

    def as_dict(self) -> PipelineJson:
        """Return what `--json` prints."""
        return {
            "cause": self.cause,
            "sentence": self.sentence,
            "group": self.group,
            "ranks": list(self.ranks),
            "at_fault": list(self.at_fault),
            "step": self.step,
            "ops": list(self.ops),
            "circle": list(self.circle),
            "waits": [{"rank": rank, "chain": list(chain)} for rank, chain in self.waits.items()],
        }


@dataclass(frozen=True)
class HangReport:
    """The pipelines of a run, those with a cause first; the ranks whose dumps were read; remarks."""

    schedule: str
    communicators: Communicators
    dumps: tuple[int, ...]
    pipelines: tuple[HungPipeline, ...]
    remarks: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """The first cause in a sentence."""
        return self.pipelines[0].sentence

    def as_dict(self) -> HangJson:
        """Return what `--json` prints."""
        return {
            "schedule": self.schedule,
            "dumps": list(self.dumps),
            "communicators": self.communicators,
            "pipelines": [pipeline.as_dict() for pipeline in self.pipelines],
            "remarks": list(self.remarks),
        }
