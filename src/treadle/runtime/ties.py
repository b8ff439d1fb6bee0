"""The agreement on ties before the first step: which parameters stages share, and that all ranks hold the same one.

`tied` names a parameter once and says what it is called in each stage that has it. What one rank says counts for all,
so ranks may give all of it, or each the names in its own stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

from torch import nn

from treadle.fields.nearest import did_you_mean
from treadle.host.errors import named
from treadle.ir.placement import Placement
from treadle.runtime.agreement import Claim
from treadle.runtime.model.tied import Tie
from treadle.runtime.parameter_claims import forms_of, parameters_of_experts

Tied: TypeAlias = Mapping[str, Mapping[int, str]]
"""For each tie, by a name of the user's, the parameter's name in the module of each stage that has it."""

TieNames: TypeAlias = dict[tuple[str, int], str]  # (tie, stage): the parameter's name
_Found: TypeAlias = dict[tuple[str, int], nn.Parameter]
_Row: TypeAlias = tuple[str, int, str]

_EXAMPLE = 'such as {"embedding": {0: "0.weight", -1: "1.weight"}}'


def check_tied(tied: object) -> None:
    """Refuse ties of another type, before any rank is waited for."""
    if tied is None:
        return
    whole = isinstance(tied, Mapping) and all(
        isinstance(name, str)
        and isinstance(names, Mapping)
        and all(isinstance(stage, int) and isinstance(param, str) for stage, param in names.items())
        for name, names in tied.items()
    )
    if not whole:
        raise TypeError(f"tied is {{name: {{stage: the parameter's name in it}}}}, {_EXAMPLE}, got {named(tied)}")


def rows_of(tied: Tied | None, num_stages: int) -> list[_Row]:
    """Return (tie, stage from 0 on, name) of what this rank names, or raise ValueError."""
    names: TieNames = {}
    for tie, said in (tied or {}).items():
        if not said:
            raise ValueError(f"the tie {tie!r} names no stage; a tie joins two stages or more, {_EXAMPLE}")
        for stage, param in said.items():
            if not -num_stages <= stage < num_stages:
                allowed = f"0 to {num_stages - 1}, or -1 to -{num_stages} from the end"
                raise ValueError(f"the tie {tie!r} names stage {stage}; stages are {allowed}")
            _merge(names, [(tie, stage % num_stages, param)])
    return [(tie, stage, param) for (tie, stage), param in names.items()]


def joined_names(rows: Iterable[Iterable[_Row]]) -> TieNames:
    """Return the names that all ranks gave, or raise ValueError, on all of them alike."""
    names: TieNames = {}
    for of_rank in rows:
        _merge(names, of_rank)
    for tie, num in Counter(tie for tie, _ in names).items():
        if num < 2:
            stage, param = next((stage, param) for (named, stage), param in names.items() if named == tie)
            raise ValueError(
                f"the tie {tie!r} has one stage, {stage} ({param}); a tie joins two stages or more: name it in each of "
                "them, or leave it out"
            )
    return names


def ties_of(
    names: TieNames, placement: Placement, pp_rank: int, modules: Mapping[int, nn.Module]
) -> tuple[tuple[Tie, ...], list[Claim]]:
    """Return the ties of the pipeline, in one order on all ranks, and what this rank claims of its parameters.

    Raises:
        ValueError: this rank has no such parameter, or one that cannot be tied.

    """
    found = _find(names, dict(enumerate(placement.stages[pp_rank])), modules)
    stages = {
        tie: tuple(sorted(at for named, at in names if named == tie)) for tie in sorted({tie for tie, _ in names})
    }
    numbers: dict[tuple[int, ...], int] = {}
    ties = tuple(
        Tie(
            tie,
            of_tie,
            tuple(dict.fromkeys(param for (named, _), param in found.items() if named == tie)),
            numbers.setdefault(placement.ranks_of(of_tie), len(numbers)),
        )
        for tie, of_tie in stages.items()
    )
    return ties, list(_claims(found, names))


def _claims(found: _Found, names: TieNames) -> Iterator[Claim]:
    """Yield the claims of this rank's tied parameters: those of one tie are equal."""
    for (tie, stage), form in zip(found, forms_of(list(found.values())), strict=True):
        refusal = (
            f"the tie {tie!r} joins parameters that start apart: {{}}; they are one parameter: make both from one "
            "seed, or copy one to the other before making the Pipeline"
        )
        yield Claim(f"the tie {tie}", {"its values": form}, refusal, f"{names[tie, stage]} of stage {stage}")


def _merge(names: TieNames, rows: Iterable[_Row]) -> None:
    """Add rows to `names`, or raise ValueError where they contradict them."""
    for tie, stage, param in rows:
        known = names.setdefault((tie, stage), param)
        if known != param:
            raise ValueError(
                f"the tie {tie!r} has two names in stage {stage}, {known} and {param}; name one parameter of a stage"
            )


def _find(names: TieNames, held: Mapping[int, int], modules: Mapping[int, nn.Module]) -> _Found:
    """Return this rank's parameters by tie and stage. `held[chunk]` is its stage."""
    found: _Found = {}
    chunk_of = {stage: chunk for chunk, stage in held.items()}
    for (tie, stage), name in names.items():
        if stage not in chunk_of:
            continue
        module = modules[chunk_of[stage]]
        there = dict(module.named_parameters(remove_duplicate=False))
        if name not in there:
            way_out = did_you_mean(name, there, most=4)
            raise ValueError(f"the tie {tie!r}: stage {stage} has no parameter {name}; {way_out}")
        found[tie, stage] = there[name]
        if there[name] in parameters_of_experts(module):
            raise ValueError(
                f"the tie {tie!r}: {name} of stage {stage} is an expert's, which only ranks of one ep share"
            )
    _refuse_shared_besides(found, held, modules)
    return found


def _refuse_shared_besides(found: _Found, held: Mapping[int, int], modules: Mapping[int, nn.Module]) -> None:
    """Refuse a parameter of a tie that would get gradients that the tie does not know of."""
    ties = {param: tie for (tie, _), param in found.items()}
    for (tie, stage), param in found.items():
        if ties[param] != tie:
            raise ValueError(
                f"the ties {tie!r} and {ties[param]!r} have one parameter in stage {stage}; make them one tie"
            )
    for chunk, stage in held.items():
        for name, param in modules[chunk].named_parameters():
            if param in ties and found.get((ties[param], stage)) is not param:
                raise ValueError(
                    f"the tie {ties[param]!r}: stage {stage} shares its parameter as {name}; name it so in that stage"
                )
