"""`torchrun -m treadle.train --config FILE`, or `python -m treadle.train` for one process."""

from __future__ import annotations

import sys

from treadle.train.app import main

if __name__ == "__main__":
    sys.exit(main())
