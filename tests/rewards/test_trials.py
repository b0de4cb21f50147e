from __future__ import annotations

import json
import sys

import pytest

from qarl.rewards.confined import LANDLOCK_VERSION, landlock_version
from qarl.rewards.sandbox import Limits
from qarl.rewards.trials import Asserts, MalformedTests, Printed, Values, lines, matches, read_tests, same_words

needs_sandbox = pytest.mark.skipif(
    sys.platform != "linux" or landlock_version() < LANDLOCK_VERSION,
    reason=f"this kernel lacks Landlock of version {LANDLOCK_VERSION} (Linux 6.2)",
)

ADD = "def add(a, b):\n    return a + b\n"


def results(tests: object, program: str, **how: object) -> list[bool]:
    """Whether the program passes each of the tests."""
    return [test.passed((("program.py", program),), Limits()) for test in read_tests(tests, **how)]


# --- forms


PRINTED = [Printed("1 2", "3"), Printed("2\n2", "4")]


@pytest.mark.parametrize(
    "tests",
    [
        {"inputs": ["1 2", "2\n2"], "outputs": ["3", "4"]},
        {"inputs": ["1 2", ["2", "2"]], "outputs": ["3", ["4"]], "fn_name": None},
        '{"inputs": ["1 2", "2\\n2"], "outputs": ["3", "4"]}',
        [{"input": "1 2", "output": "3"}, {"input": "2\n2", "output": "4"}],
        ' [{"input": "1 2", "output": "3", "type": "stdin"}, {"input": "2\\n2", "output": "4"}]',
        {"language": "python", "test_cases": [{"input": "1 2", "output": "3"}, {"input": "2\n2", "output": "4"}]},
        {"test_cases": '[{"input": "1 2", "output": "3"}, {"input": "2\\n2", "output": "4"}]'},
    ],
)
def test_every_form_of_inputs_and_outputs_is_the_same_test(tests):
    assert read_tests(tests) == PRINTED


