"""Runs: the recipe, the pipeline, its steps, the executors, the run directory and the result.

May import scenarios, rivals and every room below. `pipeline.py` is the paper's algorithm;
`context.py` runs steps; `directory.py` and `store.py` are the run directory. ◄ ADD AN EXECUTOR in
`executors.py`.
"""
