"""`python -m multihead`."""

from .cli import main

main()
