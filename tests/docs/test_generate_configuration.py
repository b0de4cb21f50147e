"""The committed configuration page says what the classes say."""

import importlib.util
from pathlib import Path
from types import ModuleType

from qarl.objectives import OBJECTIVES

DOCS = Path(__file__).resolve().parents[2] / "docs"


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_configuration", DOCS / "generate_configuration.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_current() -> None:
    written = (DOCS / "configuration.md").read_text(encoding="utf-8")
    assert written == generator().page(), "run: python docs/generate_configuration.py"


def test_every_choice_is_on_the_page() -> None:
    page = generator().page()
    for name in OBJECTIVES:
        assert f'`objective.type = "{name}"`' in page
    assert "| `updates_per_batch` | integer | `1` |" in page


def test_every_key_on_the_page_has_a_meaning() -> None:
    rows = [line for line in generator().page().splitlines() if line.startswith("| `")]
    assert len(rows) > 50
    assert [row for row in rows if row.endswith("|  |")] == []
