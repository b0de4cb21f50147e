from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from qarl.errors import ConfigurationError
from qarl.rewards import code, sandbox, trials
from qarl.rewards.code import Code
from qarl.rewards.confined import LANDLOCK_VERSION, landlock_version
from qarl.rewards.sandbox import Ended, Job, Limits, SandboxError
from qarl.rewards.term import Failure

needs_sandbox = pytest.mark.skipif(
    sys.platform != "linux" or landlock_version() < LANDLOCK_VERSION,
    reason=f"this kernel lacks Landlock of version {LANDLOCK_VERSION} (Linux 6.2)",
)

DOUBLE = "print(2 * int(input()))"
TESTS = {"inputs": ["1", "2", "3"], "outputs": ["2", "4", "6"]}


def fenced(program: str, language: str = "python") -> str:
    return f"Think.\n```{language}\n{program}\n```\nDone."


@pytest.fixture
def score(make_prompt, make_completion):
    def of(text: str, row: dict | None = None, **settings: object) -> float:
        return Code(**settings).score(make_prompt(**(row or {"answer": TESTS})), make_completion(text))

    return of


@needs_sandbox
def test_all_tests_or_nothing(score):
    assert score(fenced(DOUBLE)) == 1.0
    assert score(fenced("print(2)")) == 0.0
    assert score(fenced("x = int(input())\nprint(2 * x if x < 3 else 0)")) == 0.0


@needs_sandbox
def test_the_share_of_tests(score):
    program = "x = int(input())\nprint(2 * x if x < 3 else 0)"
    assert score(fenced(program), partial=True) == pytest.approx(2 / 3)
    assert score(fenced(DOUBLE), partial=True) == 1.0
    assert score(fenced("1 / 0"), partial=True) == 0.0


@needs_sandbox
def test_the_program_is_the_last_closed_block(score):
    assert score(fenced("1 / 0") + fenced(DOUBLE)) == 1.0
    assert score(fenced(DOUBLE) + fenced("1 / 0")) == 0.0
    assert score(fenced(DOUBLE, "py") + fenced("echo", "bash")) == 1.0
    assert score(fenced(DOUBLE, "Python").replace("\n", "\r\n")) == 1.0
    assert score(f"```python\n{DOUBLE}\n```") == 1.0


def test_a_missing_program_is_wrong_and_nothing_is_run(score, monkeypatch):
    monkeypatch.setattr(trials, "run", None)
    assert score("") == 0.0
    assert score(DOUBLE) == 0.0
    assert score(fenced(DOUBLE, "")) == 0.0
    assert score(f"```python\n{DOUBLE}") == 0.0


@needs_sandbox
def test_the_whole_completion(score):
    assert score(DOUBLE, extract="text") == 1.0
    assert score(fenced(DOUBLE), extract="text") == 0.0


@needs_sandbox
def test_what_a_program_does_wrong_is_never_an_error(score):
    assert score(fenced("while True: pass"), timeout=0.2) == 0.0
    assert score(fenced("x = bytearray(1 << 29)"), memory_mb=256) == 0.0
    assert score(fenced("print('x' * 2000)"), max_output_bytes=1000) == 0.0
    assert score(fenced("'\ud800'")) == 0.0
    assert score(fenced("'\0'")) == 0.0
    assert score(fenced("(" * 10_000)) == 0.0


