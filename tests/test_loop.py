"""The main loop, run by fakes that write down what is asked of them."""

import math
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qarl.interrupts import Interrupted, Interrupts
from qarl.loop import Batch, Cast, Plan, Stopwatch, train
from qarl.metrics import Last, Mean, Metrics
from qarl.records import Advantages, Completion, Group, GroupRewards, Prompt, Sampling, Snapshot
from qarl.roles import Stop

PLAN = Plan(seed=7, steps=3, prompts_per_step=2, group_size=2, sampling=Sampling(max_new_tokens=4))


@dataclass
class Log:
    calls: list[str] = field(default_factory=list)


@dataclass
class FakePrompts:
    log: Log
    skipped: int = 0
    fingerprint: str = ""

    def take(self, step: int, count: int) -> list[Prompt]:
        self.log.calls.append(f"take {step} {count}")
        self.skipped += 3
        return [Prompt(f"fake/{step}/{index}", (1, 2), "ask", {}) for index in range(count)]


@dataclass
class FakeEngine:
    """Tokens are a function of the seed and of the served version alone."""

    log: Log
    version: int = 0
    signal_during_generate: int | None = None

    def generate(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        seed: tuple[int, ...],
        stop: Stop | None = None,
    ) -> list[Group]:
        self.log.calls.append(f"generate v{self.version} seed {seed}")
        if self.signal_during_generate is not None:
            os.kill(os.getpid(), self.signal_during_generate)
        return [
            Group(prompt, tuple(_completion(seed, self.version, index) for index in range(group_size)))
            for prompt in prompts
        ]

    def load(self, snapshot: Snapshot) -> None:
        self.log.calls.append(f"load v{snapshot.version}")
        self.version = snapshot.version

    def metrics(self) -> Metrics:
        return {"perf/bubble": Last(0.25)}


def _completion(seed: tuple[int, ...], version: int, index: int) -> Completion:
    generator = torch.Generator().manual_seed(hash((*seed, version, index)) % 2**31)
    tokens = torch.randint(0, 50, (3,), generator=generator)
    return Completion(tokens, torch.full((3,), -1.0), torch.full((3,), version), "stop", "text")


@dataclass
class FakeReward:
    log: Log
    totals: tuple[float, float] = (0.0, 1.0)

    def __call__(self, groups: Sequence[Group]) -> list[GroupRewards]:
        self.log.calls.append("reward")
        return [GroupRewards(torch.tensor(self.totals)) for _ in groups]


@dataclass
class FakeAdvantage:
    log: Log

    def __call__(self, rewards: Sequence[Tensor]) -> Advantages:
        self.log.calls.append("advantage")
        return [total - total.nanmean() for total in rewards]


@dataclass
class FakeLearner:
    """Its state is a running sum of what it was trained on, so that a different history shows."""

    log: Log
    version: int = 0
    optimizer_steps: int = 0
    state: float = 0.0
    trained: list[Advantages] = field(default_factory=list)
    groups: list[Sequence[Group]] = field(default_factory=list)
    signal_during_update: int | None = None

    def update(self, groups: Sequence[Group], advantages: Advantages) -> Metrics:
        self.log.calls.append("update")
        if self.signal_during_update is not None:
            os.kill(os.getpid(), self.signal_during_update)
        self.trained.append(advantages)
        self.groups.append(groups)
        tokens = torch.cat([completion.token_ids for group in groups for completion in group.completions])
        self.state = 0.5 * self.state + float(tokens.sum())
        self.version += 1
        return {"objective/loss": Mean(self.state, 1.0)}

    def publish(self) -> Snapshot:
        self.log.calls.append("publish")
        return Snapshot(self.version, {}, {}, "")

    def save(self, folder: Path) -> None:
        (folder / "state").write_text(f"{self.version} {self.state!r}")

    def restore(self, folder: Path) -> None:
        version, state = (folder / "state").read_text().split()
        self.version, self.state = int(version), float(state)


