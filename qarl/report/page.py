"""A page: titled sections in one HTML file that brings its styles, its scripts and its figures' library along."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from qarl import __version__
from qarl.checkpoint import write_atomically
from qarl.errors import ConfigurationError
from qarl.report.figures import plotly_script

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Section:
    """A heading of the page and what stands below it; text that is no `Markup` is escaped."""

    title: str
    html: Markup | str
    note: str = ""


def write_page(path: Path, title: str, sections: Sequence[Section], note: str = "") -> int:
    """Write the page at `path`, whole or not at all; returns its size in bytes. ConfigurationError where it cannot."""
    check_writable(path)
    text = (
        _environment()
        .get_template("page.html.jinja")
        .render(
            title=title,
            note=note,
            version=__version__,
            sections=sections,
            styles=Markup((HERE / "page.css").read_text(encoding="utf-8")),
            plotly=plotly_script(),
            script=Markup((HERE / "page.js").read_text(encoding="utf-8")),
        )
    )
    try:
        write_atomically(path, text)
    except OSError as error:
        raise _refused(path, error.strerror or str(error)) from error
    return len(text.encode())


def check_writable(path: Path) -> None:
    """ConfigurationError where no page can be written at `path`; to be asked before the work, which may take long."""
    if path.is_dir():
        raise _refused(path, "it is a folder")
    if not path.parent.is_dir():
        raise _refused(path, f"there is no folder {path.parent}")


def _refused(path: Path, reason: str) -> ConfigurationError:
    return ConfigurationError(f"--out {path}: cannot be written, {reason}; give a file in a folder that you may write")


def _environment() -> Environment:
    # Everything is escaped that is not `Markup`: what a model wrote must not become a part of the page.
    return Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