def test_tests_past_the_total_time_have_failed(score, monkeypatch):
    clock, seconds = [100.0], []

    def slow(job: Job, limits: Limits) -> Ended:
        seconds.append(limits.seconds)
        clock[0] += 4.0
        return Ended(None, str(2 * int(job.stdin)).encode(), b"", b"")

    monkeypatch.setattr(trials, "run", slow)
    monkeypatch.setattr(code, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    assert score(fenced("..."), timeout=5.0, total_timeout=10.0) == 1.0
    assert seconds == [5.0, 5.0, 2.0]
    assert score(fenced("..."), timeout=5.0, total_timeout=8.0) == 0.0
    assert score(fenced("..."), timeout=5.0, total_timeout=8.0, partial=True) == pytest.approx(2 / 3)
    assert seconds[3:] == [5.0, 4.0] * 2


@needs_sandbox
def test_columns_of_mbpp_and_humaneval(score):
    mbpp = {"test_list": ["assert area(2) == math.pi * 4", "assert area(0) == 0"], "test_imports": ["import math"]}
    program = fenced("def area(r):\n    return 3.141592653589793 * r * r")
    assert score(program, mbpp, tests_column="test_list", setup_column="test_imports") == 1.0
    assert score(program, {**mbpp, "test_imports": []}, tests_column="test_list", setup_column="test_imports") == 0.0
    humaneval = {"test": "def check(candidate):\n    assert candidate(0) == 0", "entry_point": "area"}
    assert score(program, humaneval, tests_column="test", function_column="entry_point") == 1.0


@needs_sandbox
def test_a_preamble_comes_before_the_program(score):
    row = {"answer": {"inputs": [[[2, 1]]], "outputs": [[1, 2]], "fn_name": "ordered"}}
    program = fenced("class Solution:\n    def ordered(self, x: List[int]) -> List[int]:\n        return sorted(x)")
    assert score(program, row) == 0.0
    assert score(program, row, preamble="from typing import *") == 1.0


@needs_sandbox
def test_a_group_is_scored_in_order(make_group):
    group = make_group(fenced(DOUBLE), "none", fenced("1 / 0"), fenced(DOUBLE), answer=TESTS)
    assert Code().score_group(group) == [1.0, 0.0, 0.0, 1.0]


def test_settings_are_the_limits_of_every_run(score, monkeypatch):
    given = []

    def recorded(job: Job, limits: Limits) -> Ended:
        given.append((job.stdin, limits))
        return Ended(None, b"0.30000000000000004", b"", b"")

    monkeypatch.setattr(trials, "run", recorded)
    settings = {"timeout": 3.0, "memory_mb": 200, "max_output_bytes": 2000, "scratch_mb": 2, "packages": ("/a",)}
    row = {"answer": {"inputs": ["1", "2"], "outputs": ["0.3", "0.3"]}}
    assert score(fenced("..."), row, tolerance=1e-6, **settings) == 1.0
    limits = Limits(3.0, 200 << 20, 2000, 2 << 20, ("/a",))
    assert given == [("1", limits), ("2", limits)]
    assert score(fenced("..."), row, **settings) == 0.0


def test_a_sandbox_that_does_not_start_is_a_failure_and_not_a_zero(make_group, monkeypatch):
    def broken(job, limits):
        raise SandboxError("the sandbox did not start: out of processes")

    monkeypatch.setattr(trials, "run", broken)
    [outcome] = Code().score_group(make_group(fenced(DOUBLE), answer=TESTS))
    assert outcome == Failure("exception", "SandboxError: the sandbox did not start: out of processes")


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"answer": "{"}, "the tests in column `answer` of prompt sums/1 are not JSON .*; correct or drop the row"),
        ({"answer": {"inputs": ["1"], "outputs": []}}, "have 1 inputs and 0 outputs"),
        ({"other": 1}, "column `answer` is missing"),
        ({"answer": ""}, "not inputs with outputs"),
    ],
)
def test_tests_that_cannot_be_read_are_the_rows_fault(make_prompt, make_completion, row, problem):
    with pytest.raises(ConfigurationError, match=problem):
        Code().check(make_prompt(**row))
    with pytest.raises(ConfigurationError, match=problem):
        Code().score(make_prompt(**row), make_completion("no program"))


def test_columns_that_are_named_must_be_there(make_prompt):
    asserts = {"answer": "assert f() == 1"}
    Code(setup_column="setup").check(make_prompt(**asserts, setup=""))
    with pytest.raises(ConfigurationError, match="column `setup` is missing"):
        Code(setup_column="setup").check(make_prompt(**asserts))
    with pytest.raises(ConfigurationError, match="column `function` is missing"):
        Code(function_column="function").check(make_prompt(**asserts))


@needs_sandbox
def test_a_machine_that_holds_is_prepared_once(monkeypatch):
    runs, run = [], sandbox.run

    def counted(job: Job, limits: Limits) -> Ended:
        runs.append(limits)
        return run(job, limits)

    monkeypatch.setattr(sandbox, "run", counted)
    sandbox.prove.cache_clear()
    for _ in range(3):
        Code().prepare()
    assert len(runs) == 1


def test_a_machine_that_does_not_hold_is_refused_by_name(monkeypatch):
    def refuse(limits):
        raise ConfigurationError("the sandbox does not hold")

    monkeypatch.setattr(code, "prove", refuse)
    with pytest.raises(ConfigurationError, match="reward programs: the sandbox does not hold"):
        Code(name="programs").prepare()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"packages": ("/does/not/exist",)}, "reward code: packages: /does/not/exist is not a folder"),
        ({"preamble": "import"}, "reward code: preamble is not Python"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_the_start(settings, problem):
    with pytest.raises(ConfigurationError, match=problem):
        Code(**settings).prepare()


@pytest.mark.parametrize(
    "settings", [{"timeout": 0.0}, {"memory_mb": 10}, {"tolerance": 1.0}, {"extract": "json"}, {"sandbox": False}]
)
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(ValidationError):
        Code(**settings)
