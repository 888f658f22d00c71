"""Studies: a recipe over several seeds, and what the paired differences of its methods decide.

`study` runs the recipe once for each seed and keeps the result of each run in a small file,
`comparison` pairs the methods by seed, `statistics` holds the tests, `tables`, `figures` and `page`
show the result. This room may import every room except the command line, the API functions and the
paper's tables; torch is imported only by the runs that are not done yet.
"""
