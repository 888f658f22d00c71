"""Training: the loop, hyper-parameters, feeds, seeds, states in progress, the need of memory.

This package may import `vectors` and the packages below it. The loss is an argument of the loop: a
new loss is a function of a scenario or a rival. A new hyper-parameter is a field of
`hyperparameters.py`.
"""
