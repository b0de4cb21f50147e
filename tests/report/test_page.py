"""One file that needs nothing else, written whole or not at all."""

import re
from pathlib import Path

import pytest
from markupsafe import Markup

from qarl.errors import ConfigurationError
from qarl.report.figures import Curve, lines
from qarl.report.page import Section, write_page


def test_a_page_brings_everything_along(tmp_path: Path):
    path = tmp_path / "page.html"
    figure = lines("t", "x", "y", [Curve("a", [0], [1.0])])
    size = write_page(path, "A & B", [Section("One", figure), Section("Two", figure, "said")], "of all")
    page = path.read_text(encoding="utf-8")
    assert size == path.stat().st_size
    assert page.count("Plotly.newPlot(") >= 1
    ours = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)  # plotly's own text names many addresses
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//|@import|url\(""", ours)
    assert "<title>A &amp; B</title>" in page
    assert [f'<a href="#section-{n}">{title}</a>' in page for n, title in ((1, "One"), (2, "Two"))] == [True, True]
    assert '<p class="note">said</p>' in page
    assert list(tmp_path.iterdir()) == [path]


def test_plotly_stands_in_a_page_once(tmp_path: Path):
    few, many = tmp_path / "few.html", tmp_path / "many.html"
    figure = lines("t", "x", "y", [Curve("a", [0], [1.0])])
    write_page(few, "t", [Section("s", figure)])
    write_page(many, "t", [Section("s", figure)] * 10)
    assert many.stat().st_size - few.stat().st_size < 20_000 < 4_000_000 < few.stat().st_size


def test_text_is_escaped_and_markup_is_not(tmp_path: Path):
    path = tmp_path / "page.html"
    write_page(path, "t", [Section("<i>", "<b>text</b>", "<u>"), Section("s", Markup("<b>markup</b>"))])
    page = path.read_text(encoding="utf-8")
    assert "<h2>&lt;i&gt;</h2>" in page and "&lt;b&gt;text&lt;/b&gt;" in page and "&lt;u&gt;" in page
    assert "<b>markup</b>" in page


@pytest.mark.parametrize(
    ("place", "reason"), [("", "it is a folder"), ("absent/page.html", "there is no folder .*absent")]
)
def test_a_place_that_takes_no_file_is_refused(tmp_path: Path, place: str, reason: str):
    with pytest.raises(ConfigurationError, match=f"--out .*cannot be written, {reason}; give a file"):
        write_page(tmp_path / place, "t", [])


def test_what_the_disk_refuses_leaves_the_old_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "page.html"
    path.write_text("old")

    def refuse(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("qarl.report.page.write_atomically", refuse)
    with pytest.raises(ConfigurationError, match="No space left on device"):
        write_page(path, "t", [])
    assert path.read_text() == "old"
