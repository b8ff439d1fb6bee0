"""The stream checker: shows on a machine without a GPU whether the order of a GPU's streams is right.

    with check_streams() as checker:
        pipe = Pipeline(stages, schedule, mesh=mesh, loss_fn=loss_fn)
        pipe.step(inputs, targets)
        pipe.close()
    print(checker.report())

Inside the block the CPU is a device with streams, events, an allocator that gives memory back to the stream it came
from, and communicators with streams of their own. The same launch code runs as on a GPU, on real tensors, in the order
of launches, and everything that it does is noted. The report then says what nothing orders, with op, stream, tensor and
line. It knows what streams, events, the caching allocator and NCCL promise, and nothing more.

`log` is what is noted, `recorder` the device, `kernels` the modes that see torch's kernels, `communicator` a group with
a stream, `analysis` the judgement, `findings` how it is told.

It does not see kernels that get pointers (Triton, DeepEP), aliasing below a storage, or whether NCCL keeps its
promises.
"""

from treadle.runtime.checker.checker import CheckReport, StreamChecker, check_streams
from treadle.runtime.checker.stream_findings import FindingKind, StreamFinding, order_findings

__all__ = ["CheckReport", "FindingKind", "StreamChecker", "StreamFinding", "check_streams", "order_findings"]
