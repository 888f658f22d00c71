"""The pipeline of a run: `unlearn` is the paper's algorithm, `run` calls it with a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from negmerge.errors import NegMergeError
from negmerge.evidence.registry import forgetting_tests, tests_of
from negmerge.merging.rules import rules
from negmerge.rivals import rivals
from negmerge.runs.checks import check_buffers, check_measured, check_methods
from negmerge.runs.context import Context, plugin_versions
from negmerge.runs.evidence import gather_evidence
from negmerge.runs.executors.choose import make_executor
from negmerge.runs.geometry import add_geometry
from negmerge.runs.loss_checks import check_losses
from negmerge.runs.matching import add_matched
from negmerge.runs.merges import merge_pool
from negmerge.runs.panels import draw_panels
from negmerge.runs.plan import Plan, plan_run
from negmerge.runs.pool import fine_tune_pool, plan_originals, train_originals
from negmerge.runs.recipe import Recipe, load_recipe, named_recipe
from negmerge.runs.reshape import reshape
from negmerge.runs.rivals import train_rivals
from negmerge.runs.scales import find_scales
from negmerge.runs.scores import Models, make_result, measure_added, score_models, score_reference
from negmerge.runs.shadows import check_shadows, shadow_note
from negmerge.runs.status import StatusWriter, refuse_second_driver
from negmerge.runs.store import Run, write_json
from negmerge.runs.tracking import check_tracker, tracked
from negmerge.scenarios.base import Given, Scenario, identity
from negmerge.support.files import sync_to_disk, write_file
from negmerge.support.progress import Progress, make_progress
from negmerge.support.terminal import print_warning
from negmerge.training.weights import metadata_of, save_model
from negmerge.vectors.apply import apply
from negmerge.vectors.task_vector import TaskVector


def unlearn(context: Context) -> Run:
    """Make the original model forget, by NegMerge and by the methods it is compared with.

    Each stage runs only the steps that are not done yet, and returns its results as values.
    """
    original, reference = plan_originals(context)
    context.store.reopen()  # from here on the folder holds an unfinished run of this recipe
    write_file(context.store.recipe, context.recipe.dump().encode())

    # Train the original model θ on all data, and the reference without the forget set.
    start = train_originals(context, original, reference)
    reference_scores = score_reference(context, reference)

    # Fine-tune the pool θ₁ … θₙ from θ on the forget set.
    pool = fine_tune_pool(context, start)
    doubts = check_losses(context, original, pool)

    # Merge the task vectors θ₁ − θ … θₙ − θ into one vector τ by each rule. The rule `consensus`
    # keeps the elements that have the same sign in all of them, and sets the others to zero.
    merged = merge_pool(context, pool)

    # Change the τ of methods that ask for it, with data: a retain term, weights, factors of groups.
    merged = reshape(context, start, merged, reference_scores)

    # Find the strength λ: measure θ − λτ for a series of λ, and let the criterion choose one.
    merged, members = find_scales(context, pool, merged, reference_scores)

    # Train the rivals from θ, and score every model on the reported data.
    trained_rivals = train_rivals(context, start, reference_scores)
    models = Models(original, reference, pool, merged, members, trained_rivals, doubts)
    scores = score_models(context, models)

    # Test what every model forgot, beside what the retrained model never knew.
    gathered = gather_evidence(context, models, scores)

    # Write the unlearned model θ − λτ of the first method, the result and the manifest.
    files = write_unlearned(context, models)
    added = measure_added(context, models)
    result = make_result(context, models, scores, added, gathered.evidence)
    result, matched = add_matched(context, models, result)
    files += matched
    if context.illustrated:
        result = add_geometry(context, models, result)
    write_json(context.store.scores, result.tree())
    if context.illustrated:
        files += draw_panels(context, models, scores)
    files += [*files_of_steps(context, models), *gathered.files]
    context.store.finish(problem_hash(context.recipe, context.scenario), files)
    return context.store


def write_unlearned(context: Context, models: Models) -> list[Path]:
    """Write the unlearned model of the first method; return its files."""
    out, title = context.store.unlearned, context.recipe.methods[0].title
    if title in models.rivals:
        write_file(out, models.rivals[title].chosen.out.read_bytes())
    else:
        method = models.merged[title]
        base, tau = models.original.out, TaskVector.load(method.patch)
        if context.recipe.buffers == "recalibrate":
            network = context.scenario.model(base)
            with context.scenario.subtracted(network, tau, method.scale):
                save_model(out, network, metadata_of(base))
        else:
            apply(base, -method.scale * tau, out)
        sync_to_disk(out)
    return [out, *context.scenario.export(out)]


def files_of_steps(context: Context, models: Models) -> list[Path]:
    """Return the recipe, the result, and the files that steps wrote."""
    store = context.store
    files = [store.recipe, store.scores, models.original.out, models.original.cost_file]
    if models.merged:
        files.append(store.journal_file)
    if models.reference is not None:
        files += [models.reference.out, models.reference.cost_file]
    files += [step.cost_file for step in models.pool]
    if context.recipe.pool.keep:
        files += [step.out for step in models.pool]
    for method in models.merged.values():
        files += [method.patch, *map(store.sweep, method.sweeps)]
        files += [path for step in method.further for path in (step.out, step.cost_file)]
    for step in (step for rival in models.rivals.values() for step in rival.steps):
        files += [step.cost_file] if step.read_cost().failure else [step.cost_file, step.out]
    return files


def run(
    recipe: Recipe | str | Path | None = None,
    out: str | Path | None = None,
    changes: Sequence[str] = (),
    progress: Progress | None = None,
    reuse_from: Sequence[Path] = (),
) -> Run:
    """Unlearn as a recipe says; an interrupted run in the same folder continues.

    The work is done in processes unless `workers` is 1, so a script must call `run` under
    `if __name__ == "__main__":`.

    Args:
        recipe: a Recipe, a path or the name of a shipped recipe; the demo if not given.
        out: the run directory; `runs/<name>` if not given.
        changes: `key=value` changes of the recipe.
        progress: shows how much is done; a bar on a terminal, or lines, if not given.
        reuse_from: directories of other runs; models that they trained are used again.
    """
    recipe, store = open_recipe(recipe, out, changes, reuse_from)
    with ExitStack() as stack:
        shown = stack.enter_context(make_progress()) if progress is None else progress
        scenario = checked_scenario(recipe, shown)  # before anything is written
        for note in (*scenario.describe().notes, *recipe.member_notes):
            print_warning(note)  # before hours of work, not after
        stack.enter_context(store.locked())
        refuse_second_driver(store)
        if finished(store, recipe, scenario):
            store.clear_state()
            return store
        if recipe.evidence == "full":
            text, facts = shadow_note(recipe, scenario)
            shown.note(text, **facts)
        status = stack.enter_context(StatusWriter(store).running())
        shown = stack.enter_context(tracked(recipe, store, shown))
        executor = stack.enter_context(make_executor(recipe, scenario, store, shown))
        return unlearn(Context(recipe, scenario, store, executor, shown, status=status))


def open_recipe(
    recipe: Recipe | str | Path | None,
    out: str | Path | None,
    changes: Sequence[str] = (),
    reuse_from: Sequence[Path] = (),
) -> tuple[Recipe, Run]:
    """Return the recipe and the directory of a run; the arguments are those of `run`."""
    recipe, name = named_recipe(recipe, changes)
    return recipe, Run(Path("runs") / name if out is None else out, reuse_from).check_contents()


def checked_scenario(recipe: Recipe, progress: Progress) -> Scenario:
    """Return the scenario of a recipe; raise if the recipe cannot run or its data is missing."""
    check_methods(recipe)
    check_tracker(recipe.track)
    scenario = recipe.make_scenario(progress)
    check_measured(recipe, scenario)
    scenario.check()
    check_buffers(recipe, scenario)
    check_shadows(recipe, scenario)
    return scenario


def plan(
    recipe: Recipe | str | Path | None,
    out: str | Path | None,
    changes: Sequence[str],
    progress: Progress,
) -> Plan:
    """Plan a run without starting anything; the arguments are those of `run`."""
    recipe, store = open_recipe(recipe, out, changes)
    return plan_run(recipe, checked_scenario(recipe, progress), store, progress)


def finished(store: Run, recipe: Recipe, scenario: Scenario) -> bool:
    """Return whether a folder holds exactly this run, and the run is finished."""
    if not store.finished_with(problem_hash(recipe, scenario)):
        return False
    try:
        same = load_recipe(store.recipe).dump() == recipe.dump()
    except NegMergeError:  # the recipe of a version that had other fields
        return False
    if same:
        store.check_unchanged(store.unlearned)
    return same


def problem_hash(recipe: Recipe, scenario: Scenario) -> str:
    """Return a hash of what a run depends on beside its recipe: data, given weights, plug-ins."""
    models = [scenario.original(), scenario.reference()]
    digests = [model.digest() if isinstance(model, Given) else None for model in models]
    names = [method.name for method in recipe.methods]
    plugins = [*plugin_versions(recipe, scenario), *rules.versions(*names)]
    plugins += forgetting_tests.versions(*(test.name for test in tests_of(recipe.evidence)))
    return identity(scenario.scored_on, digests, *plugins, *rivals.versions(*names))
