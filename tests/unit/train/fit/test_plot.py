"""The log and its picture."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from flashdraft.train.fit.plot import LOG_NAME, PLOT_NAME, draw_plot, draw_svg, keep_rows

SVG = "{http://www.w3.org/2000/svg}"
ROWS = [
    {"step": 10, "loss": 4.0},
    {"step": 20, "loss": 2.0},
    {"step": 20, "accepted_length": 1.5},
    {"step": 30, "loss": float("nan")},
    {"step": 40, "accepted_length": 2.5},
]


def test_both_curves_are_drawn_in_their_panels() -> None:
    picture = ElementTree.fromstring(draw_svg(ROWS, "a <run>"))
    curves = [line.attrib["points"].split() for line in picture.iter(f"{SVG}polyline")]
    assert [len(points) for points in curves] == [2, 2]
    heights = [[float(point.split(",")[1]) for point in points] for points in curves]
    assert heights[0][0] < heights[0][1] < 260, "loss falls, in the upper panel"
    assert 260 < heights[1][1] < heights[1][0], "accepted length rises, in the lower one"
    texts = [text.text for text in picture.iter(f"{SVG}text")]
    assert "a <run>: loss" in texts


@pytest.mark.parametrize("rows", [[], ROWS[:1], [{"step": 1, "loss": 0.0}] * 2])
def test_little_to_draw_is_no_error(rows: list[dict[str, float]]) -> None:
    ElementTree.fromstring(draw_svg(rows, "run"))


def test_log_is_cut_and_drawn(tmp_path: Path) -> None:
    (tmp_path / LOG_NAME).write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    with (tmp_path / LOG_NAME).open("a") as log:
        log.write('{"step": 50, "lo')  # the machine went down
    assert keep_rows(tmp_path, 20) == ROWS[:3]
    assert [json.loads(line)["step"] for line in (tmp_path / LOG_NAME).open()] == [10, 20, 20]
    draw_plot(tmp_path)
    assert (tmp_path / PLOT_NAME).read_text().startswith("<svg")
