"""The tables and figures of the paper, measured and compared with the published numbers.

`experiments.yaml` lists the recipes of each table, `published.json` holds the published numbers,
and `reproduction` runs the recipes and compares. `authors` compares the authors' own checkpoints
with their published numbers, `zero_shot` pretrained CLIP models with known accuracies. This room
may import every room except the command line. To add a table, add an entry to `experiments.yaml`
and, if the paper prints numbers, to `published.json`.
"""
