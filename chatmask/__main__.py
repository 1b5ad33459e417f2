"""`python -m chatmask`."""

from .cli import main

main()
