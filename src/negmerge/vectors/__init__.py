"""Task vectors: the type, the patch file, and adding a vector to a model.

- `task_vector.py` is `nm.TaskVector`, `entry.py` one tensor of it, `origin.py` how it was made.
- `patch.py` reads and writes patch files (`docs/patch-format.md`).
- `apply.py` writes base plus vector to files and state dicts: `plan.py` lays out the files,
  `addition.py` and `compiled_addition.py` compute the sums (both give the same bytes), `card.py`
  writes the model card.
- `module.py` adds a vector in place to a module.
- `inspection.py` describes patches and checkpoints for `negmerge inspect`.

This package imports only `negmerge.checkpoints`, `negmerge.support` and `negmerge.errors`.
"""
