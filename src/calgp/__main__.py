"""`python -m calgp` is `calgp`."""

from calgp.cli import main

main()
