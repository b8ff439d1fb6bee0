"""Makes the files beside it from Primus's example data: `python -m tests.data.primus.make DIR`.

DIR is gpu8_layer64_gbs16 with pp8 and pp8_vpp2 (source and licence: LICENSE): one model of 64 layers on eight GPUs, 16
micro-batches, as 1F1B and as interleaved 1F1B of two chunks, 20 steps each. Times are rounded to a microsecond.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def rounded(value: Any) -> Any:
    """Round all times of a step; the reserved memory keeps its three digits too."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return round(value, 3) if isinstance(value, float) else value


def main(source: Path) -> None:
    """Write one compressed file for each of the source."""
    for path in sorted(source.glob("pp8*/*.json*")):
        raw = path.read_bytes()
        content = json.loads(gzip.decompress(raw) if raw.startswith(b"\x1f\x8b") else raw)
        target = HERE / path.parent.name / f"{path.name.removesuffix('.gz')}.gz"
        target.parent.mkdir(exist_ok=True)
        text = json.dumps(rounded(content), separators=(",", ":"))
        target.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
