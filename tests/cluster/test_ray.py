"""Engines in processes of their own, by Ray: the same bits as in one process, whatever happens to them on the way.

Needs the package ray (`make test-cluster`). One Ray serves all tests of this file; whole commands start their own.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from qarl.build import System, build
from qarl.checkpoint import newest_checkpoint
from qarl.cluster import ray as ray_module
from qarl.cluster.config import ClusterConfig
from qarl.cluster.ray import Actors, Shelf
from qarl.errors import ConfigurationError, RunError
from qarl.recipe import Recipe, load_recipe
from qarl.records import Group, Snapshot
from qarl.rollout.fleet import EngineLost, Fleet
from qarl.sync.arrays import pack
from qarl.sync.checksum import checksum
from qarl.tracking.jsonl import read_lines

ROOT = Path(__file__).resolve().parents[2]
SMOKE = ROOT / "recipes" / "smoke.toml"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the package ray: make test-cluster"),
]

SEED = (5, 3)
LONG = ("--sampling.max_new_tokens=1500", "--prompts.max_prompt_tokens=256", "--eval.count=1", "--group_size=16")
"""Rollouts of seconds, so that something can happen in them."""


def recipe_of(*overrides: str) -> Recipe:
    return load_recipe(SMOKE, overrides)


@pytest.fixture(scope="module", autouse=True)
def _ray_ends_with_the_tests() -> Iterator[None]:
    yield
    import ray

    ray.shutdown()


def serving(*overrides: str) -> System:
    """A system whose engine serves the model as it is."""
    system = build(recipe_of(*overrides))
    system.cast.engine.load(system.cast.learner.publish())
    return system


def rollout(system: System) -> list[Group]:
    plan = system.plan
    prompts = system.cast.prompts.take(0, plan.prompts_per_step)
    # One of them twice: an engine counts how often it came.
    return system.cast.engine.generate([*prompts, prompts[0]], plan.group_size, plan.sampling, SEED)


def assert_same(found: list[Group], expected: list[Group]) -> None:
    assert [group.prompt.id for group in found] == [group.prompt.id for group in expected]
    for one, other in zip(found, expected, strict=True):
        for mine, theirs in zip(one.completions, other.completions, strict=True):
            for part in ("token_ids", "engine_logprobs", "versions"):
                assert torch.equal(getattr(mine, part), getattr(theirs, part)), part
            assert (mine.finish_reason, mine.text) == (theirs.finish_reason, theirs.text)


def processes() -> dict[int, str]:
    """Process ids and states of all descendants of this process."""
    table = subprocess.run(["ps", "-eo", "pid,ppid,stat,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 3) for line in table.splitlines()[1:]]
    return {int(row[0]): f"{row[1]} {row[2]} {row[3]}" for row in rows}


def below(root: int) -> set[int]:
    table = {pid: int(row.split()[0]) for pid, row in processes().items()}
    found = {root}
    while more := {pid for pid, parent in table.items() if parent in found} - found:
        found |= more
    return found - {root}


def process_of(fleet: Any, index: int) -> int:
    return int(fleet._engines[index].where.split()[1])


def during(fleet: Fleet, act: Callable[[], None]) -> None:
    """Do something once, in the middle of the next rollout: when its engines first say that they are at work."""
    done = threading.Event()

    def watch(finished: int, total: int) -> None:
        if not done.is_set():
            assert finished < total
            done.set()
            act()

    fleet._progress = watch


@pytest.mark.parametrize("scheme", ["w8a8-int8", "w4a16"])
@pytest.mark.parametrize("engines", [1, 2])
def test_actors_complete_as_an_engine_of_this_process_does(engines: int, scheme: str) -> None:
    alone = serving(f"--scheme={scheme}")
    system = serving(f"--scheme={scheme}", f"--cluster.engines={engines}")
    assert_same(rollout(system), rollout(alone))
    processes = {process_of(system.cast.engine, index) for index in range(engines)}
    assert len(processes) == engines and os.getpid() not in processes
    assert f"engines: {engines} processes on this machine, threads each 1; their kernels" in system.account
    readings = {name: metric.value() for name, metric in system.cast.engine.metrics().items()}
    assert readings["publish/bytes"] == pack(system.cast.learner.publish()).num_bytes
    assert 0 <= readings["perf/bubble"] < 1 and 0 <= readings["engine/idle"] < 1


def outcome(folder: Path) -> dict[str, Any]:
    """Figures that owe nothing to a clock or to where engines are, completions, and the last weights' bytes."""
    elsewhere = ("time/", "perf/", "memory/", "engine/", "publish/")
    last = newest_checkpoint(folder / "checkpoints")
    assert last is not None
    return {
        "metrics": [
            {k: v for k, v in row.items() if not k.startswith(elsewhere)}
            for row in read_lines(folder / "metrics.jsonl")
        ],
        "evaluations": read_lines(folder / "evaluations.jsonl"),
        "completions": {path.name: path.read_text() for path in (folder / "completions").iterdir()},
        "tensors": {path.name: path.read_bytes() for path in last.folder.rglob("*.safetensors")},
    }


