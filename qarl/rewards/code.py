"""Programs, judged by running them on tests in the sandbox."""

from __future__ import annotations

import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from pydantic import Field

from qarl.errors import ConfigurationError
from qarl.records import Completion, Group, Prompt
from qarl.rewards.sandbox import Limits, prove
from qarl.rewards.term import Outcome, Term, column
from qarl.rewards.trials import MalformedTests, Test, lines, read_tests

BLOCK = re.compile(r"^```[ \t]*(?:python|python3|py)\s*?\n(.*?)^```\s*?$", re.MULTILINE | re.DOTALL | re.IGNORECASE)


class Code(Term):
    """1 when the completion's program passes all of the row's tests, else 0; each test runs it once in the sandbox.

    Tests stand in one column, as values or as a text of JSON. Inputs and outputs: `{"inputs": [...], "outputs":
    [...]}` (APPS, TACO, PRIME, verl) or a list of `{"input": ..., "output": ...}` (open-r1, also under `test_cases`).
    With a function's name (`fn_name` there, or `function_column`) that function is called, otherwise the program
    reads the input and prints. Asserts: a text, or a list of one or more lines each (MBPP), or, with
    `function_column`, a text that defines `check(candidate)` (HumanEval).

    A program that is missing, crashes, or goes past a limit is wrong. Tests that cannot be read are a
    ConfigurationError, a sandbox that does not start is an error: neither is ever a 0.
    """

    type: Literal["code"] = "code"
    tests_column: str = Field(default="answer", description="Column with the tests.")
    function_column: str | None = Field(
        default=None, description="Column with the name of the function that tests call (`entry_point`)."
    )
    setup_column: str | None = Field(
        default=None, description="Column with code that runs before asserts (`test_setup_code`, `test_imports`)."
    )
    preamble: str = Field(default="", description="Code that runs before every program, such as usual imports.")
    extract: Literal["block", "text"] = Field(
        default="block", description="The program: the last closed ```python block, or the whole completion."
    )
    partial: bool = Field(default=False, description="The share of tests that pass, instead of all or nothing.")
    tolerance: float = Field(
        default=0.0, ge=0.0, le=0.1, description="Allowed relative difference of numbers that are not whole."
    )
    timeout: float = Field(default=5.0, gt=0.0, le=600.0, description="Seconds for one test.")
    total_timeout: float = Field(
        default=30.0, gt=0.0, le=3600.0, description="Seconds for all tests of a program; what is left then has failed."
    )
    memory_mb: int = Field(default=1024, ge=128, description="Megabytes of address space for a program.")
    max_output_bytes: int = Field(default=10_000_000, ge=1000, description="Most that a program may print.")
    scratch_mb: int = Field(
        default=0, ge=0, description="Megabytes that a program may write below /tmp, in memory; 0: it writes no files."
    )
    packages: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="Folders (of `pip install --target`) with packages that programs may import beyond Python's own.",
    )

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.tests_column,) if self.function_column is None else (self.tests_column, self.function_column)

    def prepare(self) -> None:
        for folder in self.packages:
            if not os.path.isdir(folder):
                raise ConfigurationError(f"reward {self.label}: packages: {folder} is not a folder; correct the path")
        try:
            compile(self.preamble, "preamble", "exec")
        except (SyntaxError, ValueError) as error:
            raise ConfigurationError(f"reward {self.label}: preamble is not Python ({error}); correct it") from error
        try:
            prove(self._limits(self.timeout))
        except ConfigurationError as error:
            raise ConfigurationError(f"reward {self.label}: {error}") from error

    def check(self, prompt: Prompt) -> None:
        super().check(prompt)
        self._tests(prompt)

    def score(self, prompt: Prompt, completion: Completion) -> float:
        tests = self._tests(prompt)
        program = self._program(completion.text)
        if program is None:
            return 0.0
        passed = 0
        deadline = time.monotonic() + self.total_timeout
        for test in tests:
            left = deadline - time.monotonic()
            if left > 0 and test.passed((("preamble", self.preamble), ("program.py", program)), self._limits(left)):
                passed += 1
            elif not self.partial:
                return 0.0
        return passed / len(tests)

    def score_group(self, group: Group) -> list[Outcome]:
        # A thread only waits for its program's process, so that as many programs run as there are cores.
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            return list(pool.map(lambda completion: self._attempt(group.prompt, completion), group.completions))

    def _limits(self, seconds: float) -> Limits:
        return Limits(
            seconds=min(seconds, self.timeout),
            memory_bytes=self.memory_mb << 20,
            output_bytes=self.max_output_bytes,
            scratch_bytes=self.scratch_mb << 20,
            packages=tuple(os.path.abspath(folder) for folder in self.packages),
        )

    def _program(self, text: str) -> str | None:
        if self.extract == "text":
            return text
        blocks = BLOCK.findall(text)
        return blocks[-1] if blocks else None

    def _tests(self, prompt: Prompt) -> list[Test]:
        value = column(prompt, self.tests_column, self.label)
        function = column(prompt, self.function_column, self.label) if self.function_column else None
        try:
            return read_tests(value, function, self._setup(prompt), self.tolerance)
        except MalformedTests as error:
            raise ConfigurationError(
                f"reward {self.label}: the tests in column `{self.tests_column}` of prompt {prompt.id} {error}; "
                "correct or drop the row, or name another tests_column"
            ) from error

    def _setup(self, prompt: Prompt) -> str:
        """Rows of a set that has such a column mostly leave it empty."""
        if self.setup_column is None or prompt.row.get(self.setup_column) in ("", []):
            return ""
        return lines(column(prompt, self.setup_column, self.label))
