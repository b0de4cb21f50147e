"""Numbers as people and models write them: signs, commas, units, fractions, percentages."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

# A number of more digits, or a larger exponent, is no answer but an attack on the grader's time.
_MAX_DIGITS = 100
_MAX_EXPONENT = 300

_SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_SCALE = rf"(?:{'|'.join(_SCALES)})\b"

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.[0-9]+)?|(?<![.\w])\.[0-9]+)(?:[eE][+-]?[0-9]{{1,4}}(?![0-9a-zA-Z]))?"
_RATIO = rf"(?:(?:[0-9]+ )?{_DIGITS} ?/ ?{_DIGITS}(?![0-9]|\.[0-9]))"
_MAGNITUDE = rf"(?:{_RATIO}|{_DECIMAL})"
_CURRENCY = "[$€£¥]"

_WHOLE = re.compile(
    rf"(?P<sign>[+-]?) ?{_CURRENCY}? ?(?P<inner>[+-]?)(?P<magnitude>{_MAGNITUDE})"
    rf"(?: ?(?P<scale>{_SCALE}))?(?P<unit>.*)",
    re.IGNORECASE,
)
# A minus is a sign unless something it could be subtracted from stands directly before it.
_IN_TEXT = re.compile(
    rf"(?:(?<![0-9A-Za-z)\]}}])[+-])?{_CURRENCY}?(?<![0-9])(?<![0-9]\.){_MAGNITUDE}(?: ?%| ?percent\b| ?{_SCALE})?",
    re.IGNORECASE,
)

_PERCENT = ("%", "percent", "per cent")
_UNIT = re.compile(
    r"°[CF]?|[msghlLVWNJKCFA]|[a-zA-Zµ°Ω/]{1,4}\^?[23]|[a-zA-Zµ°Ω][a-zA-Zµ°Ω/·.-]+(?: [a-zA-Zµ/·.-]+){0,3}"
)
_NOT_UNITS = frozenset(
    [
        *("or", "and", "not", "but", "nor", "to", "half", "plus", "minus", "times", "if"),
        *("pi", "sqrt", "sin", "cos", "tan", "log", "ln", "exp", "xy", "yz", "ab", "bc"),
    ]
)

_LATEX_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{\s*(-?[0-9,]+)\s*\}\s*\{\s*([0-9,]+)\s*\}|([0-9])([0-9]))")
_LATEX_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_REPLACED = {
    "\u2212": "-", "\u2013": "-", "\ufe63": "-", "\uff0d": "-", "\uff05": "%",
    "{,}": ",", "\\,": "", "\\!": "", "\\;": " ", "\\ ": " ", "~": " ", "\u00a0": " ", "\u202f": "",
    "\\%": "%", "\\$": "$", "\\left": "", "\\right": "", "^\\circ": "°", "^{\\circ}": "°", "\\circ": "°",
    "\\(": "", "\\)": "", "\\[": "", "\\]": "", "\\cdot": "*", "\\times": "*",
    "\\displaystyle": "", "\\quad": " ", "\\qquad": " ", "\\approx": "=", "≈": "=", "\u2009": "",
}  # fmt: skip
_GROUPS = re.compile(r"(?<=[0-9])\u00a0(?=[0-9]{3}(?![0-9]))")
# After an equals sign a minus is a sign, whatever space stands behind it.
_SPACED_SIGN = re.compile(r"(?<==) ?([+-]) (?=[0-9$.])")
_SCIENTIFIC = re.compile(r"(?<=[0-9]) ?[*×x] ?10 ?\^ ?(?:\{ ?([+-]?[0-9]{1,4}) ?\}|([+-]?[0-9]{1,4}))(?![0-9])")


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number with what was written behind it; `percent` says that this was a percent sign."""

    value: Fraction
    unit: str = ""
    percent: bool = False


