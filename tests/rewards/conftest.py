"""Completions and groups from plain texts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from qarl.records import Completion, FinishReason, Group, Prompt


@pytest.fixture
def make_completion() -> Callable[..., Completion]:
    def make(text: str, token_ids: Sequence[int] = (5, 6, 7), finish_reason: FinishReason = "stop") -> Completion:
        length = len(token_ids)
        ids = torch.tensor(token_ids, dtype=torch.int64)
        return Completion(ids, torch.zeros(length), torch.zeros(length, dtype=torch.int64), finish_reason, text)

    return make


@pytest.fixture
def make_prompt() -> Callable[..., Prompt]:
    def make(id: str = "sums/1", **row: Any) -> Prompt:
        return Prompt(id, (1, 2), "What is 3 + 4?", row)

    return make


@pytest.fixture
def make_group(make_completion, make_prompt) -> Callable[..., Group]:
    def make(*texts: str, id: str = "sums/1", **row: Any) -> Group:
        return Group(make_prompt(id, **row), tuple(make_completion(text) for text in texts))

    return make


OBEDIENT = """
import os, signal, subprocess, sys, threading, time

from qarl.errors import ConfigurationError, RunError

class Unexpected(BaseException):
    pass

def judge(data_source, solution_str, ground_truth, extra_info=None):
    # Does what the completion says, and otherwise reads it as a number.
    action, _, argument = solution_str.partition(" ")
    return ACTIONS[action](argument, extra_info) if action in ACTIONS else float(solution_str)

def wait_for(argument, extra_info):
    # Come and wait until somebody else has come: two can only meet if they run at the same time.
    folder, _, name = argument.rpartition("/")
    open(argument, "w").close()
    while len(os.listdir(folder)) < 2:
        time.sleep(0.01)
    return 1.0

def start_child(argument, extra_info):
    child = subprocess.Popen(["sleep", "1000"])
    with open(argument, "w") as file:
        file.write(str(child.pid))
    time.sleep(1000)

def die_with_a_fork_alive(argument, extra_info):
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(7)

def signal_later(argument, extra_info):
    threading.Timer(0.1, os.kill, [os.getpid(), getattr(signal, argument)]).start()
    return 1.0

def fail(error):
    raise error

def signal_itself(argument, extra_info):
    os.kill(os.getpid(), getattr(signal, argument))
    return 1.0

ACTIONS = {
    "raise": lambda argument, extra_info: fail(ValueError(argument)),
    "raise_unexpected": lambda argument, extra_info: fail(Unexpected(argument)),
    "refuse": lambda argument, extra_info: fail(ConfigurationError(argument)),
    "give_up": lambda argument, extra_info: fail(RunError(argument)),
    "sleep": lambda argument, extra_info: time.sleep(float(argument)) or 1.0,
    "power": lambda argument, extra_info: 9**9**9,
    "exit": lambda argument, extra_info: sys.exit(argument),
    "exit_at_once": lambda argument, extra_info: os._exit(int(argument)),
    "signal": signal_itself,
    "memory": lambda argument, extra_info: len(bytearray(int(argument) << 20)),
    "return": lambda argument, extra_info: eval(argument),
    "pid": lambda argument, extra_info: os.getpid(),
    "kill_keeper": lambda argument, extra_info: os.kill(os.getppid(), signal.SIGKILL) or time.sleep(1000),
    "keeper_pid": lambda argument, extra_info: os.getppid(),
    "pop": lambda argument, extra_info: extra_info["left"].pop() and len(extra_info["left"]),
    "change_folder": lambda argument, extra_info: os.chdir(argument) or 1.0,
    "print": lambda argument, extra_info: print(argument) or 1.0,
    "meet": wait_for,
    "start_child": start_child,
    "die_with_a_fork_alive": die_with_a_fork_alive,
    "signal_later": signal_later,
}
"""
"""A reward function that does what it is told."""


@pytest.fixture(scope="session")
def obedient(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = Path(tmp_path_factory.mktemp("obedient")) / "obedient.py"
    path.write_text(OBEDIENT, encoding="utf-8")
    return f"{path}:judge"


@pytest.fixture
def told(make_group) -> Callable[..., Group]:
    """A group whose completions tell the obedient function what to do."""

    def make(*texts: str, **row: Any) -> Group:
        return make_group(*texts, **{"data_source": "test", "answer": "7", **row})

    return make


@pytest.fixture
def has_ended() -> Callable[[float], bool]:
    """Whether the process of this number has ended, perhaps unread by its parent; gives it two seconds."""

    def ended(pid: float) -> bool:
        for _ in range(200):
            try:
                state = Path(f"/proc/{int(pid)}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
            except (FileNotFoundError, ProcessLookupError):
                return True
            if state == "Z":
                return True
            time.sleep(0.01)
        return False

    return ended
