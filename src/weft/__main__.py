"""`python -m weft`, and `torchrun ... -m weft`."""

from weft.cli import main

main()
