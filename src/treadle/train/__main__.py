"""`torchrun -m treadle.train --config FILE`, or `python -m treadle.train` for one process."""

from __future__ import annotations

import sys

from treadle.host.extras import brought_by

if __name__ == "__main__":
    with brought_by("train", needed_by="treadle.train"):
        from treadle.train.main import main

        sys.exit(main())
