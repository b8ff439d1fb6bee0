"""What holds for every figure's sheet."""

from __future__ import annotations

from itertools import combinations

from treadle.view.sheet import Sheet


def check_texts(sheet: Sheet) -> None:
    """All that is written is on the sheet, and nothing over anything else."""
    sheet.figure.draw_without_rendering()
    paper = sheet.figure.bbox
    texts = [text.get_window_extent() for text in sheet.axes.texts]
    for box in texts:
        assert paper.x0 <= box.x0 < box.x1 <= paper.x1
        assert paper.y0 <= box.y0 < box.y1 <= paper.y1
    for one, other in combinations(texts, 2):
        assert not (one.x0 < other.x1 and other.x0 < one.x1 and one.y0 < other.y1 and other.y0 < one.y1)
