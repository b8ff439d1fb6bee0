"""What to change: `balance` cuts a model into stages, `why` finds what slows a run down."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from treadle.api.load_save import load_run
from treadle.api.verbs import CostsOrName, checked_costs
from treadle.diagnosis.why_report import WhyReport, analyse
from treadle.host.errors import named
from treadle.ir import Placement
from treadle.ir.steps import Steps
from treadle.ir.trace import Trace
from treadle.planner.balance import balance_blocks
from treadle.planner.stage_costs import CutCosts, model_blocks, weigh
from treadle.profiles.imported import Imported


def balance(
    costs: CostsOrName,
    placement: Placement,
    *,
    model_layers: int | None = None,
    dense: int | None = None,
    mtp: int | None = None,
    layer_in_each: bool = True,
) -> CutCosts:
    """Cut a model into stages so that the slowest stage is as fast as possible.

    Args:
        costs: how long blocks take; or their name.
        placement: of stages on ranks: that of a schedule, `treadle.ir.Placement.loop(8)`, `.v(8)`.
        model_layers: layers of the model, where the costs do not give them.
        dense: layers, from the first on, that are dense; None as the costs' [model] has them.
        mtp: MTP blocks after the layers; None as the costs' [model] has them.
        layer_in_each: every stage has a layer; otherwise an embedding, MTP block or head alone will do.

    Returns:
        The cut, each stage and rank with its time. Its `blocks` are those of `LoweringOptions`.

    Raises:
        ValueError: there are too few layers, or the costs do not give their number or their time.

    Example:
        >>> schedule = treadle.generate("1f1b", pp=4, microbatches=8)
        >>> treadle.balance("unit", schedule.placement, model_layers=8).blocks
        ('Ett', 'tt', 'tt', 'ttL')

    """
    taken = checked_costs(costs)
    model = model_blocks(taken, layers=model_layers, dense=dense, mtp=mtp)
    blocks = balance_blocks(taken, model, placement.num_stages, layer_in_each=layer_in_each)
    return weigh(taken, blocks, placement)


def why(run: Trace | Steps | Imported | str | Path | Sequence[str | Path]) -> WhyReport:
    """Find why a run is slow: which worker, stage, kind of op or unequal data, by simulating it without them.

    Args:
        run: a measured Trace, measured Steps, what `import_profile` returned, or the paths of one run: a trace of
            Treadle, or the files of a profile.

    Returns:
        The slowdown, what each cause costs, and the cause that costs most.

    Raises:
        TypeError: `run` is something else.
        ValueError: the files hold no run, or a weight update.
        OSError: a file cannot be read.

    Example:
        >>> trace = treadle.simulate(treadle.generate("1f1b", pp=2, microbatches=4), "deepseek-v3-h800")
        >>> round(treadle.why(trace).slowdown, 3)
        1.0

    """
    found: object = run
    if isinstance(run, str | Path):
        found = load_run([Path(run)])
    elif isinstance(run, Sequence):
        found = load_run([Path(path) for path in run])
    elif isinstance(run, Trace):
        found = Steps.of(run)
    steps = found.steps if isinstance(found, Imported) else found
    if not isinstance(steps, Steps):
        raise TypeError(f"why takes a Trace, Steps, an imported profile or paths, got {named(run)}")
    return analyse(steps)
