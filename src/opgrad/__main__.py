"""`python -m opgrad` is the command `opgrad`."""

from opgrad.cli import main

main()
