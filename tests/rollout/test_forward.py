"""Decode steps from graphs: the bits of the plain forward, at every size of batch, as sequences come and go."""

from collections.abc import Sequence

import pytest
import torch

from qarl.bench.system import random_prompts, system_for
from qarl.errors import RunError
from qarl.ops.kernels import kernels
from qarl.records import Group, Sampling
from qarl.rollout import native
from qarl.rollout.cache import KVFormat
from qarl.rollout.forward import Forward
from qarl.rollout.native import NativeEngine

pytestmark = pytest.mark.skipif(not kernels().exact_matmul, reason="graphs are of the C kernels")

SCHEMES = ("none", "w8a8-int8", "w4a8-int8", "w4a16")


def loaded_engine(scheme: str, kv_cache: KVFormat = "fp32") -> NativeEngine:
    system = system_for("tiny", scheme, 3, kv_cache=kv_cache)
    engine = system.cast.engine
    assert isinstance(engine, NativeEngine)
    engine.load(system.cast.learner.publish())
    return engine


def rollout(engine: NativeEngine, temperature: float) -> list[Group]:
    prompts = random_prompts(engine.decoder.vocab_size, 3, 40)
    stops = tuple(range(0, engine.decoder.vocab_size, 16))  # sequences end at different times
    return engine.generate(prompts, 3, Sampling(temperature, 50, stops), seed=(1,))


@pytest.mark.parametrize("kv_cache", ["fp32", "int8"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_graphs_change_no_bit_of_a_rollout(
    scheme: str, kv_cache: KVFormat, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = loaded_engine(scheme, kv_cache)
    forwards: list[Forward] = []

    class Watched(Forward):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)  # type: ignore[arg-type]
            forwards.append(self)

    class WithoutGraphs(Watched):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)
            self.allows_graphs = False

    monkeypatch.setattr(native, "Forward", Watched)
    with_graphs = rollout(engine, temperature)
    monkeypatch.setattr(native, "Forward", WithoutGraphs)
    without = rollout(engine, temperature)
    assert forwards[0].graphs and not forwards[1].graphs
    assert temperature == 0 or len(forwards[0].graphs) > 1  # the batch shrank on the way
    assert tokens_of(with_graphs) == tokens_of(without)
    for a, b in zip(completions_of(with_graphs), completions_of(without), strict=True):
        assert torch.equal(a, b)


def test_a_scheme_with_torch_operations_is_not_recorded() -> None:
    engine = loaded_engine("fp8")
    prompts = random_prompts(engine.decoder.vocab_size, 1, 4)
    cache = engine.cache_for(prompts, 1, Sampling(1.0, 4, ()))
    assert not Forward(engine.decoder, cache, 8).uses_graphs()


def tokens_of(groups: Sequence[Group]) -> list[list[int]]:
    return [completion.token_ids.tolist() for group in groups for completion in group.completions]


def completions_of(groups: Sequence[Group]) -> list[torch.Tensor]:
    return [completion.engine_logprobs for group in groups for completion in group.completions]


def test_weights_are_not_exchanged_while_a_rollout_runs() -> None:
    system = system_for("tiny", "w8a8-int8", 3)
    engine, snapshot = system.cast.engine, system.cast.learner.publish()
    assert isinstance(engine, NativeEngine)
    engine.load(snapshot)

    def stop(finished: int, total: int) -> bool:
        engine.load(snapshot)
        return True

    prompts = random_prompts(engine.decoder.vocab_size, 1, 4)
    with pytest.raises(RunError, match="load between two rollouts"):
        engine.generate(prompts, 1, Sampling(1.0, 4, ()), seed=(1,), stop=stop)
    engine.load(snapshot)