@pytest.mark.parametrize(
    ("tests", "function", "arguments", "accepted"),
    [
        ({"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}, None, [1, 2], (3,)),
        ({"inputs": [[1, 2]], "outputs": [[3]]}, "add", [1, 2], ([3], 3)),
        ({"inputs": [[1, 2]], "outputs": [[3, 4]]}, "add", [1, 2], ([3, 4],)),
        ([{"input": "1\n2", "output": "3", "fn_name": "add"}], None, [1, 2], (3,)),
        ([{"input": '"a"\n[1]', "output": "[3]"}], "add", ["a", [1]], ([3],)),
        ([{"input": ("a", (1,)), "output": (3,)}], "add", ["a", [1]], ([3], 3)),
    ],
)
def test_a_function_is_called_with_arguments(tests, function, arguments, accepted):
    [test] = read_tests(tests, function)
    assert isinstance(test, Values)
    assert (test.arguments, test.accepted, test.sequences) == (arguments, (accepted,), True)


def test_asserts_that_compare_with_a_written_value_become_values():
    [test] = read_tests("import math\nx = 1\nassert add(x, 2) == 3\nassert [1, (2,)] == both(math.inf)", setup="y = 2")
    assert test == Values(("add(x, 2)", "both(math.inf)"), ((3,), ([1, (2,)],)), setup="y = 2\nimport math\nx = 1")


@pytest.mark.parametrize(
    "code",
    [
        "assert add(1, 2) == 3\nassert abs(add(1, 2) - 3) < 0.1",
        "assert add(1, 2) == 3\nx = add(2, 2)\nassert x == 4",
        "assert add(1, 2) == add(2, 1)",
        "assert 1 < add(1, 2) == 3",
        "assert add(1, 2)",
        "for x in range(3):\n    assert add(x, 0) == x",
        "if add(1, 2) != 3:\n    raise ValueError",
    ],
)
def test_other_asserts_run_beside_the_program(code):
    assert read_tests(code) == [Asserts(code)]


def test_a_list_of_asserts_is_a_test_for_each():
    assert read_tests(["assert f() == 1", "assert f()"], setup="import math") == [
        Values(("f()",), ((1,),), setup="import math\n"),
        Asserts("assert f()", "import math"),
    ]


def test_a_check_of_a_candidate_is_called_with_the_function():
    [test] = read_tests("def check(candidate):\n    assert candidate(1, 2) == 3", "add")
    assert test == Asserts("def check(candidate):\n    assert candidate(1, 2) == 3\n\ncheck(add)\n")
    assert read_tests(["def check(candidate):", "    assert candidate(1, 2) == 3"], "add") == [test]


@pytest.mark.parametrize(
    ("tests", "function", "problem"),
    [
        ("{'inputs': []}", None, "are not JSON"),
        ({"inputs": [], "outputs": []}, None, "are none"),
        ({"inputs": ["1"], "outputs": []}, None, "have 1 inputs and 0 outputs"),
        ({"inputs": ["1"]}, None, "have the keys inputs, not `inputs` and `outputs`"),
        ({"inputs": "1", "outputs": "1"}, None, "have the keys inputs, outputs, not"),
        ([{"input": "1"}], None, "have a case with the keys input, not `input` and `output`"),
        ([{"input": 1, "output": "1"}], None, "have 1 where a text, or a list of lines, is expected"),
        ([{"input": "1", "output": "\ud800"}], None, "have a text that is not Unicode"),
        ([{"input": "1", "output": "x"}], "add", "are not JSON"),
        ([{"input": "1", "output": 1}], "add", "have 1 where a text of JSON is expected"),
        ([{"input": 1, "output": 1}], "add", "have the input 1 for add, not a list of arguments"),
        ([{"input": [b"a"], "output": 1}], "add", "have a value that is not JSON"),
        ([{"input": [1], "output": 1}], "add()", "call 'add\\(\\)', which is not the name of a function"),
        ([{"input": [1], "output": 1, "fn_name": 3}], None, "call 3, which is not the name of a function"),
        ("assert f( == 1", None, "are not Python \\(tests: "),
        (["assert f() == 1", "?"], None, "are not Python"),
        ("x = 1", None, "check nothing"),
        ("def check(candidate):\n    assert candidate() == 1", None, "check nothing"),
        (
            "import unittest\nclass Test(unittest.TestCase):\n    def test(self):\n        assert f() == 1",
            None,
            "check nothing",
        ),
        ("", None, "are '', not inputs with outputs, nor asserts"),
        ([], None, "are \\[\\], not"),
        (["assert f()", 1], None, "not inputs with outputs, nor asserts"),
        (7, None, "are 7, not inputs"),
        ({"test_cases": None}, None, "are None, not"),
    ],
)
def test_what_is_no_test_says_why(tests, function, problem):
    with pytest.raises(MalformedTests, match=problem):
        read_tests(tests, function)


def test_a_setup_that_is_not_python_is_refused():
    with pytest.raises(MalformedTests, match=r"are not Python \(setup: "):
        read_tests("assert f() == 1", setup="import")


def test_lines_are_one_text():
    assert (lines("a"), lines(["a", 1])) == ("a", "a\n1")


# --- comparisons


@pytest.mark.parametrize(
    ("given", "expected", "tolerance", "same"),
    [
        ("3", "3\n", 0.0, True),
        ("  1  2 \r\n\n3\n", "1 2\n3", 0.0, True),
        ("1 2 3", "1 2\n3", 0.0, False),
        ("1\n2", "1", 0.0, False),
        ("", "1", 0.0, False),
        ("", " \n", 0.0, True),
        ("3.0", "3", 0.0, False),
        ("YES", "Yes", 0.0, False),
        ("0.3333333", "0.3333334", 1e-6, True),
        ("0.33333", "0.33334", 1e-6, False),
        ("1.0 x", "1.0000001 x", 1e-6, True),
        ("1.0 x", "1.0000001 y", 1e-6, False),
        ("0.0000001", "0.0", 1e-6, True),
        ("1000001", "1000000", 1e-3, False),  # whole numbers are exact
        ("nan", "nan", 1e-6, True),
        ("nan", "1.0", 1e-6, False),
        ("1.0 2.0", "1.0\n2.0", 1e-6, False),
    ],
)
def test_words_by_line(given, expected, tolerance, same):
    assert same_words(given, expected, tolerance) is same


@pytest.mark.parametrize(
    ("given", "expected", "sequences", "same"),
    [
        (1, 1, False, True),
        (1.0, 1, False, True),
        ("1", 1, False, False),
        (None, None, False, True),
        (None, 0, False, False),
        ({"list": [1, 2]}, [1, 2], False, True),
        ({"list": [1, 2]}, [1, 2, 3], False, False),
        ({"tuple": [1, 2]}, [1, 2], False, False),
        ({"tuple": [1, 2]}, [1, 2], True, True),
        ({"list": [{"tuple": [1]}]}, [(1,)], False, True),
        ({"set": [2, 1]}, {1, 2}, False, True),
        ({"frozenset": [{"tuple": [1]}]}, {(1,)}, False, True),
        ({"list": [1, 2]}, {1, 2}, False, False),
        ({"set": [1]}, {1, 2}, False, False),
        ({"dict": [[1, {"list": []}]]}, {1: []}, False, True),
        ({"dict": [[1, "a"]]}, {"1": "a"}, False, False),
        ({"dict": [[1, "a"]]}, {"1": "a"}, True, True),
        ({"dict": [[{"tuple": [1, 2]}, 3]]}, {(1, 2): 3}, False, True),
        ({"dict": []}, {1: 2}, False, False),
        ({"bytes": [97]}, b"a", False, True),
        ({"complex": [0, 1]}, 1j, False, True),
    ],
)
def test_values_by_type(given, expected, sequences, same):
    assert matches(given, expected, sequences) is same


def test_values_within_a_tolerance():
    assert matches({"list": [0.1 + 0.2]}, [0.3], tolerance=1e-9)
    assert not matches({"list": [0.1 + 0.2]}, [0.3])
    assert not matches(10**6 + 1, 10**6, tolerance=0.1)
    assert not matches(10**400, 1.5, tolerance=0.1)  # too large for a float


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"list": 3},
        {"list": None},
        {"list": [1], "tuple": [1]},
        {"other": [1]},
        {"set": [{"list": [1]}]},
        {"dict": [1]},
        {"dict": [[1]]},
        {"dict": [[{"dict": []}, 1]]},
        {"bytes": [300]},
        {"complex": ["a", "b"]},
        {"tuple": 3},
        [[1]],
    ],
)
def test_what_no_program_would_report_is_no_match(given):
    for expected in (1, [1], (1,), {1}, {1: 1}, b"a", 1j, "a"):
        assert matches(given, expected) is False


