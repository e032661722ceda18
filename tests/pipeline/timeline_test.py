"""Pictures of timelines: what is drawn is where and as long as it happened."""

import re
import sys
import xml.etree.ElementTree as xml

import pytest

from tfpar.pipeline import timeline as pictures
from tfpar.pipeline.schedule import Schedule, gpipe, interleaved, one_f_one_b
from tfpar.pipeline.simulate import Timeline, simulate

SVG = "{http://www.w3.org/2000/svg}"
SMALL = simulate(one_f_one_b(2, 2))
SPLIT = [("F", 0, 0), ("B", 0, 0), ("W", 0, 0)]


def test_text():
    """9 seconds over 27 columns."""
    assert pictures.text(SMALL, 35, "s").splitlines() == [
        "rank 0  F0-F1-      B0====   B1====",
        "rank 1     F0-B0====F1-B1====",
        "        0                       9 s",
        "bubble 33.3 %",
    ]


def test_text_of_chunks_and_halves():
    lane = pictures.text(simulate(interleaved(1, 1, 2), 1, 2), 32).splitlines()[0]
    assert lane == "rank 0  F0--f0--b0======B0======"
    lane = pictures.text(simulate(Schedule([SPLIT], 1), 1, 1, 1), 32).splitlines()[0]
    assert lane == "rank 0  F0------B0======W0~~~~~~"


def test_text_too_narrow_for_numbers():
    lines = pictures.text(simulate(gpipe(1, 22), 1, 1), 30).splitlines()
    assert set(lines[0].removeprefix("rank 0  ")) == {"F", "B"}
    assert all(len(line) <= 30 for line in lines)


@pytest.mark.parametrize("width", [30, 71, 100])
@pytest.mark.parametrize("p, m, v", [(1, 1, 1), (4, 8, 1), (4, 8, 2), (12, 24, 3)])
def test_text_is_as_wide_as_asked(p, m, v, width):
    lines = pictures.text(simulate(interleaved(p, m, v)), width).splitlines()
    assert len(lines) == p + 2
    assert max(map(len, lines)) == width


def test_text_refuses():
    with pytest.raises(ValueError, match="at least 30 characters; received 10"):
        pictures.text(SMALL, 10)


def boxes(drawn):
    """(what, x, y, width, colour, label) of each event."""
    for group in xml.fromstring(drawn).iter(f"{SVG}g"):
        box, label = group.find(f"{SVG}rect"), group.find(f"{SVG}text")
        x, y, width = (float(box.get(key)) for key in ("x", "y", "width"))
        name = group.find(f"{SVG}title").text
        yield name, x, y, width, box.get("fill"), None if label is None else label.text


def test_svg_places_and_colours():
    """9 seconds over 800 pixels from 70 on."""
    found = {name: rest for name, *rest in boxes(pictures.svg(SMALL, unit="s"))}
    assert len(found) == 8
    second = 800 / 9
    x, y, width, colour, label = found["forward of micro-batch 1 on stage 1: 4 to 5 s"]
    assert (x, width) == pytest.approx((70 + 4 * second, second), abs=0.01)
    assert (colour, label) == ("#4e79a7", "1")
    x, other, width, colour, label = found["backward of micro-batch 0 on stage 0: 4 to 6 s"]
    assert (x, width) == pytest.approx((70 + 4 * second, 2 * second), abs=0.01)
    assert (colour, label) == ("#f28e2b", "0")
    assert y > other


def texts(drawn):
    return [node.text for node in xml.fromstring(drawn).iter(f"{SVG}text")]


def test_svg_words():
    found = texts(pictures.svg(SMALL, 'a < b & "c"', "ms"))
    assert found[0] == 'a < b & "c": bubble 33.3 %'
    assert {"forward", "backward", "idle", "rank 0", "rank 1", "0", "1", "9 ms"} <= set(found)
    assert "backward of weights" not in found
    assert texts(pictures.svg(SMALL))[0] == "Bubble 33.3 %"
    assert "backward of weights" in texts(pictures.svg(simulate(Schedule([SPLIT], 1), weights=1)))


def test_svg_chunks_have_tones():
    colours = {box[4] for box in boxes(pictures.svg(simulate(interleaved(2, 4, 3))))}
    assert len(colours) == 6 and {"#4e79a7", "#f28e2b"} < colours


def test_svg_numbers_only_where_they_fit():
    labels = [(box[3], box[5]) for box in boxes(pictures.svg(simulate(gpipe(4, 40), 1, 3)))]
    assert any(label is None for _, label in labels) and any(label for _, label in labels)
    assert all(width >= 7 * len(label) + 4 for width, label in labels if label)


@pytest.mark.parametrize("span", [1e-4, 0.037, 1, 9.99, 10, 33, 4321])
def test_ticks(span):
    """3 to 11 of them, at round times that do not pass the end."""
    drawn = pictures.svg(simulate(gpipe(1, 1), span / 2, span / 2))
    x = [float(found) for found in re.findall(r'd="M([\d.]+) \d+ v5"', drawn)]
    assert 3 <= len(x) <= 11 and x[0] == 70 and x[-1] <= 870.01
    last = next(word for word in reversed(texts(drawn)))
    assert float(last) == pytest.approx((x[-1] - 70) / 800 * span, rel=1e-3)


def test_a_timeline_of_nothing():
    empty = Timeline((), 2)
    assert pictures.text(empty).splitlines()[0].strip() == "rank 0"
    assert "rank 1" in texts(pictures.svg(empty))


def test_save(tmp_path):
    pictures.save(SMALL, tmp_path / "a.svg", "1F1B", "ms")
    assert (tmp_path / "a.svg").read_text(encoding="utf-8") == pictures.svg(SMALL, "1F1B", "ms")
    with pytest.raises(ValueError, match="to .svg or .png; received .*a.jpg"):
        pictures.save(SMALL, tmp_path / "a.jpg")


def test_save_png(tmp_path):
    pytest.importorskip("cairosvg")
    pictures.save(SMALL, str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_png_without_cairosvg(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cairosvg", None)
    with pytest.raises(ImportError, match="write .svg instead, or pip install cairosvg"):
        pictures.save(SMALL, tmp_path / "a.png")
