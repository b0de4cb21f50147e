"""Curves, bands, areas and tables as HTML: the data are those given, and names cannot become a part of the page."""

import builtins
import math
from typing import Any

import pytest
from markupsafe import Markup

from qarl.errors import ConfigurationError
from qarl.report.figures import COLOURS, Curve, grid, lines, plotly_script, running_mean, shown, stacked, table
from tests.report.conftest import figures_of


def traces(piece: Markup) -> list[dict[str, Any]]:
    (figure,) = figures_of(piece).values()
    return list(figure["data"])


def test_a_curve_keeps_its_values_and_its_gaps():
    (curve,) = traces(lines("t", "step", "reward", [Curve("a", [0, 2, 5], [0.1, None, math.nan])]))
    assert (curve["x"], curve["y"]) == ([0, 2, 5], [0.1, None, None])


def test_axes_and_title_are_named():
    piece = lines("a < b", "step", "reward & more", [Curve("a", [0], [1.0])])
    ((title, figure),) = figures_of(piece).items()
    assert title == "a < b"
    assert figure["layout"]["xaxis"]["title"]["text"] == "step"
    assert figure["layout"]["yaxis"]["title"]["text"] == "reward &amp; more"


def test_a_band_lies_between_low_and_high_in_the_colour_of_its_curve():
    low, high, line = traces(lines("t", "x", "y", [Curve("a", [0, 1], [2.0, 3.0], [1.0, 2.0], [4.0, 5.0])]))
    assert (low["y"], high["y"], line["y"]) == ([1.0, 2.0], [4.0, 5.0], [2.0, 3.0])
    assert high["fill"] == "tonexty"
    assert line["line"]["color"] == "#3b82f6"
    assert high["fillcolor"].startswith("rgba(59,130,246,")
    assert {trace["legendgroup"] for trace in (low, high, line)} == {"a"}


def test_curves_of_a_group_share_a_colour_and_differ_in_their_strokes():
    curves = [
        Curve("a0", [0], [1.0], group="a"),
        Curve("b0", [0], [1.0], group="b"),
        Curve("a1", [0], [1.0], group="a"),
    ]
    found = [(trace["line"]["color"], trace["line"]["dash"]) for trace in traces(lines("t", "x", "y", curves))]
    assert found == [(COLOURS[0], "solid"), (COLOURS[1], "solid"), (COLOURS[0], "dash")]


def test_a_curve_without_points_is_not_drawn_and_keeps_its_colour():
    (only,) = traces(lines("t", "x", "y", [Curve("absent", [], []), Curve("b", [0], [1.0])]))
    assert only["line"]["color"] == COLOURS[1]


def test_noise_is_dots_and_the_line_is_their_running_mean():
    dots, line = traces(lines("t", "x", "y", [Curve("a", [0, 1, 2], [1.0, 3.0, 8.0])], smooth=2))
    assert (dots["mode"], dots["y"]) == ("markers", [1.0, 3.0, 8.0])
    assert (line["mode"], line["y"]) == ("lines", [1.0, 2.0, 5.5])


def test_a_running_mean_passes_over_gaps():
    assert running_mean([1.0, None, 3.0, math.nan, math.nan, 7.0], 2) == [1.0, 1.0, 3.0, 3.0, None, 7.0]


def test_a_logarithmic_axis_has_gaps_where_nothing_is_above_zero():
    piece = lines("t", "x", "y", [Curve("a", [0, 1, 2], [0.0, 1e-3, -1.0])], log=True)
    (figure,) = figures_of(piece).values()
    assert figure["layout"]["yaxis"]["type"] == "log"
    assert figure["data"][0]["y"] == [None, 1e-3, None]


def test_areas_lie_upon_one_another():
    found = traces(stacked("t", "x", "s", [Curve("a", [0, 1], [1.0, 2.0]), Curve("b", [0, 1], [3.0, 4.0])]))
    assert [(trace["name"], trace["y"], trace["stackgroup"]) for trace in found] == [
        ("a", [1.0, 2.0], "all"),
        ("b", [3.0, 4.0], "all"),
    ]


@pytest.mark.parametrize("draw", [lines, stacked])
def test_no_name_can_end_the_script_that_holds_it(draw: Any):
    piece = draw("</figcaption><script>", "x", "y", [Curve("</script><b>", [0], [1.0])])
    assert piece.count("</script>") == 1
    assert "<script>" not in piece
    (trace,) = traces(piece)
    assert (trace["name"], trace["legendgroup"]) == ("&lt;/script&gt;&lt;b&gt;", "</script><b>")


def test_a_table_has_the_columns_of_all_rows_and_escapes_text():
    html = table([{"a": 1, "b": "x<y"}, {"a": 0.123456, "c": Markup("<i>z</i>")}])
    assert html.count("<th ") == 3
    for cell in ('<td class="number">1</td>', '<td class="number">0.1235</td>', "<td>x&lt;y</td>", "<td><i>z</i></td>"):
        assert cell in html
    assert html.count("<td>–</td>") == 2


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (math.nan, "–"),
        (True, "yes"),
        (12345, "12,345"),
        (12345.6, "12,346"),
        (1e-5, "1e-05"),
        (0.5, "0.5"),
    ],
)
def test_values_are_shown_for_people(value: object, text: str):
    assert shown(value) == text


def test_figures_stand_in_a_grid():
    assert grid([Markup("<b>1</b>"), Markup("<b>2</b>")]) == '<div class="grid"><b>1</b>\n<b>2</b></div>'


def test_without_plotly_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    real = builtins.__import__

    def absent(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("plotly"):
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ConfigurationError, match=r"pip install 'qarl-llm\[report\]'"):
        plotly_script()


def test_a_faint_curve_comes_and_goes_with_its_group_and_leaves_its_mean_the_solid_stroke():
    single = Curve("a, seed 0", [0, 1], [1.0, 3.0], group="a", faint=True)
    faint, mean = traces(lines("t", "x", "y", [single, Curve("a", [0, 1], [1.0, 2.0], group="a")]))
    assert (faint["y"], faint["line"]) == ([1.0, 3.0], {"color": "#3b82f6", "width": 1})
    assert (mean["line"]["color"], mean["line"]["dash"]) == ("#3b82f6", "solid")
    assert faint["legendgroup"] == mean["legendgroup"] == "a"