def plain(text: str) -> str:
    """LaTeX and typographic spellings of numbers as plain ones: `-\\frac{1}{2}` is "-1/2"."""
    text = _GROUPS.sub("", text)
    for spelling, replacement in _REPLACED.items():
        text = text.replace(spelling, replacement)
    text = _LATEX_TEXT.sub(r" \1", text)
    text = _LATEX_FRACTION.sub(_ratio_text, text)
    text = _SCIENTIFIC.sub(lambda match: f"e{match[1] or match[2]}", text)
    return _SPACED_SIGN.sub(r" \1", " ".join(text.split()))


def quantity(text: str) -> Quantity | None:
    """The number that a text consists of, unit included; None when it is anything more or less than one number."""
    match = _WHOLE.fullmatch(_unwrapped(plain(text)))
    if match is None or (match["sign"] and match["inner"]):
        return None
    value = _magnitude(match["magnitude"])
    unit = match["unit"].strip(" .*`$€£¥")
    percent = unit.lower() in _PERCENT
    if value is None or not (unit == "" or percent or _is_unit(unit)):
        return None
    if match["scale"]:
        value *= _SCALES[match["scale"].lower()]
    negative = "-" in (match["sign"], match["inner"])
    return Quantity(-value if negative else value, "" if percent else _singular(unit), percent)


def numbers_in(text: str) -> list[str]:
    """Every number in a running text, as written, with its sign, currency, percent sign or scale ("million")."""
    return [match.group() for match in _IN_TEXT.finditer(plain(text))]


def same_quantity(one: Quantity, other: Quantity, tolerance: float = 0.0) -> bool:
    """Whether two quantities are equal, within a share `tolerance` of the larger.

    A unit counts only where both have one. A percentage equals the plain number before its sign and also its
    hundredth, because both are how people leave the sign out: "50%" is 50 and 0.5.
    """
    if one.unit and other.unit and one.unit != other.unit:
        return False
    if one.percent == other.percent:
        return _close(one.value, other.value, tolerance)
    percent, number = (one, other) if one.percent else (other, one)
    return _close(percent.value, number.value, tolerance) or _close(percent.value / 100, number.value, tolerance)


def _close(one: Fraction, other: Fraction, tolerance: float) -> bool:
    return abs(one - other) <= Fraction(tolerance) * max(abs(one), abs(other))


def _unwrapped(text: str) -> str:
    """Without what may stand around a number: emphasis, quotes, a final stop, `$...$`, parentheses, braces."""
    text = text.lstrip(" :*_`\"'“‘").rstrip(" .,;:*_`\"'”’")
    for opening, closing in ("$$", "()", "{}"):
        if len(text) > 2 and text[0] == opening and text[-1] == closing:
            text = text[1:-1].strip()
    return text


def _magnitude(text: str) -> Fraction | None:
    if len(text) > _MAX_DIGITS:
        return None
    text = text.replace(",", "")
    if "/" in text:
        whole, _, ratio = text.replace(" /", "/").replace("/ ", "/").rpartition(" ")
        numerator, denominator = ratio.split("/")
        if int(denominator) == 0:
            return None
        return Fraction(int(whole or 0)) + Fraction(int(numerator), int(denominator))
    exponent = re.split("[eE]", text)[1:]
    if exponent and abs(int(exponent[0])) > _MAX_EXPONENT:
        return None
    return Fraction(text)


def _is_unit(text: str) -> bool:
    return _UNIT.fullmatch(text) is not None and _NOT_UNITS.isdisjoint(text.lower().split())


def _singular(unit: str) -> str:
    """One form for "Apples" and "apple"; short units ("m", "ms") are left alone."""
    unit = unit.lower().replace(" ", "").replace("^", "")
    return unit[:-1] if len(unit) > 3 and unit.endswith("s") else unit


def _ratio_text(match: re.Match[str]) -> str:
    numerator, denominator = (match[1], match[2]) if match[1] is not None else (match[3], match[4])
    # 1\frac{1}{2} is a mixed number, not 11/2.
    mixed = match.start() > 0 and match.string[match.start() - 1].isdigit()
    return f"{' ' if mixed else ''}{numerator}/{denominator}"
