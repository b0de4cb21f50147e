"""Tests of a program: what rows hold, in the forms of public data sets, and whether a program passes."""

from __future__ import annotations

import ast
import json
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qarl.rewards.sandbox import Job, Limits, run

Sources = tuple[tuple[str, str], ...]
"""Pairs of title and text."""


class MalformedTests(ValueError):
    """What a row has cannot be read as tests; the message follows "the tests"."""


@dataclass(frozen=True, slots=True)
class Printed:
    """The program prints `output` when it reads `input`. Blank lines and the amount of space do not count."""

    input: str
    output: str
    tolerance: float = 0.0

    def passed(self, program: Sources, limits: Limits) -> bool:
        ended = run(Job(program, stdin=self.input), limits)
        return ended.fault is None and same_words(ended.output.decode(errors="replace"), self.output, self.tolerance)


@dataclass(frozen=True, slots=True)
class Values:
    """Each expression, evaluated in order, is equal to one of its accepted values, which the program never sees.

    `sequences`: a tuple is equal to a list, as for values that come from JSON.
    """

    expressions: tuple[str, ...]
    accepted: tuple[tuple[Any, ...], ...]
    arguments: Any = None
    setup: str = ""
    sequences: bool = False
    tolerance: float = 0.0

    def passed(self, program: Sources, limits: Limits) -> bool:
        sources = (*program, ("setup", self.setup))
        job = Job(sources, module="program", expressions=self.expressions, arguments=self.arguments)
        ended = run(job, limits)
        if ended.fault is not None:
            return False
        try:
            pairs = list(zip(json.loads(ended.report), self.accepted, strict=True))
        # What cannot be read there, the program itself has put there.
        except (ValueError, TypeError, RecursionError):
            return False
        return all(
            any(matches(given, one, self.sequences, self.tolerance) for one in accepted) for given, accepted in pairs
        )


@dataclass(frozen=True, slots=True)
class Asserts:
    """Python that raises nothing after the program. It runs beside the program, which could deceive it on purpose."""

    code: str
    setup: str = ""

    def passed(self, program: Sources, limits: Limits) -> bool:
        token = secrets.token_hex(16)
        sources = (*program, ("setup", self.setup), ("tests", self.code))
        ended = run(Job(sources, module="program", token=token), limits)
        return ended.fault is None and ended.report == json.dumps(token).encode()


Test = Printed | Values | Asserts


