"""`treadle balance`."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from treadle.cli.commands.simulate import rank_ranges
from treadle.cli.common_options import Json, spread_options
from treadle.cli.job_flags import JobFlags
from treadle.cli.output import print_json
from treadle.cli.step_flags import layout_blocks
from treadle.cli.tables import rows_table
from treadle.cli.target import Microbatches, Pp, Target, Vpp
from treadle.cli.terminal import out, suggest, working
from treadle.costs import Costs, load_costs
from treadle.ir import Schedule
from treadle.ir.blocks import LAYERS, check_blocks, write_layout
from treadle.ir.placement import Placement
from treadle.ir.show import show_held, show_time
from treadle.ir.trace import Clock
from treadle.lowering import LoweringOptions
from treadle.passes.cut import cut_evenly
from treadle.planner.balance import balance_blocks
from treadle.planner.stage_costs import CutCosts, StageCost, model_blocks, weigh
from treadle.schedules import default_schedule
from treadle.simulator import Metrics, measure
from treadle.step import Step

if TYPE_CHECKING:
    from treadle.cli.printed import BalanceJson, CutJson

_PLACEMENTS = {"loop": Placement.loop, "v": Placement.v}


@dataclass(frozen=True)
class _Cut:
    """A cut with its costs, and its step where a schedule is given."""

    name: str
    costs: CutCosts
    step: Metrics | None

    @property
    def layout(self) -> str:
        return write_layout(self.costs.blocks)


@spread_options
def balance(
    flags: JobFlags,
    costs_name: Annotated[
        str | None,
        typer.Option(
            "--costs", help="How long blocks take: a preset, or a TOML file; instead of --model and --cluster."
        ),
    ] = None,
    pp: Pp = None,
    vpp: Vpp = None,
    model_layers: Annotated[
        int | None, typer.Option(help="Layers of the model, where neither costs nor a layout have them.")
    ] = None,
    dense: Annotated[int | None, typer.Option(help="Layers, from the first on, that are dense.")] = None,
    mtp: Annotated[int | None, typer.Option(help="MTP blocks after the layers.")] = None,
    layouts: Annotated[
        list[str] | None, typer.Option("--layout", help="A cut to compare with, as Megatron writes it; several times.")
    ] = None,
    placement_name: Annotated[
        str | None, typer.Option("--placement", help="Without --schedule: loop (the default) or v.")
    ] = None,
    block_in_each: Annotated[
        bool, typer.Option("--block-in-each", help="A stage needs a block, but no layer: E, m or L alone will do.")
    ] = False,
    schedule_name: Annotated[
        str | None, typer.Option("--schedule", help="Simulate a step of each cut under this schedule; needs -m.")
    ] = None,
    microbatches: Microbatches = None,
    as_json: Json = False,
) -> None:
    """Cuts a model into stages so that the slowest stage is the fastest possible, and weighs other cuts beside it.

    A stage takes what its blocks take together, forward and backward, of one micro-batch: as the costs have it, or as
    `treadle plan` estimates it for a model on a cluster.
    """
    flags.check(costs_name)
    schedule = _schedule(schedule_name, pp, vpp, microbatches, placement_name)
    placement = schedule.placement if schedule is not None else _placement(placement_name, pp, vpp)
    if costs_name is not None:
        costs, options = load_costs(costs_name), LoweringOptions()
    else:
        costs, options = flags.lowering(placement, schedule)
    given = [(text, layout_blocks(text, dense, costs)) for text in layouts or ()]
    model = _model(costs, given, model_layers, dense, mtp)
    rows: list[tuple[str, tuple[str, ...]]] = []
    if sum(map(model.count, LAYERS)) >= placement.num_stages or not block_in_each:
        rows.append(("default", cut_evenly(model, placement.num_stages)))
    rows.append(("balanced", balance_blocks(costs, model, placement.num_stages, layer_in_each=not block_in_each)))
    with working("simulating"):
        cuts = [_weigh(name, blocks, costs, placement, schedule, options) for name, blocks in (*rows, *given)]
    if as_json:
        print_json("balance", _as_dict(cuts, model, costs.clock, placement, schedule))
        return
    for cut in cuts:
        _print_stages(cut, costs.clock)
    _print_cuts(cuts, costs.clock)
    balanced = next(cut for cut in cuts if cut.name == "balanced")
    layout = balanced.layout
    out.print(f"balanced, as Megatron reads it: [bold]{escape(layout)}[/]", soft_wrap=True)
    if not block_in_each:
        freer = weigh(costs, balance_blocks(costs, model, placement.num_stages, layer_in_each=False), placement)
        _print_freer(cuts, freer, costs.clock)
    name = schedule_name or default_schedule(placement.num_stages // placement.pp)
    if costs_name is None:
        sizes = f"--pp {placement.pp} --vpp {placement.vpp} --schedule {name}"
        suggest(f"treadle plan {flags} {sizes} --layout '{layout}'")
        return
    target = Target(name, pp, vpp, microbatches or 4 * placement.pp)
    denses = f" --dense {model.count('d')}" if "d" in model else ""
    suggest(f"treadle simulate {target} --layout '{layout}'{denses} --costs {shlex.quote(costs_name)}")


def _schedule(
    name: str | None, pp: int | None, vpp: int | None, microbatches: int | None, placement: str | None
) -> Schedule | None:
    if name is None:
        if microbatches is not None:
            raise ValueError(f"-m {microbatches} is about a step, which needs a schedule; add --schedule 1f1b")
        return None
    if placement is not None:
        raise ValueError(f"{name} brings its own placement, got --placement {placement}; leave it out")
    return Target(name, pp, vpp, microbatches).schedule()


def _placement(name: str | None, pp: int | None, vpp: int | None) -> Placement:
    if pp is None:
        raise ValueError("how many ranks there are is missing; add --pp N, and --vpp N for several chunks on each")
    chosen = name if name is not None else "loop"
    if chosen not in _PLACEMENTS:
        raise ValueError(
            f"--placement is {' or '.join(_PLACEMENTS)}, got {name!r}; with --schedule the schedule brings its own"
        )
    chunks = vpp if vpp is not None else 2 if chosen == "v" else 1
    for option, value in (("--pp", pp), ("--vpp", chunks)):
        if value < 1:
            raise ValueError(f"{option} is a whole number from 1, got {value}")
    return _PLACEMENTS[chosen](pp, chunks)


def _model(
    costs: Costs, given: list[tuple[str, tuple[str, ...]]], layers: int | None, dense: int | None, mtp: int | None
) -> str:
    """The blocks of the model; layouts that are compared must have the same."""
    for _, blocks in given:
        check_blocks(blocks)
    said = layers is not None or "layers" in costs.model
    model = "".join(given[0][1]) if given and not said else model_blocks(costs, layers=layers, dense=dense, mtp=mtp)
    for text, blocks in given:
        if "".join(blocks) != model:
            raise ValueError(
                f"layout {text} has {_counted(''.join(blocks))}, and the model {_counted(model)}; "
                "compare cuts of one model: --model-layers, --dense and --mtp set it"
            )
    return model


def _counted(blocks: str) -> str:
    layers, dense, mtp = sum(map(blocks.count, LAYERS)), blocks.count("d"), blocks.count("m")
    return f"{layers} layers ({dense} dense) and {mtp} MTP block{'' if mtp == 1 else 's'}"


def _weigh(
    name: str,
    blocks: tuple[str, ...],
    costs: Costs,
    placement: Placement,
    schedule: Schedule | None,
    options: LoweringOptions,
) -> _Cut:
    weighed = weigh(costs, blocks, placement)
    if schedule is None:
        return _Cut(name, weighed, None)
    return _Cut(name, weighed, measure(Step(schedule, costs, replace(options, blocks=blocks)).trace))


def _as_dict(
    cuts: list[_Cut], model: str, clock: Clock, placement: Placement, schedule: Schedule | None
) -> BalanceJson:
    return {
        "unit": clock.unit,
        "saved_unit": cuts[0].costs.saved_unit,
        "model": model,
        "placement": [list(stages) for stages in placement.stages],
        "schedule": schedule.name if schedule is not None else None,
        "microbatches": schedule.num_microbatches if schedule is not None else None,
        "cuts": [_cut_object(cut, clock) for cut in cuts],
    }


def _cut_object(cut: _Cut, clock: Clock) -> CutJson:
    weighed, step = cut.costs, cut.step
    return {
        "name": cut.name,
        "layout": cut.layout,
        "slowest_stage": weighed.slowest_stage,
        "slowest_stage_time": clock.show(weighed.stages[weighed.slowest_stage].ticks),
        "slowest_rank": weighed.slowest_rank,
        "slowest_rank_time": clock.show(weighed.ranks[weighed.slowest_rank]),
        "stages": [
            {"blocks": stage.blocks, "time": clock.show(stage.ticks), "saved": stage.saved} for stage in weighed.stages
        ],
        "step": None
        if step is None
        else {"makespan": clock.show(step.makespan), "bubble": step.bubble, "peak": step.peak},
    }


def _print_freer(cuts: list[_Cut], freer: CutCosts, clock: Clock) -> None:
    """Print the cut with stages that have no layer, if it is faster."""
    slowest = {cut.name: _slowest(cut.costs) for cut in cuts}
    least, most = _slowest(freer), slowest["balanced"]
    if least >= most:
        return
    if slowest.get("default") == most:
        out.print("no cut with a layer in each stage has a faster slowest stage than the default", soft_wrap=True)
    out.print(
        f"faster, without a layer in some stages (--block-in-each): [bold]{escape(write_layout(freer.blocks))}[/], the "
        f"slowest stage takes {show_time(clock, least)} for {show_time(clock, most)}",
        soft_wrap=True,
    )


def _slowest(costs: CutCosts) -> int:
    return costs.stages[costs.slowest_stage].ticks


def _print_stages(cut: _Cut, clock: Clock) -> None:
    """Print a cut's stages; those that are alike share a row."""
    alike: dict[StageCost, list[int]] = {}
    for number, stage in enumerate(cut.costs.stages):
        alike.setdefault(stage, []).append(number)
    table = rows_table("stages", "blocks", "forward and backward", "saved")
    for stage, numbers in alike.items():
        saved = show_held(stage.saved, cut.costs.saved_unit)
        table.add_row(rank_ranges(numbers), stage.blocks, show_time(clock, stage.ticks), saved)
    out.print(f"[bold]{escape(cut.name)}[/]", soft_wrap=True)
    out.print(table)


def _print_cuts(cuts: list[_Cut], clock: Clock) -> None:
    simulated = cuts[0].step is not None
    table = rows_table("", "slowest stage", "slowest rank", *(("makespan", "bubble", "peak") if simulated else ()))
    for cut in cuts:
        weighed = cut.costs
        stage, rank = weighed.slowest_stage, weighed.slowest_rank
        cells = [
            f"{stage}: {show_time(clock, weighed.stages[stage].ticks)}",
            f"{rank}: {show_time(clock, weighed.ranks[rank])}",
        ]
        if cut.step is not None:
            peak = show_held(cut.step.peak, cut.step.peak_unit)
            cells += [show_time(clock, cut.step.makespan), f"{cut.step.bubble:.2%}", peak]
        table.add_row(f"[bold]{escape(cut.name)}[/]", *cells)
    out.print(table)
