"""Evaluation: observations of samples, metrics, attacks, criteria, and the search for λ.

This package imports only `training`, `merging` and the packages below them. ◄ ADD A METRIC in
`metrics/`, AN ATTACK in `attacks/`, A CRITERION in `criteria.py`. A metric is computed from
observations, and a criterion chooses from the rows of a sweep; neither runs a model.
"""
