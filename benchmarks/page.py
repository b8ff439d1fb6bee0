"""How fast the page of 200,000 ops is, in Debian's chromium without a GPU.

python benchmarks/page.py

First paint is the second frame after the first full draw, from the start of the navigation; a pan step is from a mouse
that moves to the task after the next frame, the median of 25. The last line is JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import treadle
from treadle.view.page import page

sys.path.insert(0, str(Path(__file__).parents[1]))  # the browser is the tests' one

from tests.support.browser import MISSING, browser, speed


def main() -> None:
    """Prints a row, and the JSON line."""
    if MISSING is not None:
        sys.exit(MISSING)
    costs = treadle.load_costs("deepseek-v3-h800")
    schedule = treadle.generate("interleaved-overlap", pp=8, vpp=2, microbatches=256)
    trace = treadle.simulate(treadle.lower(schedule, costs, treadle.LoweringOptions(layers=4, moe=True)), costs)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "page.html"
        path.write_text(page([("interleaved-overlap", trace)]), encoding="utf-8")
        file_mb = path.stat().st_size / 1e6
        with browser(Path(directory) / "profile") as window:
            found = speed(window, path)
    print(
        f"{trace.program.num_ops:,} ops, first paint {found.first_paint_s:.2f} s; a pan {found.pan_full_ms:.1f} ms,"
        f" zoomed in {found.pan_zoomed_ms:.1f} ms; {file_mb:.2f} MB"
    )
    numbers = {**asdict(found), "file_mb": file_mb}
    print(json.dumps({name: round(number, 3) for name, number in numbers.items()}))


if __name__ == "__main__":
    main()
