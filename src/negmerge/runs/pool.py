"""The models that a run trains: the original, the retrained reference and the pool."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from negmerge.errors import FileError, MismatchError
from negmerge.merging.accumulator import Accumulator
from negmerge.runs.checks import default_trainings
from negmerge.runs.context import Context
from negmerge.runs.records import Cost
from negmerge.runs.steps import Step
from negmerge.runs.trainings import Member, Start, Training, make_training
from negmerge.scenarios.base import Given, ToTrain, identity


def plan_originals(context: Context) -> tuple[Training, Training | None]:
    """Return the steps for the original and the reference; refuse to overwrite other models."""
    scenario, store = context.scenario, context.store
    original = _plan_original(context, "original model", scenario.original(), store.base)
    reference = None
    if (retrained := scenario.reference()) is not None:
        reference = _plan_original(context, "retrained model", retrained, store.retrain)
    for step in (original, reference):
        if step is not None and step.out.exists() and store.find(step) is None:
            raise MismatchError(
                f"{step.out}: is damaged, or was made by another recipe or from other data; a run "
                "never overwrites it: name another --out, or remove the folder"
            )
    return original, reference


def _plan_original(context: Context, title: str, model: ToTrain | Given, out: Path) -> Training:
    """Return the step for a model that is trained from fresh weights, or given."""
    scenario, states = context.scenario, context.store.states
    if isinstance(model, ToTrain):
        every = context.recipe.save_every
        return make_training(
            scenario, title, model.on, model.settings, lambda _: out, states, save_every=every
        )
    digest = model.digest()
    key = identity("own", model.content) if digest is None else identity("file", digest)
    on = () if model.on is None else (model.on,)
    files = (model.weights, out, states / key)
    return Training(key, title, on, scenario.training, 0, *files, trains=False)


def train_originals(context: Context, original: Training, reference: Training | None) -> Start:
    """Train the original on retain ∪ forget and the reference on retain; return the original."""
    steps = [step for step in (original, reference) if step is not None]
    done = {step.title for step in steps if context.store.find(step) is not None}
    for text, facts in default_trainings(context.recipe, context.scenario):
        if f"{facts['model']} model" not in done:
            context.progress.note(text, **facts)
    context.run("training the original and the retrained model", steps)
    return Start(original.out, context.scenario.start_key(original.out))


def plan_members(context: Context, start: Start) -> list[Training]:
    """Return the steps that fine-tune the pool from the original on the forget set."""
    recipe, store = context.recipe, context.store
    settings = recipe.pool.trainings()
    return [
        make_training(
            context.scenario,
            f"member {k} of {len(settings)}",
            "forget",
            member,
            out=store.member,
            states=store.states,
            save_every=recipe.save_every,
            start=start,
            checkpoints=recipe.pool.checkpoints[:-1],  # the last one is the end of the training
        )
        for k, member in enumerate(settings, 1)
    ]


def fine_tune_pool(context: Context, start: Start) -> list[Member]:
    """Fine-tune every pool member from the original on the forget set.

    The checkpoints of a training follow each other.
    """
    if not context.merge_methods:
        return []
    recipe, steps = context.recipe, plan_members(context, start)
    members = [member for step in steps for member in step.models]
    title = f"fine-tuning {len(members)} members on the forget set"
    if recipe.pool.keep:
        check_disk_space(context, steps, "members", "set pool.keep to false")
        context.run(title, steps)
    else:
        _fine_tune_and_fold(context, title, steps)
    return members


def _fine_tune_and_fold(context: Context, title: str, steps: list[Training]) -> None:
    """Add each member to the accumulator when it is trained, then delete its file."""
    path, base = context.accumulator, context.store.base
    rules = {method.name: method.options for method in context.merge_methods}
    terms = context.recipe.terms.arguments()
    del terms["equalise"]  # the recipe refuses it without the members
    if path.exists():
        accumulator = Accumulator.load(path, base)
        if not accumulator.made_for(rules, **terms):
            raise MismatchError(
                f"{path}: was made for other methods, buffers or tensors, and its members are "
                "deleted; "
                "name another --out"
            )
    else:
        accumulator = Accumulator(base, rules, **terms)
    folded = {member["name"] for member in accumulator.members}
    others = folded - {step.out.name for step in steps}
    if others:
        raise MismatchError(
            f"{path}: holds {len(others)} members of another pool, which cannot be taken out; "
            "name another --out"
        )

    def fold(step: Step[Cost]) -> None:
        if step.out.name not in folded:
            accumulator.add(step.out)
            accumulator.save(path)
            folded.add(step.out.name)
        step.out.unlink()

    for step in steps:
        if context.store.find(step) is not None:
            fold(step)
    todo = [step for step in steps if step.out.name not in folded]
    context.run(title, todo, on_done=fold, stage_size=len(steps))


def check_disk_space(context: Context, steps: Sequence[Training], what: str, remedy: str) -> None:
    """Raise if the disk cannot hold the models to train, their states and the patches.

    `steps` are the trainings, done or not; the error calls them `what`.
    """
    models = sum(len(step.models) for step in steps if context.store.find(step) is None)
    folder = context.store.folder
    need = context.store.base.stat().st_size * (models + 2 * len(context.recipe.methods) + 2)
    free = shutil.disk_usage(folder).free
    if models and free < need:
        raise FileError(
            f"{folder}: {free / 1e9:.1f} GB free, about {need / 1e9:.1f} GB needed for {models} "
            f"{what}; free some, or {remedy}"
        )