def cast_of_fakes() -> tuple[Cast, Log]:
    log = Log()
    return Cast(FakePrompts(log), FakeEngine(log), FakeReward(log), FakeAdvantage(log), FakeLearner(log)), log


@dataclass
class Notes:
    """An observer that writes down what it is told."""

    log: Log | None = None
    steps: list[int] = field(default_factory=list)
    metrics: list[Mapping[str, float]] = field(default_factory=list)

    def before_step(self, step: int) -> Metrics:
        return {"eval/held_out/pass@1": Last(float(step))}

    def after_rollout(self, step: int, groups: Sequence[Group], rewards: Sequence[GroupRewards]) -> None:
        assert len(groups) == len(rewards)
        if self.log is not None:
            self.log.calls.append(f"rolled out {step}")

    def after_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps.append(step)
        self.metrics.append(metrics)


def run(cast: Cast, first_step: int = 0, plan: Plan = PLAN, log: Log | None = None) -> Notes:
    notes = Notes(log)
    with Interrupts() as interrupts:
        train(cast, plan, first_step, notes, interrupts)
    return notes


def test_a_step_asks_every_role_in_order_and_serves_the_new_version_next() -> None:
    cast, log = cast_of_fakes()
    run(cast, plan=Plan(7, 2, 2, 2, Sampling()), log=log)
    trained = ["advantage", "update", "publish"]
    first = ["take 0 2", "generate v0 seed (7, 0)", "reward", "rolled out 0", *trained, "load v1"]
    second = ["take 1 2", "generate v1 seed (7, 1)", "reward", "rolled out 1", *trained, "load v2"]
    assert log.calls == first + second


def test_reports_carry_every_room_s_metrics_and_the_times_of_the_parts() -> None:
    cast, _ = cast_of_fakes()
    notes = run(cast)
    assert notes.steps == [0, 1, 2]
    metrics = notes.metrics[1]
    assert metrics["reward/mean"] == 0.5
    assert metrics["completion/length_mean"] == 3.0
    assert (metrics["prompts/length_mean"], metrics["prompts/skipped"]) == (2.0, 3.0)
    assert metrics["perf/bubble"] == 0.25
    assert metrics["eval/held_out/pass@1"] == 1.0
    assert notes.metrics[2]["objective/loss"] == cast.learner.state
    parts = [metrics[f"time/{part}"] for part in ("rollout", "reward", "learner", "publish")]
    assert 0.0 < sum(parts) <= metrics["time/step"]
    assert metrics["perf/rollout_tokens_per_s"] == pytest.approx(12 / metrics["time/rollout"])


def test_a_resumed_run_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    unbroken, _ = cast_of_fakes()
    whole = [metrics["objective/loss"] for metrics in run(unbroken).metrics]

    stopped, _ = cast_of_fakes()
    first = [metrics["objective/loss"] for metrics in run(stopped, plan=Plan(7, 1, 2, 2, PLAN.sampling)).metrics]
    stopped.learner.save(tmp_path)
    resumed, _ = cast_of_fakes()
    resumed.learner.restore(tmp_path)
    resumed.engine.load(resumed.learner.publish())
    rest = [metrics["objective/loss"] for metrics in run(resumed, first_step=resumed.learner.version).metrics]

    assert first + rest == whole
    assert len(set(whole)) == 3


@dataclass
class RewardByPrompt:
    """Groups of equal rewards, but for the prompts of these takes and places in them."""

    unequal: set[tuple[int, int]]

    def __call__(self, groups: Sequence[Group]) -> list[GroupRewards]:
        places = [tuple(map(int, group.prompt.id.split("/")[1:])) for group in groups]
        return [GroupRewards(torch.tensor([0.0, 1.0 if place in self.unequal else 0.0])) for place in places]