def test_a_report_as_deep_as_the_expected_value_is_no_error():
    given: object = 1
    expected: object = 1
    for _ in range(5000):
        given, expected = {"list": [given]}, [expected]
    assert matches(given, expected) is False


# --- programs


@needs_sandbox
def test_programs_that_print():
    tests = json.dumps({"inputs": ["1 2\n", "2 2\n"], "outputs": ["3\n", "4\n"]})
    assert results(tests, "print(sum(map(int, input().split())))") == [True, True]
    assert results(tests, "print(3)") == [True, False]
    assert results(tests, "print(sum(map(int, input().split())))\n1 / 0") == [False, False]
    assert results(tests, "a, b = input().split()\nprint(a + b)") == [False, False]
    assert results([{"input": "", "output": "0.3"}], "print(0.1 + 0.2)", tolerance=1e-6) == [True]


@needs_sandbox
def test_functions_that_are_called():
    tests = {"inputs": [[1, 2], [2, 2]], "outputs": [[3], 4], "fn_name": "add"}
    assert results(tests, ADD) == [True, True]
    assert results(tests, "class Solution:\n    def add(self, a, b):\n        return a + b\n") == [True, True]
    assert results(tests, "def add(a, b):\n    return (3,)") == [True, False]
    assert results(tests, "def sub(a, b):\n    return a - b") == [False, False]
    assert results(tests, ADD + "if __name__ == '__main__':\n    1 / 0") == [True, True]
    assert results(
        [{"input": '{"1": [2]}', "output": '{"2": [1]}'}], "def f(x):\n    return {2: (1,)}", function="f"
    ) == [True]