def read_tests(value: Any, function: Any = None, setup: str = "", tolerance: float = 0.0) -> list[Test]:
    """The tests of a row, in one of the forms that `qarl.rewards.code` names; MalformedTests for anything else."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        value = _parsed_json(value)
    if isinstance(value, Mapping) and "test_cases" in value:
        value = _parsed_json(value["test_cases"]) if isinstance(value["test_cases"], str) else value["test_cases"]
    if isinstance(value, Mapping):
        cases = _pairs(value, function)
    elif _is_list_of(value, Mapping):
        cases = [_pair(one, function) for one in value]
    elif isinstance(value, str) and value.strip():
        return [_asserts(value, function, setup)]
    elif _is_list_of(value, str):
        texts = value if function is None else ["\n".join(value)]
        return [_asserts(text, function, setup) for text in texts]
    else:
        raise MalformedTests(f"are {_shown(value)}, not inputs with outputs, nor asserts")
    if not cases:
        raise MalformedTests("are none: `inputs` is empty")
    return [_case(*case, tolerance) for case in cases]


def lines(value: Any) -> str:
    """A text, or a list of lines as one; MalformedTests for anything else."""
    text = "\n".join(map(str, value)) if isinstance(value, list | tuple) else value
    if not isinstance(text, str):
        raise MalformedTests(f"have {_shown(text)} where a text, or a list of lines, is expected")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise MalformedTests(f"have a text that is not Unicode ({error})") from error
    return text


def same_words(given: str, expected: str, tolerance: float = 0.0) -> bool:
    """Whether the lines that are not blank have the same words; numbers that are not whole may differ a little."""
    ours, theirs = ([line.split() for line in text.split("\n") if line.strip()] for text in (given, expected))
    if ours == theirs:
        return True
    if tolerance == 0 or [len(line) for line in ours] != [len(line) for line in theirs]:
        return False
    pairs = zip((word for line in ours for word in line), (word for line in theirs for word in line), strict=True)
    return all(one == other or _near(_number(one), _number(other), tolerance) for one, other in pairs)


def matches(given: Any, expected: Any, sequences: bool = False, tolerance: float = 0.0) -> bool:
    """Whether what `confined.portable` wrote is the expected value, of built-in types.

    With `sequences`, tuples are lists and the keys of a dict are texts, as in JSON.
    """
    try:
        return _matches(given, expected, sequences, tolerance)
    # The program can have written anything.
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError):
        return False


def _matches(given: Any, expected: Any, sequences: bool, tolerance: float) -> bool:
    """What is given is only walked along the expected value, and only looked up, never made into a dict or set of its
    own: a program that chooses the hashes of its values cannot make the comparison long."""
    if isinstance(expected, dict):
        parts = _parts(given, "dict")
        items = {_key(key, sequences): item for key, item in expected.items()}
        return len(parts) == len(items) and all(
            _matches(item, items[_key(_plain(key), sequences)], sequences, tolerance) for key, item in parts
        )
    if isinstance(expected, set | frozenset):
        parts = _parts(given, "set", "frozenset")
        return len(parts) == len(expected) and all(_plain(part) in expected for part in parts)
    if isinstance(expected, list | tuple):
        parts = _parts(given, *(("list", "tuple") if sequences else (type(expected).__name__,)))
        return len(parts) == len(expected) and all(
            _matches(one, other, sequences, tolerance) for one, other in zip(parts, expected, strict=True)
        )
    value = _plain(given)
    return bool(value == expected) or _near(value, expected, tolerance)


def _parts(given: Any, *kinds: str) -> list[Any]:
    """What a container of one of these kinds holds; ValueError or TypeError for anything else."""
    if not isinstance(given, dict):
        raise TypeError("not a container")
    [(kind, parts)] = given.items()
    if kind not in kinds or not isinstance(parts, list):
        raise ValueError(f"{kind} is none of {kinds}")
    return parts


def _plain(given: Any) -> Any:
    """The value of a scalar, or of a tuple of scalars; ValueError for what cannot be a key."""
    if not isinstance(given, dict):
        return given
    [(kind, parts)] = given.items()
    match kind:
        case "tuple":
            return tuple(_plain(part) for part in parts)
        case "bytes":
            return bytes(parts)
        case "complex":
            return complex(*parts)
    raise ValueError(f"a {kind} cannot be a key")


def _key(key: Any, sequences: bool) -> Any:
    return str(key) if sequences else key


def _near(given: Any, expected: Any, tolerance: float) -> bool:
    if not isinstance(given, int | float) or not isinstance(expected, int | float):
        return False
    whole = isinstance(given, int) and isinstance(expected, int)
    return not whole and math.isclose(given, expected, rel_tol=tolerance, abs_tol=tolerance)


def _number(word: str) -> int | float | None:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return None


Case = tuple[Any, Any, Any]
"""Input, output, and the function to call, if one is named."""


def _pairs(value: Mapping[str, Any], function: Any) -> list[Case]:
    inputs, outputs = value.get("inputs"), value.get("outputs")
    if not isinstance(inputs, list | tuple) or not isinstance(outputs, list | tuple):
        raise MalformedTests(f"have the keys {', '.join(map(str, value)) or 'of nothing'}, not `inputs` and `outputs`")
    if len(inputs) != len(outputs):
        raise MalformedTests(f"have {len(inputs)} inputs and {len(outputs)} outputs")
    name = value.get("fn_name") or function
    return [(given, expected, name) for given, expected in zip(inputs, outputs, strict=True)]


def _pair(case: Mapping[str, Any], function: Any) -> Case:
    if "input" not in case or "output" not in case:
        raise MalformedTests(f"have a case with the keys {', '.join(map(str, case))}, not `input` and `output`")
    return case["input"], case["output"], case.get("fn_name") or function


def _case(given: Any, expected: Any, function: Any, tolerance: float) -> Test:
    if function is None:
        return Printed(lines(given), lines(expected), tolerance)
    if isinstance(given, str):  # LiveCodeBench: a line of JSON for each argument, and for the value
        arguments, accepted = (
            [_parsed_json(line) for line in given.splitlines() if line.strip()],
            _parsed_json(expected),
        )
        values: tuple[Any, ...] = (accepted,)
    elif isinstance(given, list | tuple):
        # APPS wraps many values, but not all, in a list of their own.
        arguments, wrapped = list(given), isinstance(expected, list | tuple) and len(expected) == 1
        values = (expected, expected[0]) if wrapped else (expected,)
    else:
        raise MalformedTests(f"have the input {_shown(given)} for {function}, not a list of arguments")
    _check_name(function)
    call = f"(Solution().{function} if 'Solution' in globals() else {function})(*arguments)"
    accepted = tuple(_as_json(one) for one in values)
    return Values((call,), (accepted,), _as_json(arguments), sequences=True, tolerance=tolerance)


def _asserts(code: str, function: Any, setup: str) -> Test:
    """Asserts that compare with written values, and stand last, become values; others run beside the program."""
    if function is not None:
        _check_name(function)
        code = f"{code}\n\ncheck({function})\n"
    statements = _parsed(code, "tests").body
    _parsed(setup, "setup")
    acting = [one for one in statements if not isinstance(one, _DEFINITIONS)]
    if not any(isinstance(node, ast.Assert | ast.Call | ast.Raise) for one in acting for node in ast.walk(one)):
        raise MalformedTests("check nothing: they hold no assert, or only define functions that nothing calls")
    first = next((index for index, one in enumerate(statements) if isinstance(one, ast.Assert)), len(statements))
    compared = [_comparison(one) for one in statements[first:]]
    pairs = [pair for pair in compared if pair is not None]
    if not pairs or len(pairs) < len(compared):
        return Asserts(code, setup)
    before = ast.unparse(ast.Module(statements[:first], []))
    expressions, literals = zip(*pairs, strict=True)
    return Values(expressions, tuple((literal,) for literal in literals), setup=f"{setup}\n{before}")


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)


def _comparison(statement: ast.stmt) -> tuple[str, Any] | None:
    """Expression and value of `assert expression == value`, either way round; None for another statement."""
    match statement:
        case ast.Assert(ast.Compare(left, [ast.Eq()], [right])):
            for expression, literal in ((left, right), (right, left)):
                try:
                    return ast.unparse(expression), ast.literal_eval(literal)
                except (ValueError, TypeError):
                    continue
    return None


def _parsed(code: str, what: str) -> ast.Module:
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise MalformedTests(f"are not Python ({what}: {error})") from error


def _parsed_json(text: Any) -> Any:
    if not isinstance(text, str):
        raise MalformedTests(f"have {_shown(text)} where a text of JSON is expected")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedTests(f"are not JSON ({error})") from error


def _as_json(value: Any) -> Any:
    """What a value is after a journey through JSON, as the program's own will be."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise MalformedTests(f"have a value that is not JSON ({error})") from error


def _check_name(function: Any) -> None:
    if not isinstance(function, str) or not function.isidentifier():
        raise MalformedTests(f"call {_shown(function)}, which is not the name of a function")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]} ..."


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and all(isinstance(one, kind) for one in value)