@pytest.mark.parametrize(
    ("unequal", "rounds", "trained"),
    [
        ({(3, 0), (3, 1)}, 1, ["3/0", "3/1"]),
        ({(3, 1), (4, 0), (4, 1)}, 2, ["3/1", "4/0"]),
        ({(5, 1)}, 3, ["3/0", "5/1"]),
        (set(), 3, ["3/0", "3/1"]),
    ],
)
def test_prompts_are_asked_until_enough_groups_can_teach(
    unequal: set[tuple[int, int]], rounds: int, trained: list[str]
) -> None:
    cast, log = cast_of_fakes()
    cast = Cast(cast.prompts, cast.engine, RewardByPrompt(unequal), cast.advantage, cast.learner)
    plan = Plan(7, 2, 2, 2, PLAN.sampling, max_rounds=3)
    metrics = run(cast, first_step=1, plan=plan).metrics[0]
    assert [call for call in log.calls if call.startswith("take")] == [f"take {3 + index} 2" for index in range(rounds)]
    seeds = ["(7, 1)", "(7, 1, 1)", "(7, 1, 2)"]
    assert [call for call in log.calls if call.startswith("gen")] == [f"generate v0 seed {s}" for s in seeds[:rounds]]
    assert [group.prompt.id.removeprefix("fake/") for group in cast.learner.groups[0]] == trained
    assert metrics["perf/rollout_rounds"] == rounds
    # All that was sampled, not what was chosen of it.
    assert metrics["reward/mean"] == len([place for place in unequal if place[0] < 3 + rounds]) / (4 * rounds)


def test_rewards_that_could_not_be_computed_reach_the_learner_as_nan_and_no_mean() -> None:
    cast, _ = cast_of_fakes()
    cast.reward.totals = (1.0, math.nan)
    metrics = run(cast).metrics[0]
    assert metrics["reward/mean"] == 1.0
    assert metrics["reward/errors"] == 2.0
    assert cast.learner.trained[0][0].isnan().tolist() == [False, True]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_rollout_leaves_the_step_untrained(number: signal.Signals) -> None:
    cast, log = cast_of_fakes()
    cast.engine.signal_during_generate = number
    with pytest.raises(Interrupted):
        run(cast)
    assert cast.learner.version == 0
    assert log.calls[-1].startswith("generate")


def test_a_signal_during_the_update_waits_until_the_step_is_published_and_reported() -> None:
    cast, log = cast_of_fakes()
    cast.learner.signal_during_update = signal.SIGTERM
    announced: list[str] = []
    notes = Notes()
    with Interrupts(announced.append) as interrupts, pytest.raises(Interrupted):
        train(cast, PLAN, 0, notes, interrupts)
    assert log.calls[-1] == "load v1"
    assert notes.steps == [0]
    assert len(announced) == 1


def test_nothing_is_done_when_all_steps_are_done_already() -> None:
    cast, log = cast_of_fakes()
    assert run(cast, first_step=3).steps == []
    assert log.calls == []


def test_a_stopwatch_s_step_covers_its_parts() -> None:
    clock = Stopwatch()
    with clock.lap("rollout"):
        sum(range(1000))
    metrics = clock.metrics()
    assert 0.0 < metrics["time/rollout"].value() <= metrics["time/step"].value()


def test_groups_without_any_reward_fill_a_batch_last() -> None:
    batch = Batch()
    none, some = [math.nan, math.nan], [1.0, 1.0]
    rewards = [GroupRewards(torch.tensor(row)) for row in (none, some, [0.0, 1.0], some)]
    prompts = [Group(Prompt(f"{index}", (1,), "", {}), ()) for index in range(4)]
    batch.add(prompts, rewards, {})
    assert batch.trained(2) == [1, 2]
    assert batch.trained(4) == [0, 1, 2, 3]
    assert [one.is_trained for one in batch.told([1, 2])] == [False, True, True, False]


def test_what_the_engine_measures_is_that_of_all_rounds() -> None:
    batch = Batch()
    batch.add([], [], {"perf/bubble": Mean(1.0, 10.0)})
    batch.add([], [], {"perf/bubble": Mean(4.0, 10.0)})
    assert batch.of_engine["perf/bubble"].value() == 0.25
