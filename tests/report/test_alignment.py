"""The table by layer is what `qarl align` finds for the run's own engine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qarl.report import alignment
from qarl.report.history import read_runs


def test_without_tokens_the_page_says_how_to_measure(run: Path):
    section = alignment.alignment(read_runs([run]), 0)
    assert (section.html, "--align 1000" in section.note) == ("", True)


def test_the_run_is_compared_as_it_was_trained(make_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch):
    run = make_run("a", "--engine.kv_cache=int8", "--engine.max_concurrency=3", '--quant.rules."*.o_proj"=none')
    asked: list[Any] = []

    def align(*arguments: Any) -> dict[str, Any]:
        asked.append(arguments)
        return {"level": "exact", "tokens": 64, "per_layer": [{"layer": 0, "max_abs_diff": 0.125}]}

    monkeypatch.setattr(alignment, "align", align)
    section = alignment.alignment(read_runs([run]), 64)
    assert asked == [(str(run), "w8a8-int8", 64, {"type": "native", "kv_cache": "int8"}, "auto", None)]
    assert '<td class="number">0.125</td>' in section.html
    assert "Without the exceptions of [quant]." in section.html
