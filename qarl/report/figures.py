"""Figures and tables as pieces of HTML. Figures are plotly's: readings under the pointer, curves switched by a click.

A piece holds its figure as JSON; the script of the page (`page.js`) draws it when it comes into view, in the colours of
the reader's light or dark setting.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from qarl.errors import ConfigurationError

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

COLOURS = ("#3b82f6", "#e8762c", "#23a06f", "#d9466f", "#8f6be0", "#a88a1d", "#2aa5c0", "#a3694a")
"""Told apart on white and on black; more groups than these begin again with the first."""

BAND_OPACITY, FAINT_OPACITY = 0.18, 0.55

DOTS, MANY_DOTS = {"size": 4, "opacity": 0.4}, {"size": 2.5, "opacity": 0.15}
MANY = 300
"""More dots than these in a figure are drawn fainter, so that the lines are seen."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Values `y` at places `x`, all equally many; NaN and None are gaps.

    `low` and `high` are drawn as a band. A `faint` curve is a thin line that comes and goes with its group. Curves of a
    `group` share its colour; without one a curve has its own. A curve without points is not drawn, and keeps its place
    in the order of colours: so a name has one colour in all figures that name the same curves.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None
    group: str | None = None
    faint: bool = False


def lines(
    title: str, x_title: str, y_title: str, curves: Sequence[Curve], *, smooth: int = 0, log: bool = False
) -> Markup:
    """Curves over a common axis.

    With `smooth` values are faint dots, and the line is their mean over so many points, those up to this one. `log`
    makes the vertical axis logarithmic; values that are not above 0 have no place there and are gaps.
    """
    figure = _figure(x_title, y_title, log)
    colours = _colours(curves)
    drawn = [_above_zero(curve) if log else curve for curve in curves if len(curve.x)]
    num_points = sum(len(curve.x) for curve in drawn)
    for curve, dash in zip(drawn, _dashes(drawn), strict=True):
        colour = colours[curve.group or curve.name]
        if curve.faint:
            _add_faint(figure, curve, colour)
            continue
        if curve.low is not None and curve.high is not None:
            _add_band(figure, curve, colour)
        if smooth:
            _add_dots(figure, curve, {"color": colour, **(MANY_DOTS if num_points > MANY else DOTS)})
        figure.add_scatter(
            x=list(curve.x),
            y=running_mean(curve.y, smooth) if smooth else list(curve.y),
            name=html.escape(curve.name),  # plotly reads a few tags in names
            legendgroup=curve.name,
            # Of few points, or of one, a line alone shows little.
            mode="lines" if smooth or len(curve.x) > 60 else "lines+markers",
            line={"color": colour, "width": 2, "dash": dash},
            marker={"size": 5},
            hoverinfo="skip" if smooth else None,
        )
    return _piece(title, figure)


def stacked(title: str, x_title: str, y_title: str, curves: Sequence[Curve]) -> Markup:
    """Curves of the same places as areas upon one another."""
    figure = _figure(x_title, y_title, log=False)
    colours = _colours(curves)
    for curve in curves:
        colour = colours[curve.group or curve.name]
        figure.add_scatter(
            x=list(curve.x),
            y=list(curve.y),
            name=html.escape(curve.name),
            legendgroup=curve.name,
            mode="lines",
            stackgroup="all",
            line={"color": colour, "width": 1},
            fillcolor=_faded(colour, 0.55),
        )
    return _piece(title, figure)


def running_mean(values: Sequence[float | None], window: int) -> list[float | None]:
    """Each value's mean with the `window` - 1 before it, as far as there are any; gaps count as nothing."""
    means: list[float | None] = []
    for place in range(len(values)):
        near = [one for one in values[max(0, place + 1 - window) : place + 1] if one is not None and math.isfinite(one)]
        # Six digits are more than a figure shows, and keep pages of long runs small.
        means.append(float(f"{sum(near) / len(near):.6g}") if near else None)
    return means


def grid(figures: Sequence[Markup]) -> Markup:
    """Figures side by side where the page is wide enough for them."""
    return Markup('<div class="grid">{}</div>').format(Markup("\n").join(figures))


