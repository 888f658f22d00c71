"""What `negmerge` without arguments prints: which command to type first."""

FIRST_SCREEN = """\
negmerge makes a trained model forget.

I must remove data from my model
  negmerge init                     asks four questions, writes a recipe
  negmerge unlearn RECIPE.yaml      makes the model forget, writes a page

I want the paper's tables
  negmerge list tables              the tables, and what each of them needs
  negmerge reproduce T2 --dry-run   the runs of a table before they start

I have a folder of checkpoints
  negmerge merge BASE POOL/*.safetensors -o PATCH
  negmerge apply BASE PATCH --negate 0.45 -o UNLEARNED

negmerge unlearn    without a recipe: a demo that needs no data, 4 minutes
negmerge doctor     what is installed, what is missing, how much room there is
negmerge --help     all commands; negmerge COMMAND --help describes one
"""