@needs_sandbox
def test_asserts_of_every_kind():
    tests = ["assert add(1, 2) == 3", "assert abs(add(1, 1) - 2) < 0.1", "assert add([1], [2]) == [1, 2]"]
    assert results(tests, ADD) == [True, True, True]
    assert results(tests, "def add(a, b):\n    return 3") == [True, False, False]
    assert results("assert f(1) == LIMIT", "f = lambda x: x", setup="LIMIT = 1") == [True]
    check = "def check(candidate):\n    for x in range(3):\n        assert candidate(x, 1) == x + 1"
    assert results(check, ADD + "if __name__ == '__main__':\n    1 / 0", function="add") == [True]
    assert results(check, "def add(a, b):\n    return a", function="add") == [False]


@needs_sandbox
def test_values_are_taken_in_order():
    tests = "x = []\nassert push(x, 1) == [1]\nassert push(x, 2) == [1, 2]"
    assert results(tests, "def push(x, n):\n    x.append(n)\n    return x") == [True]
    assert results(tests, "def push(x, n):\n    return [1]") == [False]


@needs_sandbox
def test_threads_that_a_program_leaves_behind_do_not_hold_up_its_tests():
    program = f"import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()\n{ADD}"
    assert results(["assert add(1, 2) == 3", "assert add(1, 2) in (3,)"], program) == [True, True]


@needs_sandbox
def test_a_program_that_fails_after_its_tests_has_failed():
    program = f"import os\nos._exit = lambda status: 1 / 0\n{ADD}"
    assert results(["assert add(1, 2) == 3", "assert add(1, 2) in (3,)"], program) == [False, False]


EARLY = {
    "exit": "import sys\nsys.exit(0)",
    "exit at the call": "import sys\ndef add(a, b):\n    sys.exit(0)",
    "hard exit": "import os\nos._exit(0)",
    "hard exit at the call": "import os\ndef add(a, b):\n    os._exit(0)",
    "exit handler": "import atexit, os\natexit.register(os._exit, 0)\n1 / 0",
    "junk on every descriptor": (
        "import os\nfor number in range(3, 64):\n    try:\n        os.write(number, b'true')\n    except OSError:\n"
        "        pass\nos._exit(0)"
    ),
    "no error is one": "import builtins\nbuiltins.AssertionError = None\ndef add(a, b):\n    return 0",
    "printing": "print('passed', 'ok', 3)",
    "exception hook": "import os, sys\nsys.excepthook = lambda *_: os._exit(0)\n1 / 0",
}


@needs_sandbox
@pytest.mark.parametrize("way", EARLY)
def test_no_way_to_end_early_passes(way):
    tests = ["assert add(1, 2) == 3", "assert abs(add(1, 2) - 3) < 0.1"]
    assert results(tests, EARLY[way]) == [False, False]


@needs_sandbox
@pytest.mark.parametrize(
    "program",
    [
        "class Any:\n    def __eq__(self, other):\n        return True\ndef add(a, b):\n    return Any()",
        "class Any(int):\n    def __eq__(self, other):\n        return True\ndef add(a, b):\n    return Any()",
        "import sys\ndef add(a, b):\n    return sys._getframe(1).f_locals.get('arguments')",
        "import builtins, json\njson.dumps = lambda _: '[4]'\nbuiltins.eval = lambda *_: 3\nadd = lambda *_: 0",
        "import sys\nsys.modules['json'] = sys\ndef add(a, b):\n    return 0",
    ],
)
def test_values_are_compared_where_no_program_reaches(program):
    assert results("assert add(1, 2) == 3", program) == [False]
    assert results({"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}, program) == [False]
