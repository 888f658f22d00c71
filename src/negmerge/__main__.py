"""`python -m negmerge` is the command line."""

from negmerge.cli import main

main()
