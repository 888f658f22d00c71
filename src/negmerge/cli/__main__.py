"""`python -m negmerge.cli` is the command line."""

from negmerge.cli import main

main()
