"""`python -m treadle`, and `torchrun ... -m treadle`."""

from treadle.cli import main

main()