def command(folder: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "qarl", "train", str(SMOKE), "--run-dir", str(folder), *options]


def trained(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(folder, *options), cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_a_run_on_actors_is_the_run_in_one_process(tmp_path: Path) -> None:
    for engines in (0, 1, 2):
        done = trained(tmp_path / str(engines), f"--cluster.engines={engines}")
        assert done.returncode == 0, done.stderr
    expected = outcome(tmp_path / "0")
    assert len(expected["metrics"]) == 5 and {row["mismatch/bit_equal"] for row in expected["metrics"]} == {1.0}
    assert outcome(tmp_path / "1") == outcome(tmp_path / "2") == expected
    assert all(row["engine/restarts"] == 0 for row in read_lines(tmp_path / "2" / "metrics.jsonl"))


def test_a_run_goes_on_with_another_number_of_engines(tmp_path: Path) -> None:
    assert trained(tmp_path / "moved", "--steps=2").returncode == 0
    assert trained(tmp_path / "moved", "--cluster.engines=1").returncode == 0
    assert trained(tmp_path / "stayed").returncode == 0
    moved, stayed = outcome(tmp_path / "moved"), outcome(tmp_path / "stayed")
    assert len(moved.pop("evaluations")) == len(stayed.pop("evaluations")) + 1  # the first part had an end too
    assert moved == stayed


def test_actors_that_are_told_to_stop_hand_back_what_they_have() -> None:
    whole = rollout(serving(*LONG))
    system = serving(*LONG, "--cluster.engines=2")
    plan, begun = system.plan, threading.Event()
    asked: list[tuple[int, int]] = []

    def stop(finished: int, total: int) -> bool:
        asked.append((finished, total))
        return begun.is_set()

    during(system.cast.engine, begun.set)
    prompts = system.cast.prompts.take(0, plan.prompts_per_step)
    part = system.cast.engine.generate([*prompts, prompts[0]], plan.group_size, plan.sampling, SEED, stop)
    pairs = [
        (one, other)
        for group, other_group in zip(part, whole, strict=True)
        for one, other in zip(group.completions, other_group.completions, strict=True)
    ]
    for one, other in pairs:
        assert torch.equal(one.token_ids, other.token_ids[: len(one)])
        assert one.finish_reason in ("aborted", other.finish_reason)
    assert any(one.finish_reason == "aborted" for one, _ in pairs)
    assert {total for _, total in asked} == {len(pairs)}
    during(system.cast.engine, lambda: None)
    assert_same(rollout(system), whole)


def test_weights_are_put_once_for_all_engines() -> None:
    system = serving("--cluster.engines=2")
    shelf: Shelf = system.cast.engine._make.shelf
    snapshot = system.cast.learner.publish()
    reference = shelf.put(snapshot)
    assert shelf.put(snapshot) is reference
    assert shelf.put(replace(snapshot, version=1)) is not reference


class Store:
    """In place of Ray's: keeps what was put, slowly, or is full."""

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.is_full = False

    def put(self, parcel: Any) -> int:
        time.sleep(0.1)
        if self.is_full:
            raise MemoryError("the store is full")
        self.kept.append(parcel)
        return len(self.kept)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    found = Store()
    monkeypatch.setattr(ray_module, "_ray", lambda: found)
    return found


def a_snapshot(version: int) -> Snapshot:
    tensors = {"model.norm.weight": torch.full((4,), float(version))}
    return Snapshot(version, tensors, {}, checksum(tensors))


def test_a_base_is_put_once_for_engines_that_ask_at_the_same_time(store: Store) -> None:
    shelf, base = Shelf(), a_snapshot(0)
    with ThreadPoolExecutor(3) as engines:
        references = list(engines.map(shelf.put_base, [base] * 3))
    assert references == [1, 1, 1] and len(store.kept) == 1
    assert shelf.put_base(a_snapshot(1)) == 2


def test_what_could_not_be_put_leaves_no_version_that_seems_to_be_there(store: Store) -> None:
    shelf, first = Shelf(), a_snapshot(0)
    assert shelf.put(first) == 1
    store.is_full = True
    with pytest.raises(MemoryError):
        shelf.put(a_snapshot(1))
    store.is_full = False
    assert shelf.put(first) == 2


def test_damaged_weights_are_refused_over_there_and_the_old_ones_stay() -> None:
    system = serving("--cluster.engines=2")
    expected = rollout(system)
    snapshot = system.cast.learner.publish()
    name = "model.layers.0.self_attn.k_proj.weight"
    codes = snapshot.tensors[name].clone()
    codes[0, 0] ^= 1
    damaged = replace(snapshot, version=1, tensors={**snapshot.tensors, name: codes}, operands=None)
    with pytest.raises(RunError, match=r"^engine \d: weights of version 1 changed between publishing and loading"):
        system.cast.engine.load(damaged)
    assert_same(rollout(system), expected)


def test_what_the_engine_refuses_arrives_as_itself() -> None:
    system = serving("--cluster.engines=1")
    (prompt,) = system.cast.prompts.take(0, 1)
    with pytest.raises(ConfigurationError, match="prompt long: 2048 prompt tokens"):
        system.cast.engine.generate([replace(prompt, id="long", token_ids=(1,) * 2048)], 2, system.plan.sampling, SEED)


def refuse(progress: Any) -> Any:
    raise ZeroDivisionError("no engine today")


def test_what_nobody_foresees_shows_where_it_happened() -> None:
    with pytest.raises(ZeroDivisionError, match=r"(?s)in refuse.*no engine today"):
        Fleet(Actors(ClusterConfig(engines=1), refuse, None), 1, 60.0)


def nothing(progress: Any) -> Any:
    """An engine that nobody asks."""


def threads_matter() -> dict[str, str]:
    return {"kernels": "cpu", "vector width": f"{8 * torch.get_num_threads()} floats"}


def test_an_engine_that_would_compute_other_bits_is_refused_by_what_differs() -> None:
    if (os.cpu_count() or 1) < 2:
        pytest.skip("needs 2 cores")
    assert torch.get_num_threads() == 1
    expected = r"^engine 0 \(process \d+ on .*\) would not give .*: vector width: 8 floats here, 16 floats there; run"
    with pytest.raises(ConfigurationError, match=expected):
        Fleet(Actors(ClusterConfig(engines=1, engine_cpus=2), nothing, threads_matter), 1, 60.0)


def threads_over_there(progress: Any) -> Any:
    raise RunError(f"{torch.get_num_threads()} threads")


@pytest.mark.parametrize("cpus", [1, 2])
def test_an_engine_has_the_threads_that_the_recipe_says(cpus: int) -> None:
    if cpus > (os.cpu_count() or 1):
        pytest.skip("needs 2 cores")
    with pytest.raises(RunError, match=f"{cpus} threads"):
        Fleet(Actors(ClusterConfig(engines=1, engine_cpus=cpus), threads_over_there, None), 1, 60.0)


@pytest.mark.parametrize("asked", ["--cluster.engine_cpus=1000", "--cluster.engine_gpus=1000.0"])
def test_more_than_there_is_is_refused_before_anything_starts(asked: str) -> None:
    with pytest.raises(ConfigurationError, match=r"cluster\.engines = 2 with cluster\.engine_.pus = 1000 need 2000"):
        build(recipe_of("--cluster.engines=2", asked))


def is_gone(process: int) -> bool:
    """At once, or as soon as the system and Ray get to it on a busy machine."""
    until = time.monotonic() + 20
    while process in processes() and time.monotonic() < until:
        time.sleep(0.1)
    return process not in processes()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_engine_is_replaced_and_its_prompts_are_asked_again(
    number: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    expected = rollout(serving(*LONG))
    system = serving(*LONG, "--cluster.engines=2", "--cluster.restarts=1", "--cluster.timeout_s=15")
    fleet: Any = system.cast.engine
    lost = process_of(fleet, 1)
    during(fleet, partial(os.kill, lost, number))
    assert_same(rollout(system), expected)
    assert process_of(fleet, 1) != lost and is_gone(lost)
    assert fleet.metrics()["engine/restarts"].value() == 1
    warnings = [one.getMessage() for one in caplog.records if one.name == "qarl" and "replaced" in one.getMessage()]
    assert len(warnings) == 1 and f"engine 1: process {lost} on" in warnings[0]
    assert_same(rollout(system), expected)


def test_an_engine_killed_while_the_learner_computes_is_replaced_too() -> None:
    expected = rollout(serving())
    system = serving("--cluster.engines=2", "--cluster.restarts=1")
    fleet: Any = system.cast.engine
    os.kill(process_of(fleet, 0), signal.SIGKILL)
    fleet.load(system.cast.learner.publish())
    assert_same(rollout(system), expected)
    assert fleet.metrics()["engine/restarts"].value() == 1


class Running:
    """A run of many steps on two actors, in a process group of its own."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        endless = ("--steps=100000", "--checkpoint.every=100000", "--cluster.engines=2", *options)
        self.process = subprocess.Popen(
            command(folder, *endless),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("step 3/"):
                break
        self.others = below(self.process.pid)

    def engines(self) -> list[int]:
        return [pid for pid, row in processes().items() if pid in self.others and "ray::EngineActor" in row]

    def end(self) -> tuple[int, str, float]:
        """Exit code, last line on stderr, and the seconds until both were there."""
        started = time.monotonic()
        _, error = self.process.communicate(timeout=60)
        return self.process.returncode, error.splitlines()[-1], time.monotonic() - started

    def left_after(self, seconds: float) -> set[int]:
        """Processes of the run that are still there after so long at most."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and any(self._is_alive(pid) for pid in self.others):
            time.sleep(0.2)
        return {pid for pid in self.others if self._is_alive(pid)}

    @staticmethod
    def _is_alive(pid: int) -> bool:
        return not processes().get(pid, "0 Z").split()[1].startswith("Z")

    def saved(self) -> int:
        found = newest_checkpoint(self.folder / "checkpoints")
        return found.step if found is not None else 0


def test_a_dead_engine_ends_the_run_with_the_cause_last_and_no_finished_step_is_lost(tmp_path: Path) -> None:
    run = Running(tmp_path / "run")
    killed = run.engines()[0]
    os.kill(killed, signal.SIGKILL)
    code, last, seconds = run.end()
    assert code == 1 and seconds < 20
    assert f"process {killed} on" in last and "it has ended" in last and "is the last checkpoint" in last
    steps = len(read_lines(tmp_path / "run" / "metrics.jsonl"))
    assert run.saved() == steps >= 3
    assert run.left_after(20) == set()

    options = (f"--steps={steps + 2}", "--checkpoint.every=100000")
    assert trained(tmp_path / "run", *options, "--cluster.engines=1").returncode == 0
    assert trained(tmp_path / "unbroken", *options).returncode == 0
    assert outcome(tmp_path / "run") == outcome(tmp_path / "unbroken")


def test_a_hung_engine_ends_the_run_in_time(tmp_path: Path) -> None:
    run = Running(tmp_path / "run", "--cluster.timeout_s=12", *LONG)
    hung = run.engines()[0]
    os.kill(hung, signal.SIGSTOP)
    code, last, seconds = run.end()
    assert code == 1 and seconds < 12 + 15
    assert f"process {hung} on" in last and "no sign of life for cluster.timeout_s = 12 s" in last
    assert run.saved() >= 3
    assert run.left_after(20) == set()


@pytest.mark.parametrize("options", [(), LONG], ids=["short rollouts", "long rollouts"])
def test_ctrl_c_saves_and_leaves_no_process(tmp_path: Path, options: tuple[str, ...]) -> None:
    run = Running(tmp_path / "run", "--cluster.restarts=3", *options)
    assert len(run.engines()) == 2
    os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does: everybody in the foreground gets it
    code, last, _ = run.end()
    assert code == 130 and "steps, which are saved" in last
    assert run.saved() >= 3
    assert run.left_after(20) == set()


def test_a_killed_run_takes_its_processes_along(tmp_path: Path) -> None:
    run = Running(tmp_path / "run")
    engines = set(run.engines())
    run.process.kill()
    run.others, agents = engines, run.others - engines
    assert run.left_after(20) == set()
    run.others = agents  # Ray's own take a minute to notice
    assert run.left_after(120) == set()


CLUSTER = """
# A cluster of two machines, as far as Ray can tell, each with room for one engine; one is lost, another one comes.
import sys
from pathlib import Path
import ray
from ray.cluster_utils import Cluster
from qarl.build import build
from qarl.errors import ConfigurationError
from qarl.recipe import load_recipe

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})

def built(engines):
    options = [f"--cluster.engines={engines}", f"--cluster.ray_address={cluster.address}", "--cluster.restarts=1"]
    return build(load_recipe(Path(sys.argv[1]), options))

first = built(1)  # this process belongs to the machine that stays
try:
    built(2)
except ConfigurationError as error:
    print("REFUSED", error)
second = cluster.add_node(num_cpus=1)
cluster.wait_for_nodes()
del first
system = built(2)
cast, plan = system.cast, system.plan
cast.engine.load(cast.learner.publish())

def rollout():
    groups = cast.engine.generate(cast.prompts.take(0, 4), 4, plan.sampling, (5, 3))
    return [(one.token_ids.tolist(), one.engine_logprobs.tolist()) for group in groups for one in group.completions]

before = rollout()
where = [engine.where for engine in cast.engine._engines]
cluster.remove_node(second, allow_graceful=False)
cluster.add_node(num_cpus=1)
print("SAME", rollout() == before)
print("MOVED", sum(engine.where not in where for engine in cast.engine._engines))
print("RESTARTS", cast.engine.metrics()["engine/restarts"].value(), flush=True)
ray.shutdown()
cluster.shutdown()
"""


def test_engines_live_on_the_machines_of_a_running_cluster_and_outlive_one_of_them() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CLUSTER, str(SMOKE)], cwd=ROOT, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert any(line.startswith("REFUSED cluster.engines = 2") and "there are 1;" in line for line in said)
    assert [line for line in said if line.startswith(("SAME", "MOVED", "RESTARTS"))] == [
        "SAME True",
        "MOVED 1",
        "RESTARTS 1.0",
    ]


def test_a_cluster_that_does_not_answer_is_refused(tmp_path: Path) -> None:
    done = trained(tmp_path, "--cluster.engines=1", "--cluster.ray_address=127.0.0.1:1", "--dry-run")
    assert done.returncode == 2
    assert "cluster.ray_address = '127.0.0.1:1': nobody answers there" in done.stderr.splitlines()[-1]


def test_an_engine_that_is_lost_says_which_process_it_was() -> None:
    system = serving("--cluster.engines=1", "--cluster.timeout_s=60")
    engine: Any = system.cast.engine._engines[0]
    os.kill(process_of(system.cast.engine, 0), signal.SIGKILL)
    with pytest.raises(EngineLost, match=r"^process \d+ on .*: loading weights, it has ended: The actor died"):
        engine.load(replace(system.cast.learner.publish(), version=1))
