"""The agreement on ties before the first step: which parameters stages share, and that all ranks hold the same one.

`tied` names a parameter once and says what it is called in each stage that has it. What one rank says counts for all,
so ranks may give all of it, or each the names in its own stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from torch import nn

from treadle.dist.gathering import gather_json
from treadle.dist.rank_groups import Groups
from treadle.fields.nearest import did_you_mean
from treadle.host.errors import named
from treadle.ir.placement import Placement
from treadle.runtime.agreement import raise_for_all
from treadle.runtime.handshake import digests_of, form_of
from treadle.runtime.model.exchange import RankOwned
from treadle.runtime.model.tied import Tie

Tied: TypeAlias = Mapping[str, Mapping[int, str]]
"""For each tie, by a name of the user's, the parameter's name in the module of each stage that has it."""

_Names: TypeAlias = dict[tuple[str, int], str]  # (tie, stage): the parameter's name
_Found: TypeAlias = dict[tuple[str, int], nn.Parameter]
_Row: TypeAlias = tuple[str, int, str]
_Description: TypeAlias = tuple[str, int, str, str, str]  # tie, stage, name, form, digest of its values

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


def agree_on_ties(
    groups: Groups, placement: Placement, modules: Mapping[int, nn.Module], tied: Tied | None
) -> tuple[Tie, ...]:
    """Return the ties of the pipeline, in one order on all ranks.

    Raises:
        ValueError: on all ranks, if one names what is not there, or ranks do not hold the same parameter.

    """
    names, reason = _numbered(tied or {}, placement.num_stages)
    for group in (groups.dp_group, groups.pp_group):  # each group passes on what the one before was told
        for other_reason, rows in gather_json(group, [reason, _rows(names)]) if group is not None else ():
            reason = reason or other_reason or _merge(names, rows)
    reason = reason or _too_few(names)
    if reason is not None:
        raise ValueError(reason)
    if not names:
        return ()
    held = dict(enumerate(placement.stages[groups.position.pp_rank]))
    found, reason = _find(names, held, modules)
    raise_for_all(groups, reason)
    raise_for_all(groups, _difference(gather_json(groups.pp_group, _described(found, names))))
    stages = {
        tie: tuple(sorted(at for named, at in names if named == tie)) for tie in sorted({tie for tie, _ in names})
    }
    numbers: dict[tuple[int, ...], int] = {}
    return tuple(
        Tie(
            tie,
            of_tie,
            tuple(dict.fromkeys(param for (named, _), param in found.items() if named == tie)),
            numbers.setdefault(placement.ranks_of(of_tie), len(numbers)),
        )
        for tie, of_tie in stages.items()
    )


def _numbered(tied: Tied, num_stages: int) -> tuple[_Names, str | None]:
    """Return the names by stages from 0 on, or what is wrong with them."""
    names: _Names = {}
    for tie, said in tied.items():
        if not said:
            return names, f"the tie {tie!r} names no stage; a tie joins two stages or more, {_EXAMPLE}"
        for stage, param in said.items():
            if not -num_stages <= stage < num_stages:
                allowed = f"0 to {num_stages - 1}, or -1 to -{num_stages} from the end"
                return names, f"the tie {tie!r} names stage {stage}; stages are {allowed}"
            reason = _merge(names, [(tie, stage % num_stages, param)])
            if reason is not None:
                return names, reason
    return names, None


def _rows(names: _Names) -> list[_Row]:
    return [(tie, stage, param) for (tie, stage), param in names.items()]


def _merge(names: _Names, rows: Iterable[_Row]) -> str | None:
    """Add what another rank says to `names`, or return where it contradicts them."""
    for tie, stage, param in rows:
        known = names.setdefault((tie, stage), param)
        if known != param:
            return f"the tie {tie!r} has two names in stage {stage}, {known} and {param}; name one parameter of a stage"
    return None


def _too_few(names: _Names) -> str | None:
    for tie, num in Counter(tie for tie, _ in names).items():
        if num < 2:
            stage, param = next((stage, param) for (named, stage), param in names.items() if named == tie)
            return (
                f"the tie {tie!r} has one stage, {stage} ({param}); a tie joins two stages or more: name it in each of "
                "them, or leave it out"
            )
    return None


def _find(names: _Names, held: Mapping[int, int], modules: Mapping[int, nn.Module]) -> tuple[_Found, str | None]:
    """Return this rank's parameters by tie and stage, or why one cannot be tied. `held[chunk]` is its stage."""
    found: _Found = {}
    chunk_of = {stage: chunk for chunk, stage in held.items()}
    for (tie, stage), name in names.items():
        if stage not in chunk_of:
            continue
        module = modules[chunk_of[stage]]
        there = dict(module.named_parameters(remove_duplicate=False))
        if name not in there:
            way_out = did_you_mean(name, there, most=4)
            return found, f"the tie {tie!r}: stage {stage} has no parameter {name}; {way_out}"
        found[tie, stage] = there[name]
        if any(there[name] in set(part.parameters()) for part in module.modules() if isinstance(part, RankOwned)):
            return found, f"the tie {tie!r}: {name} of stage {stage} is an expert's, which only ranks of one ep share"
    return found, _shared_besides(found, held, modules)


def _shared_besides(found: _Found, held: Mapping[int, int], modules: Mapping[int, nn.Module]) -> str | None:
    """Return why a parameter of a tie would get gradients that the tie does not know of."""
    ties = {param: tie for (tie, _), param in found.items()}
    for (tie, stage), param in found.items():
        if ties[param] != tie:
            return f"the ties {tie!r} and {ties[param]!r} have one parameter in stage {stage}; make them one tie"
    for chunk, stage in held.items():
        for name, param in modules[chunk].named_parameters():
            if param in ties and found.get((ties[param], stage)) is not param:
                return (
                    f"the tie {ties[param]!r}: stage {stage} shares its parameter as {name}; name it so in that stage"
                )
    return None


def _described(found: _Found, names: _Names) -> list[_Description]:
    return [
        (
            tie,
            stage,
            names[tie, stage],
            form_of(param),
            "" if param.is_meta else digests_of([param])[0],
        )
        for (tie, stage), param in found.items()
    ]


def _difference(rows: Iterable[Iterable[_Description]]) -> str | None:
    """Return where stages of a tie have different parameters."""
    first: dict[str, _Description] = {}
    for tie, stage, name, form, values in (description for row in rows for description in row):
        _, other_stage, other_name, other_form, other_values = first.setdefault(tie, (tie, stage, name, form, values))
        where = f"{name} of stage {stage}", f"{other_name} of stage {other_stage}"
        if form != other_form:
            return f"the tie {tie!r} joins {where[1]} ({other_form}) and {where[0]} ({form}); they are one parameter"
        if values != other_values:
            return (
                f"the tie {tie!r}: {where[1]} and {where[0]} start from different values; make both from one seed, or "
                "copy one to the other before making the Pipeline"
            )
    return None
