"""What holds for every figure's sheet."""

from __future__ import annotations

from itertools import combinations

from treadle.view.sheet import Sheet


def check_texts(sheet: Sheet) -> None:
    """All that is written is on the sheet, and nothing over anything else."""
    sheet.figure.draw_without_rendering()
    paper = sheet.figure.bbox
    texts = [(text.get_text(), text.get_window_extent()) for text in sheet.axes.texts if text.get_text()]
    for said, box in texts:
        assert paper.x0 <= box.x0 < box.x1 <= paper.x1, said
        assert paper.y0 <= box.y0 < box.y1 <= paper.y1, said
    for (said, one), (also, other) in combinations(texts, 2):
        apart = one.x0 >= other.x1 or other.x0 >= one.x1 or one.y0 >= other.y1 or other.y0 >= one.y1
        assert apart, (said, also)