def table(rows: Sequence[Mapping[str, object]]) -> Markup:
    """Rows under the keys of all of them, in the order of appearance; numbers to the right, `Markup` as it is."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    head = Markup("").join(Markup('<th scope="col">{}</th>').format(key) for key in keys)
    body = Markup("\n").join(
        Markup("<tr>{}</tr>").format(Markup("").join(_cell(row.get(key)) for key in keys)) for row in rows
    )
    return Markup(
        '<div class="scroll" tabindex="0"><table><thead><tr>{}</tr></thead><tbody>\n{}\n</tbody></table></div>'
    ).format(head, body)


def shown(value: object) -> str:
    """A value for people: four digits of a number, a dash for what is absent."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def plotly_script() -> Markup:
    """plotly's own JavaScript, to stand in a page once; ConfigurationError where it is not installed."""
    _plotly()
    from plotly.offline import get_plotlyjs

    return Markup(get_plotlyjs())


def _plotly() -> Any:
    try:
        import plotly.graph_objects as objects
    except ImportError as error:
        raise ConfigurationError("pages need plotly, which is not installed: pip install 'qarl-llm[report]'") from error
    return objects


def _figure(x_title: str, y_title: str, log: bool) -> Figure:
    figure: Figure = _plotly().Figure()
    figure.update_layout(
        template="none",  # a template's colours are of one setting, and its JSON is longer than most figures
        autosize=True,
        margin={"l": 8, "r": 12, "t": 8, "b": 8},
        hovermode="x",
        showlegend=False,  # the page's own wraps on a phone, where plotly's would cover the axis
        xaxis={"title": {"text": html.escape(x_title), "standoff": 8}, "automargin": True, "zeroline": False},
        yaxis={
            "title": {"text": html.escape(y_title), "standoff": 8},
            "automargin": True,
            "zeroline": False,
            "type": "log" if log else "linear",
            # As 1e-8, not as 10n; what people read at a glance stays a plain number.
            "exponentformat": "e",
            "minexponent": 5,
        },
    )
    return figure


def _piece(title: str, figure: Figure) -> Markup:
    # In a script element "</" would end it early; as an escape no "<" can, whatever plotly escapes by itself.
    spec = Markup(str(figure.to_json()).replace("<", "\\u003c"))
    return Markup(
        '<figure class="figure"><figcaption>{}</figcaption><div class="plot" role="img" aria-label="{}"></div>'
        '<div class="legend"></div><script type="application/json">{}</script></figure>'
    ).format(title, title, spec)


def _above_zero(curve: Curve) -> Curve:
    return replace(curve, y=[None if value is None or value <= 0.0 else value for value in curve.y])


def _colours(curves: Sequence[Curve]) -> dict[str, str]:
    groups = dict.fromkeys(curve.group or curve.name for curve in curves)
    return {group: COLOURS[place % len(COLOURS)] for place, group in enumerate(groups)}


def _dashes(curves: Sequence[Curve]) -> list[str]:
    """Curves of one colour differ by their strokes."""
    strokes, seen = ("solid", "dash", "dot", "dashdot", "longdash"), dict[str, int]()
    found = []
    for curve in curves:
        group = curve.group or curve.name
        found.append(strokes[seen.get(group, 0) % len(strokes)])
        seen[group] = seen.get(group, 0) + (not curve.faint)
    return found


def _add_band(figure: Figure, curve: Curve, colour: str) -> None:
    common = {"x": list(curve.x), "mode": "lines", "legendgroup": curve.name}
    figure.add_scatter(y=list(curve.low or ()), line={"width": 0}, hoverinfo="skip", **common)
    figure.add_scatter(
        y=list(curve.high or ()),
        line={"width": 0},
        fill="tonexty",
        fillcolor=_faded(colour, BAND_OPACITY),
        hoverinfo="skip",
        **common,
    )


def _add_faint(figure: Figure, curve: Curve, colour: str) -> None:
    figure.add_scatter(
        x=list(curve.x),
        y=list(curve.y),
        name=html.escape(curve.name),
        legendgroup=curve.group or curve.name,
        mode="lines",
        line={"color": colour, "width": 1},
        opacity=FAINT_OPACITY,
        hoverinfo="skip",
    )


def _add_dots(figure: Figure, curve: Curve, marker: Mapping[str, object]) -> None:
    figure.add_scatter(
        x=list(curve.x),
        y=list(curve.y),
        name=html.escape(curve.name),
        legendgroup=curve.name,
        mode="markers",
        marker=dict(marker),
    )


def _faded(colour: str, opacity: float) -> str:
    red, green, blue = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"


def _cell(value: object) -> Markup:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    content = value if isinstance(value, Markup) else shown(value)
    return Markup('<td class="number">{}</td>' if number else "<td>{}</td>").format(content)
