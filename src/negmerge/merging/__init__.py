"""Merging: from the models of a pool to one task vector.

- `engine.py` is `nm.merge`: `inputs.py` checks the models (`patterns.py` chooses tensors, `tied.py`
  finds tied heads, `shared_start.py` compares adapters), `tiles.py` and `rows.py` read them,
  `computation.py` runs the compiled loop (`loop.py`, checked by `proof.py`) or torch
  (`torch_computation.py`), `assembly.py`, `memory.py` and `slabs.py` store the results, and
  `dissent.py` counts elements where a single member disagrees. `estimate.py` tells in advance what
  a merge needs.
- `rules.py` has the rules, `rule.py` defines what a rule is. Folds (`folds.py`, `fast_folds.py`)
  compute the statistics of a rule (`statistics.py`); `first_pass.py`, `thresholds.py` and
  `magnitudes.py` compute what a rule must know before the merge, `norms.py` the factors that scale
  members to one norm.
- `parted.py` is a merge that other processes compute in parts (`parts.py`, `merge_part.py`,
  `first_pass_parts.py`), which they store in part files (`part_file.py`).
- `accumulator.py` is `nm.Accumulator`, with `shared_statistics.py` and `accumulator_file.py`.
- `select.py` has the selectors.

This package imports only `negmerge.vectors`, `negmerge.checkpoints`, `negmerge.support`,
`negmerge.registry` and `negmerge.errors`. Add a merge rule in `rules.py` or in a file of your own
(`docs/extend.md`); change `loop.py` and the folds only for speed.
"""
