"""The results as one HTML page."""

from __future__ import annotations

from pathlib import Path

from qarl.compare.results import Results
from qarl.compare.table import main_rows, notes
from qarl.report import page
from qarl.report.figures import table


def write_page(path: Path, results: Results) -> None:
    page.write_page(path, results.name, [page.Section("Results", table(main_rows(results)), notes(results))])
