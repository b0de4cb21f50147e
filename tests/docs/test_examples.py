"""What the pages tell people to write is accepted."""

import re
import shlex
import shutil
import tomllib
from pathlib import Path

import pytest

from qarl.compare.experiment import load_comparison
from qarl.recipe import load_recipe, parse_recipe

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks() -> list[tuple[str, str]]:
    """Every TOML block of a page that is a whole recipe."""
    found = [(page.name, block) for page in PAGES for block in re.findall(r"```toml\n(.*?)```", page.read_text(), re.S)]
    return [(name, block) for name, block in found if re.search(r"^model = ", block, re.M)]


def commands() -> list[str]:
    """Every `qarl train recipes/...` of a page, as far as its overrides go."""
    pattern = r"qarl train (recipes/[\w-]+\.toml(?: +--[\w.-]+=(?:\"[^\"]*\"|[^\s`;#]+))*)"
    return sorted({command for page in PAGES for command in re.findall(pattern, page.read_text())})


def test_there_are_examples() -> None:
    assert len(blocks()) >= 1 and len(commands()) >= 3


@pytest.mark.parametrize(("page", "block"), blocks(), ids=lambda value: value[:20])
def test_a_recipe_on_a_page_is_valid(page: str, block: str) -> None:
    assert parse_recipe(tomllib.loads(block), page).model


@pytest.mark.parametrize("command", commands())
def test_a_command_on_a_page_is_valid(command: str) -> None:
    recipe, *overrides = shlex.split(re.sub(r"\$\w+|\bS\b", "1", command))
    kept = [one for one in overrides if not one.startswith(("--run-dir", "--resume"))]
    assert load_recipe(ROOT / recipe, kept).steps >= 1


def test_the_experiment_on_the_page_is_valid(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "compare.md").read_text()
    (block,) = [one for one in re.findall(r"```toml\n(.*?)```", page, re.S) if "[arms." in one]
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    path = tmp_path / "recipes" / "rounding.toml"
    path.write_text(block)
    assert len(load_comparison(path).arms) == 3
    assert load_comparison(path, is_short=True).seeds == (0,)
