"""The selectors of a run: `greedy` and `single_best` choose pool members by a measured loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from negmerge.evaluation.criteria import Choice
from negmerge.merging.select import Greedy, single_best
from negmerge.runs.context import Context
from negmerge.runs.measurements import GreedySelection, Sweep
from negmerge.runs.members import measure_members
from negmerge.runs.merges import MergedMethod, merge_mean, merged_method
from negmerge.runs.methods import Method
from negmerge.runs.records import Done
from negmerge.runs.trainings import Member
from negmerge.scenarios.base import identity


@dataclass(frozen=True)
class MemberSweep:
    """The λ sweep of a single pool member: the step, its result, the chosen λ."""

    step: Sweep
    done: Done[int]
    choice: Choice


def select_before_search(context: Context, pool: Sequence[Member]) -> dict[str, MergedMethod]:
    """Return the selectors that choose members before λ is searched, by title."""
    found: dict[str, MergedMethod] = {}
    for method in context.merge_methods:
        if method.name == "greedy":
            selected = select_greedily(context, method, pool)
        elif method.name == "single_best" and method.add is not None:
            selected = select_to_add(context, method, method.add, pool)
        else:
            continue
        keys = [step.key for step in selected.members]
        done = merge_mean(context, method.title, [method.name, keys], selected.members)
        seconds = selected.seconds + done.seconds
        more = {"evaluations": selected.evaluations, "detail": selected.detail}
        found[method.title] = merged_method(context, method, pool, seconds, **more)
    return found


class Selected(NamedTuple):
    """The members that a selector chose, what it measured, and fields of its row of the result."""

    members: Sequence[Member]
    evaluations: int
    seconds: float
    detail: dict[str, Any]


def select_greedily(context: Context, method: Method, pool: Sequence[Member]) -> Selected:
    """Let members join the mean while the loss falls.

    The loss is that of the retain set after forgetting, or of the forget set if τ is added.
    """
    greedy = Greedy(**method.options)
    on, scale = ("retain", greedy.scale) if method.add is None else ("forget", -method.add)
    steps, losses = measure_members(context, method.title, pool, scale, on)
    key = identity("walk", greedy.order, [step.key for step in steps])
    states = context.store.states
    selection = GreedySelection(
        key,
        greedy,
        tuple(steps),
        tuple(done.value for done in losses),
        states / f"{key}.json",
        states / f"{identity(key, 'partial')}.json",
    )
    (done,) = context.run(f"{method.title}: joining members", [selection])
    kept = [pool[position] for position in done.value]
    detail = {"kept": [step.key for step in kept], "order": greedy.order}
    return Selected(kept, 2 * len(pool) - 1, sum(one.seconds for one in (*losses, done)), detail)


def select_to_add(
    context: Context, method: Method, scale: float, pool: Sequence[Member]
) -> Selected:
    """Select the member that has the lowest loss on the forget set when its τ is added."""
    _, losses = measure_members(context, method.title, pool, -scale, "forget")
    best = pool[single_best([done.value for done in losses])]
    seconds = sum(done.seconds for done in losses)
    return Selected([best], len(pool), seconds, {"member": best.key})


def select_by_sweep(
    context: Context, title: str, pool: Sequence[Member], sweeps: Sequence[MemberSweep]
) -> MergedMethod:
    """Select the member that does best with its own λ: n × m evaluations."""
    best = single_best([sweep.choice.loss for sweep in sweeps])
    member = pool[best]
    done = merge_mean(context, title, ["single best", member.key], [member])
    return MergedMethod(
        context.store.patch(title),
        sweeps[best].choice,
        pool,
        done.seconds,
        evaluations=sum(sweep.done.value for sweep in sweeps),
        search_seconds=sum(sweep.done.seconds for sweep in sweeps),
        sweeps=tuple(sweep.step.title for sweep in sweeps),
        detail={"member": member.key, "settings": member.settings.model_dump(mode="json")},
    )
