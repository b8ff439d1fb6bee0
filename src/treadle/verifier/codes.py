"""The meaning of each code, why it matters and what to do: the text of `treadle explain`."""

from __future__ import annotations

from typing import NamedTuple

from treadle.fields.nearest import did_you_mean


class Explanation(NamedTuple):
    """A code in words."""

    title: str
    meaning: str
    example: str
    wayout: str


CODES: dict[str, Explanation] = {
    "T101": Explanation(
        "an action is missing",
        "Every micro-batch needs one F on each stage and one backward: B, or I and W. Without it a gradient is "
        "wrong, and whoever waits for its output waits for ever.",
        "0: F0.0 F1.0 B0.0            (B1.0 is missing)",
        "Add the action to the row of the rank that holds the stage, or lower '# microbatches'.",
    ),
    "T102": Explanation(
        "an action runs twice",
        "The same F, B, I or W stands twice, or B stands beside I or W of the same micro-batch: its gradient would "
        "count twice, and its second message shifts every later one on the channel.",
        "0: F0.0 F1.0 B0.0 B1.0 W1.0  (B1.0 has done what W1.0 does)",
        "Remove one. Use B for a whole backward, or I (dgrad) and W (wgrad), never both.",
    ),
    "T103": Explanation(
        "actions of one rank in the wrong order",
        "An action stands before one of the same rank that it needs: B before its F, W before its I, or in a V the "
        "second chunk before the first. A rank runs its row in order, so it waits for itself.",
        "0: B0.0 F0.0",
        "Move the needed action to the front.",
    ),
    "T104": Explanation(
        "a pair whose halves need each other",
        "An overlapped cell starts its two halves together, but one needs the result of the other: F and B of the "
        "same micro-batch on the last stage, say. interleaved-overlap runs one warm-up more for this reason.",
        "3: F0.0 (F1.0|B1.0)",
        "Pair the forward with an earlier micro-batch's backward, or run the two one after the other.",
    ),
    "T105": Explanation(
        "an action that the schedule has no place for",
        "Its micro-batch is not below '# microbatches' (half of it in each direction of a bidirectional schedule), "
        "or its chunk not below '# vpp'. It would compute on data that nobody sends.",
        "# microbatches: 2\n0: F0.0 F1.0 F2.0 ...",
        "Correct the number, or the line at the top.",
    ),
    "T201": Explanation(
        "deadlock: ops wait for each other in a circle",
        "Lanes run in order, a send and its receive complete together, and an action waits for its inputs. The "
        "chain shown leads back to where it began, so none of its ops can ever start. The rest of the step waits "
        "behind them.",
        "0: F0.0 B0.0 F1.0 B1.0        (B0.0 needs rank 1's B0.0, which is behind F1.0 ...)\n"
        "1: F0.0 F1.0 B0.0 B1.0        (... which needs rank 0's F1.0, which is behind B0.0)",
        "Follow the chain, and break it where an action can move forward or a receive can be posted earlier. If a "
        "step needs a buffer to be freed, a larger `ring` resolves it.",
    ),
    "T202": Explanation(
        "a send without a receive, or a receive without a send",
        "The k-th send on a channel meets the k-th receive. One side has more than the other: the surplus waits "
        "until a timeout, and the ones before it may have met the wrong partner.",
        "0: F0.0 F1.0 ...\n1: F0.0 ...                   (rank 1 never receives F1.0)",
        "Look for an action that is missing or double on one of the two ranks, or for a '# receive' line that "
        "leaves one out.",
    ),
    "T203": Explanation(
        "an action that waits for something that never happens",
        "What it needs by the dependency rule is in no row, or no receive for it is posted.",
        "0: B0.0                       (F0.0 never runs)",
        "Add what it needs; a '# receive' line must name every message its rank reads on that channel.",
    ),
    "T204": Explanation(
        "messages cross: wrong data",
        "Channels have no tags (NCCL has none): the k-th send fills the k-th receive. Here their names differ, so "
        "an action computes on another micro-batch's data. Nothing hangs, and nothing says so at run time.",
        "# receive 0>1: F1.0 F0.0      (sent as F0.0 F1.0)",
        "Post receives in the sender's order (`receives='sender'`, the default), not in the order of use.",
    ),
    "T205": Explanation(
        "ops that go together differ in kind or size",
        "The k-th collective of a group meets the k-th of every member, a send its receive. If one of them is another "
        "kind of op or moves another number of bytes, none of them ends: on a cluster that is a hang until a timeout.",
        "rank 0 ep: dispatch, combine\nrank 1 ep: combine, dispatch",
        "Give every member of a group the same ops in the same order, with sizes that agree.",
    ),
    "T206": Explanation(
        "ranks launch their communication in orders that contradict each other",
        "A rank launches on all its communicators in one order. Two ranks that launch two collectives of different "
        "groups in opposite orders can deadlock, even on different streams: each occupies what the other waits for.",
        "rank 0 launches: dispatch of its expert group, then reduce_grad\n"
        "rank 1 launches: reduce_grad, then the dispatch",
        "Number the launches of every rank by one order over the whole program; lowering does so by the time of start.",
    ),
    "T207": Explanation(
        "hangs on shared communicators",
        "Channels share a communicator: a pair of ranks has one, or the whole group. Its messages run one after the "
        "other, in the order in which each rank issues them, and one that is larger than the backend's buffer ends "
        "only when its receive has started. Here each message of the circle waits for the next: the step hangs, when "
        "messages are large or always, as the finding says.",
        "rank 0: 0SEND_F1,0RECV_B0     (the send waits for 1RECV_F1 ...)\n"
        "rank 1: 1SEND_B0,1RECV_F1     (... which is behind 1SEND_B0, which waits for 0RECV_B0, behind the first)",
        "Issue a receive of the circle earlier, so that both ranks issue the two messages in one order (torch: without "
        "`defer_pp_recv`; `--receives sender` for files of cells). Or put the messages of the circle into one batch "
        "(`batch_isend_irecv`), or give each direction of the pipe a process group of its own; the finding names a "
        "layout that ends. With `-o circle.svg`, `treadle verify` draws the circle.",
    ),
    "T301": Explanation(
        "more activations alive than the limit",
        "Activations of (mb, chunk) live from the start of F to the end of B, or of W where the backward is split.",
        "treadle verify gpipe --pp 4 -m 8 --max-activations 4",
        "Run backwards earlier, take a schedule that holds less ('treadle schedules' lists what each holds), or raise "
        "the limit.",
    ),
    "T302": Explanation(
        "more bytes of activations than the limit",
        "What forward parts save is held until their wgrad ends, or is out on the host between its offload and "
        "its onload. The peak is over the execution in which every op starts as soon as it can under the given costs.",
        "treadle verify 1f1b --pp 4 -m 8 --layers 4 --costs deepseek-v3-h800 --memory-limit 4e9",
        "Offload (`offload=True`), take a schedule that holds less, or raise the limit.",
    ),
    "T401": Explanation(
        "an op that does not wait for what it reads or overwrites",
        "By the dependency rule it reads what another op makes, but neither its lane nor its dependencies, nor any "
        "chain of them, make it wait. It may come in time under some durations; under others it reads too early.",
        "combine_b of a layer that was offloaded, without a dependency on its onload; a broadcast into an IPC buffer, "
        "without one on the reload before it",
        "Add the dependency.",
    ),
}


def explain(code: str) -> Explanation:
    """Return what a code of a finding means.

    Args:
        code: such as T201.

    Returns:
        An Explanation: title, meaning, example and the way out.

    Raises:
        ValueError: there is no such code; the message names those there are.

    Example:
        >>> explain("T201") is CODES["T201"]
        True

    """
    found = CODES.get(code.upper())
    if found is None:
        raise ValueError(f"{code!r} is not a code of a finding; {did_you_mean(code, CODES)}")
    return found
