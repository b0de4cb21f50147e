"""vLLM in the engine's role, over a service in this process that takes versions as its workers do and samples from
what it then multiplies. That a real one keeps these promises is for the tests that start it.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from qarl.errors import ConfigurationError, RunError
from qarl.models.config import ModelConfig
from qarl.models.lora import LoraConfig
from qarl.quant import QuantConfig, plan_schemes, scheme_named
from qarl.records import Completion, Group, Lora, Prompt, Sampling, Snapshot
from qarl.roles import Stop
from qarl.rollout.config import NativeEngineConfig, VllmEngineConfig
from qarl.rollout.native import NativeEngine
from qarl.rollout.request import Progress
from qarl.rollout.seeds import uniforms
from qarl.rollout.vllm import engine as engine_module
from qarl.rollout.vllm import offline, server
from qarl.rollout.vllm.engine import VllmEngine
from qarl.rollout.vllm.launch import fingerprint, settings
from qarl.rollout.vllm.service import Answer, Ask, Watch
from qarl.sync import checksum as checksum_module
from qarl.sync import compressed_tensors
from qarl.sync.adapters import adapters_checksum, read_peft
from qarl.sync.checksum import digests
from qarl.sync.compressed_tensors import FORMATS, stored
from qarl.sync.snapshot import take_snapshot
from qarl.sync.transport import BroadcastTransport, receive

LENGTHS = (5, 11, 7)
SEED = (3, 8)
QUERY, NORM, EMBEDDINGS = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight", "model.embed_tokens.weight"

Spoil = Callable[[int, dict[str, Tensor]], dict[str, Tensor]]


class Pretended:
    """vLLM with `workers`, which answer a load with what they have, `spoil`t; it has `places` for completions."""

    name = "vLLM"

    def __init__(self, model: ModelConfig, vocab_size: int, workers: int = 1, places: int = 1000) -> None:
        self.spoil: Spoil = lambda rank, tensors: tensors
        self.serves_floats = True
        self.failure: RunError | None = None
        self.log: list[str] = []
        self.asked: list[Ask] = []
        self.started_from: list[Path] = []
        self.description: dict[str, Any] = {
            "vllm": "0.32.0",
            "dtype": "float32",
            "head_dtype": "float32",
            "logprobs_mode": "processed_logprobs",
            "rounds_activations_of_int4": False,
            "model": fingerprint(model, vocab_size),
            "max_model_len": 64,
            "world_size": workers,
            "max_lora_rank": 0,
            "lora_target_modules": [],
            **settings(VllmEngineConfig()),
        }
        self.arguments: dict[str, Any] = {}
        self._places = places
        self._base: Snapshot | None = None
        self.last_load = ""
        self._engine = NativeEngine(
            NativeEngineConfig(), dataclasses.replace(model, vocab_size=vocab_size), vocab_size, str
        )

    def start(
        self, folder: Path, config: VllmEngineConfig, max_model_len: int, adapters: Mapping[str, Any]
    ) -> Pretended:
        self.arguments = dict(adapters)
        assert {"config.json", "model.safetensors"} <= {path.name for path in folder.iterdir()}
        self.started_from.append(folder)
        return self

    def call(self, method: str, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        if self.failure is not None:
            raise self.failure
        message = json.loads(json.dumps(message))
        workers = int(self.description["world_size"])
        if method == "qarl_describe":
            return [dict(self.description)] * workers
        if method == "qarl_serving":
            return [{"load": self.last_load}] * workers
        self.last_load = message["load"]
        if method == "qarl_adapters":
            sent = read_peft(Path(message["folder"]))[0]
            return [{"rank": rank, "digests": digests(self.spoil(rank, dict(sent)))} for rank in range(workers)]
        assert method == "qarl_load"
        with ThreadPoolExecutor(workers) as pool:
            received = list(pool.map(lambda rank: receive(message, rank), range(workers)))
        if self.serves_floats:
            self._engine.load(received[0])
            self._base = received[0]
        self.log.append(f"load {received[0].version}")
        seconds = {"receive": 0.25, "load": 0.5, "read_back": 0.125}
        return [
            {"rank": rank, "digests": digests(self.spoil(rank, dict(one.tensors))), "seconds": seconds}
            for rank, one in enumerate(received)
        ]

    def adapt(self, folder: str) -> None:
        tensors, rank, alpha = read_peft(Path(folder))
        assert self._base is not None
        found = adapters_checksum(digests(tensors), self._base.checksum, rank, alpha)
        lora = Lora(self._base, rank, alpha)
        self._engine.load(Snapshot(0, tensors, self._base.schemes, found, lora=lora))
        self.log.append(f"adapt {Path(folder).name}")

    def forget(self) -> None:
        self.log.append("forget")

    @torch.no_grad()
    def complete(self, asks: Sequence[Ask], sampling: Sampling, watch: Watch) -> list[Answer]:
        self.asked += asks
        answers = [Answer() for _ in asks]
        is_stopped = False
        while not is_stopped and (live := [i for i, one in enumerate(answers) if one.finish_reason == "aborted"]):
            for place in live[: self._places]:
                ask, answer = asks[place], answers[place]
                token, logprob = self._sample(ask, answer, sampling.temperature)
                at_limit = len(answer.token_ids) + 1 == ask.max_tokens
                is_stop = token in sampling.stop_token_ids
                answer.take([token], [logprob], "stop" if is_stop else "length" if at_limit else None)
            is_stopped = watch(sum(one.finish_reason != "aborted" for one in answers))
        return answers

    def _sample(self, ask: Ask, answer: Answer, temperature: float) -> tuple[int, float]:
        tokens = torch.tensor([*ask.token_ids, *answer.token_ids])
        logprobs = (self._engine.decoder.full_logits(tokens)[-1].double() / temperature).log_softmax(-1)
        drawn = uniforms([ask.seed + 2**63], [len(answer.token_ids)]).double()
        token = int(torch.searchsorted(logprobs.exp().cumsum(-1), drawn))
        return token, float(logprobs[token])


@dataclasses.dataclass
class Stage:
    """A small model, a pretended vLLM for it, and engines over that."""

    small: Any
    service: Pretended

    def engine(
        self,
        snapshot: Snapshot | None = None,
        progress: Progress | None = None,
        url: str | None = None,
        lora: Any = None,
        **config: Any,
    ) -> VllmEngine:
        """Serves the snapshot; without one, nothing yet."""
        settings = VllmEngineConfig(**{"dtype": "float32", "timeout_s": 20.0, **config})
        engine = VllmEngine(settings, url, self.small.config, self.small.sampleable, 40, str, progress, lora)
        if snapshot is not None:
            engine.load(snapshot)
        return engine

    def snapshot(self, scheme: str = "w8a8-int8", version: int = 0, seed: int = 0, dtype: Any = torch.float32) -> Any:
        decoder = self.small.decoder(seed)
        plan = plan_schemes(decoder.matrices(), scheme_named(scheme), QuantConfig(rules={"lm_head": "none"}))
        return take_snapshot(decoder, plan.with_scales_in(dtype).quantized, version)

    def asks(self) -> list[Ask]:
        """Those of the last rollout."""
        asked, self.service.asked = self.service.asked, []
        return asked


@pytest.fixture
def stage(small: Any, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return made_stage(small, monkeypatch)


def made_stage(small: Any, monkeypatch: pytest.MonkeyPatch, **service: int) -> Stage:
    made = Stage(small, Pretended(small.config, small.sampleable, **service))
    monkeypatch.setattr(engine_module, "require_vllm", lambda: None)
    monkeypatch.setattr(offline, "Offline", made.service.start)
    monkeypatch.setattr(server, "Server", lambda url, timeout_s, max_concurrency: made.service)
    return made


def completions(groups: Sequence[Group]) -> list[Completion]:
    return [completion for group in groups for completion in group.completions]


def tokens(groups: Sequence[Group]) -> list[list[int]]:
    return [completion.token_ids.tolist() for completion in completions(groups)]


def after(steps: int) -> Stop:
    """Stops a rollout after that many steps."""
    asked = itertools.count(1)
    return lambda finished, total: next(asked) >= steps


def numbers(engine: VllmEngine) -> dict[str, float]:
    return {name: metric.value() for name, metric in engine.metrics().items()}


def test_a_group_for_every_prompt_in_order_and_every_record_is_whole(stage: Stage) -> None:
    prompts, sampling = stage.small.prompts(*LENGTHS), stage.small.sampling
    groups = stage.engine(stage.snapshot(version=7)).generate(prompts, 3, sampling, SEED)
    assert [group.prompt for group in groups] == prompts
    assert [len(group.completions) for group in groups] == [3, 3, 3]
    for completion in completions(groups):
        assert 1 <= len(completion) <= sampling.max_new_tokens
        assert completion.versions.tolist() == [7] * len(completion)
        assert len(completion.engine_logprobs) == len(completion)
        assert (completion.token_ids.dtype, completion.engine_logprobs.dtype) == (torch.int64, torch.float32)
        assert completion.text == str(completion.token_ids.tolist())
    assert [list(ask.token_ids) for ask in stage.asks()] == [list(p.token_ids) for p in prompts for _ in range(3)]


@pytest.mark.parametrize("scheme", ["none", "w8a8-int8", "w4a16"])
def test_what_the_service_samples_from_is_what_was_published(stage: Stage, scheme: str) -> None:
    learner = stage.small.learner(scheme, rules={"lm_head": "none"})
    engine = stage.engine(learner.publish())
    for group in engine.generate(stage.small.prompts(*LENGTHS), 2, stage.small.sampling, SEED):
        for completion in group.completions:
            predicted = stage.small.predicted(learner.decoder, group.prompt, completion).double()
            logprobs = (predicted / stage.small.sampling.temperature).log_softmax(-1)
            expected = logprobs.gather(-1, completion.token_ids[:, None])[:, 0]
            torch.testing.assert_close(completion.engine_logprobs.double(), expected, rtol=0, atol=1e-5)


def test_completions_end_by_a_stop_token_and_at_the_limit(stage: Stage) -> None:
    sampling = dataclasses.replace(stage.small.sampling, stop_token_ids=tuple(range(20)), max_new_tokens=4)
    found = completions(stage.engine(stage.snapshot()).generate(stage.small.prompts(*LENGTHS), 6, sampling, SEED))
    assert {completion.finish_reason for completion in found} == {"stop", "length"}
    for completion in found:
        assert (completion.token_ids[-1] < 20) == (completion.finish_reason == "stop")


def test_a_completions_seed_is_of_its_prompt_and_place_alone(stage: Stage) -> None:
    engine, prompts, sampling = stage.engine(stage.snapshot()), stage.small.prompts(*LENGTHS), stage.small.sampling
    first = engine.generate(prompts, 3, sampling, SEED)
    seeds = [ask.seed for ask in stage.asks()]
    assert len(set(seeds)) == 9 and all(-(2**63) <= seed < 2**63 for seed in seeds)
    turned = engine.generate(prompts[::-1], 4, sampling, SEED)
    assert [tokens([group])[:3] for group in turned[::-1]] == [tokens([group]) for group in first]
    engine.generate(prompts[1:2], 3, sampling, SEED)
    assert [ask.seed for ask in stage.asks()[-3:]] == seeds[3:6]
    for other in ((3, 9), (4, 8)):
        engine.generate(prompts, 3, sampling, other)
        assert not {ask.seed for ask in stage.asks()} & set(seeds)
    engine.generate([prompts[0], prompts[0]], 2, sampling, SEED)
    assert len({ask.seed for ask in stage.asks()}) == 4


def test_a_rollout_that_is_stopped_keeps_what_there_is_and_tells_its_progress(stage: Stage) -> None:
    told: list[tuple[int, int]] = []
    engine = stage.engine(stage.snapshot(), progress=lambda finished, total: told.append((finished, total)))
    sampling = dataclasses.replace(stage.small.sampling, stop_token_ids=())
    whole = tokens(engine.generate(stage.small.prompts(*LENGTHS), 2, sampling, SEED))
    assert told == [(0, 6)] * 9 + [(6, 6)]
    part = engine.generate(stage.small.prompts(*LENGTHS), 2, sampling, SEED, stop=after(3))
    assert tokens(part) == [completion[:3] for completion in whole]
    assert {completion.finish_reason for completion in completions(part)} == {"aborted"}


def test_what_was_aborted_goes_on_with_new_weights_and_draws_of_its_own(stage: Stage) -> None:
    engine, prompts = stage.engine(stage.snapshot()), stage.small.prompts(*LENGTHS)
    sampling = dataclasses.replace(stage.small.sampling, stop_token_ids=tuple(range(12)))
    part = engine.generate(prompts, 4, sampling, SEED, stop=after(3))
    begun = stage.asks()
    aborted = [(group.prompt, one) for group in part for one in group.completions if one.finish_reason == "aborted"]
    assert 0 < len(aborted) < 12
    engine.load(stage.snapshot(version=1, seed=1))

    whole = engine.resume(part, sampling, SEED)
    asks = stage.asks()
    assert [list(ask.token_ids) for ask in asks] == [[*p.token_ids, *one.token_ids.tolist()] for p, one in aborted]
    assert {ask.max_tokens for ask in asks} == {sampling.max_new_tokens - 3}
    assert len({ask.seed for ask in (*begun, *asks)}) == len(begun) + len(asks)
    for before, now in zip(completions(part), completions(whole), strict=True):
        if before.finish_reason != "aborted":
            assert now is before
            continue
        assert now.token_ids.tolist()[:3] == before.token_ids.tolist()
        assert torch.equal(now.engine_logprobs[:3], before.engine_logprobs)
        assert now.versions.tolist() == [0] * 3 + [1] * (len(now) - 3) and len(now) > 3
        assert now.text == str(now.token_ids.tolist())
    assert [group.prompt for group in whole] == prompts


def test_resuming_asks_for_nothing_that_is_finished_and_refuses_what_is_at_its_limit(stage: Stage) -> None:
    engine, sampling = stage.engine(stage.snapshot()), dataclasses.replace(stage.small.sampling, stop_token_ids=())
    whole = engine.generate(stage.small.prompts(5), 2, sampling, SEED)
    stage.asks()
    assert completions(engine.resume(whole, sampling, SEED)) == completions(whole)
    assert stage.asks() == []
    part = engine.generate(stage.small.prompts(5), 2, sampling, SEED, stop=after(4))
    with pytest.raises(ConfigurationError, match="prompt small/0, completion 0: cannot be resumed, it has 4 tokens"):
        engine.resume(part, dataclasses.replace(sampling, max_new_tokens=4), SEED)


@pytest.mark.parametrize("wrong", [math.nan, -math.inf])
def test_a_logprob_that_is_no_number_ends_the_run(stage: Stage, monkeypatch: pytest.MonkeyPatch, wrong: float) -> None:
    engine = stage.engine(stage.snapshot(version=4))
    draws = itertools.count()
    sample = stage.service._sample
    monkeypatch.setattr(
        stage.service,
        "_sample",
        lambda *arguments: (sample(*arguments)[0], wrong if next(draws) == 7 else -1.0),
    )
    sampling = dataclasses.replace(stage.small.sampling, stop_token_ids=())
    with pytest.raises(
        RunError, match=rf"prompt small/1, completion 1, token 1: .* is {wrong}; the weights of version 4"
    ):
        engine.generate(stage.small.prompts(3, 3), 2, sampling, SEED)


def test_what_cannot_be_completed_is_refused_by_the_prompts_name(stage: Stage) -> None:
    engine, sampling = stage.engine(stage.snapshot()), stage.small.sampling
    engine.check_fit([Prompt("just", (1,) * 30, "", {})], sampling)
    for prompt, message in (
        (Prompt("nothing", (), "", {}), "prompt nothing: has no tokens"),
        (Prompt("long", (1,) * 31, "", {}), r"prompt long: 31 prompt tokens .* = 10 exceed vLLM's 40 here"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            engine.generate([*stage.small.prompts(3), prompt], 2, sampling, SEED)
    assert stage.asks() == []


@pytest.mark.parametrize("url", [None, "http://node1:8000"])
def test_before_the_first_version_nothing_is_generated(stage: Stage, url: str | None) -> None:
    engine = stage.engine(url=url)
    assert engine.version == -1
    with pytest.raises(RunError, match="serves no weights yet"):
        engine.generate(stage.small.prompts(3), 1, stage.small.sampling, SEED)


def test_vllm_starts_with_the_first_version_and_its_folder_is_gone_then(stage: Stage) -> None:
    engine = stage.engine()
    assert stage.service.started_from == []
    engine.load(stage.snapshot())
    engine.load(stage.snapshot(version=1, seed=1))
    [folder] = stage.service.started_from
    assert not folder.parent.exists()


def test_after_every_load_what_was_cached_is_dropped(stage: Stage) -> None:
    engine, prompts, sampling = stage.engine(stage.snapshot()), stage.small.prompts(*LENGTHS), stage.small.sampling
    before = tokens(engine.generate(prompts, 2, sampling, SEED))
    engine.load(stage.snapshot(version=1, seed=1))
    assert engine.version == 1
    assert tokens(engine.generate(prompts, 2, sampling, SEED)) != before
    engine.load(stage.snapshot(version=2))
    assert tokens(engine.generate(prompts, 2, sampling, SEED)) == before
    assert stage.service.log == ["load 0", "forget", "load 1", "forget", "load 2", "forget"]


def test_a_version_that_changed_after_it_was_published_is_never_sent(stage: Stage) -> None:
    engine, snapshot = stage.engine(stage.snapshot()), stage.snapshot(version=1, seed=1)
    codes = snapshot.tensors[QUERY].clone()
    codes[0, 0] ^= 1
    damaged = dataclasses.replace(snapshot, tensors={**snapshot.tensors, QUERY: codes}, operands=None)
    with pytest.raises(RunError, match="weights of version 1 changed between publishing and loading"):
        engine.load(damaged)
    assert (engine.version, stage.service.log) == (0, ["load 0", "forget"])


def flipped(rank: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    tensors[QUERY][3, 5] ^= 1
    return tensors


def of_worker(wrong: int, spoil: Spoil) -> Spoil:
    return lambda rank, tensors: spoil(rank, tensors) if rank == wrong else tensors


def rounded(rank: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | {NORM: tensors[NORM].to(torch.bfloat16)}


def without_embeddings(rank: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name != EMBEDDINGS}


def with_another(rank: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return rounded(rank, tensors) | {"a.weight": torch.ones(1)}


@pytest.mark.parametrize(
    ("spoil", "tensor", "more"),
    [(flipped, QUERY, 0), (rounded, NORM, 0), (without_embeddings, EMBEDDINGS, 0), (with_another, "a.weight", 1)],
)
def test_a_worker_that_serves_something_else_ends_the_run_and_the_tensor_is_named(
    small: Any, monkeypatch: pytest.MonkeyPatch, spoil: Spoil, tensor: str, more: int
) -> None:
    stage = made_stage(small, monkeypatch, workers=2)
    engine = stage.engine(stage.snapshot())
    stage.service.spoil = of_worker(1, spoil)
    message = f"version 1: worker 1 of vLLM serves another tensor {tensor} than was published, and {more} more;"
    with pytest.raises(RunError, match=re.escape(message)):
        engine.load(stage.snapshot(version=1, seed=1))
    assert engine.version == 0


@pytest.mark.parametrize("way", ["memory", "disk", "gloo"])
def test_versions_of_every_scheme_reach_every_worker_by_every_way(
    small: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, way: str
) -> None:
    stage = made_stage(small, monkeypatch, workers=2)
    stage.service.serves_floats = False
    folder = str(tmp_path / "versions") if way == "disk" else ""
    engine = stage.engine(transport=way, folder=folder, dtype="bfloat16")
    schemes = ["none", *FORMATS]
    for version, scheme in enumerate(schemes):
        engine.load(stage.snapshot(scheme, version, seed=version, dtype=torch.bfloat16))
        assert engine.version == version
    assert stage.service.log[::2] == [f"load {version}" for version in range(len(schemes))]
    if way == "disk":
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_load_that_fails_tells_its_own_reason_and_leaves_no_version_behind(stage: Stage, tmp_path: Path) -> None:
    engine = stage.engine(stage.snapshot(), transport="disk", folder=str(tmp_path))
    stage.service.failure = RunError("vLLM is lost")
    with pytest.raises(RunError, match=r"^vLLM is lost$"):
        engine.load(stage.snapshot(version=1))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert engine.version == 0


@pytest.mark.parametrize(
    ("name", "found", "needed"),
    [
        ("dtype", "bfloat16", "float32"),
        ("logprobs_mode", "raw_logprobs", "processed_logprobs"),
        ("rounds_activations_of_int4", True, "False"),
        ("model", "another", "[0-9a-f]{64}"),
        ("kv_bytes", 4096, "1073741824"),
        ("max_concurrency", 7, "256"),
        ("tensor_parallel", 2, "1"),
        ("compiled", True, "False"),
        ("options", {"seed": 3}, "{}"),
    ],
)
def test_a_server_that_is_another_than_the_recipes_is_refused(stage: Stage, name: str, found: Any, needed: str) -> None:
    stage.service.description[name] = found
    with pytest.raises(
        ConfigurationError,
        match=rf"vLLM: its {name} is {found}, this recipe needs {needed}; start it with `qarl serve`",
    ):
        stage.engine(url="http://node1:8000")


def test_a_server_that_was_not_started_by_a_recipe_is_refused(stage: Stage) -> None:
    for name in settings(VllmEngineConfig()):
        del stage.service.description[name]
    with pytest.raises(ConfigurationError, match=r"vLLM: its \w+ is None, this recipe needs .*`qarl serve`"):
        stage.engine(url="http://node1:8000")


def test_a_url_is_where_vllm_is_and_how_long_it_may_be_silent(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[tuple[str, float]] = []

    def connect(url: str, timeout_s: float, max_concurrency: int) -> Pretended:
        met.append((url, timeout_s))
        return stage.service

    monkeypatch.setattr(server, "Server", connect)
    engine = stage.engine(stage.snapshot(), url="http://node1:8000", timeout_s=7.0, transport="gloo")
    assert met == [("http://node1:8000", 7.0)]
    assert isinstance(engine._transport, BroadcastTransport) and engine._transport._timeout == 7.0
    assert stage.service.started_from == []


def test_so_are_a_version_that_was_not_tried_and_a_server_that_is_not_ours(stage: Stage) -> None:
    stage.service.description["vllm"] = "0.33.1"
    with pytest.raises(ConfigurationError, match=r"vLLM: vLLM 0\.33\.1 is not supported"):
        stage.engine(url="http://node1:8000")
    stage.service.failure = RunError("404 Not Found")
    with pytest.raises(ConfigurationError, match=r"does not know qarl's calls; start it with `qarl serve`.*404 Not"):
        stage.engine(url="http://node1:8000")


def test_a_server_with_a_shorter_context_than_the_recipe_asks_is_refused(stage: Stage) -> None:
    stage.service.description["max_model_len"] = 20
    with pytest.raises(ConfigurationError, match=r"its context is 20 tokens, this recipe needs 40 \("):
        stage.engine(stage.snapshot(), url="http://node1:8000")


def test_weights_that_somebody_else_loaded_meanwhile_end_the_run(stage: Stage) -> None:
    engine = stage.engine(stage.snapshot())
    engine.generate(stage.small.prompts(*LENGTHS), 2, stage.small.sampling, SEED)
    stage.service.last_load = "of another run"
    with pytest.raises(RunError, match="somebody else has loaded weights there since version 0"):
        engine.generate(stage.small.prompts(*LENGTHS), 2, stage.small.sampling, SEED)


@pytest.mark.parametrize("way", ["memory", "gloo"])
def test_what_stays_as_it_is_is_digested_and_packed_once(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """On the learner's side: when it arrives; what is rounded for vLLM once more."""
    digested, packed, of_service = Counter(), Counter(), Event()
    digest, pack, call = checksum_module._digest, compressed_tensors.pack_int4, stage.service.call

    def counted_digest(name: str, tensor: Tensor) -> str:
        digested[name] += not of_service.is_set()
        return digest(name, tensor)

    def counted_pack(codes: Tensor) -> Tensor:
        packed[tuple(codes.shape)] += 1
        return pack(codes)

    def called(method: str, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        of_service.set()
        found = call(method, message)
        of_service.clear()
        return found

    stage.service.serves_floats = False
    engine = stage.engine(stage.snapshot("w4a16"), transport=way, dtype="bfloat16")
    snapshot = stage.snapshot("w4a16", version=1)
    monkeypatch.setattr(checksum_module, "_digest", counted_digest)
    monkeypatch.setattr(compressed_tensors, "pack_int4", counted_pack)
    monkeypatch.setattr(stage.service, "call", called)
    engine.load(snapshot)
    assert [digested[name] for name in (QUERY, f"{QUERY}_scale", NORM)] == [1, 1, 2]
    assert packed.total() == len(snapshot.schemes)


def test_its_readings_are_of_the_last_load_and_the_last_rollout(stage: Stage) -> None:
    snapshot = stage.snapshot("w4a16")
    engine = stage.engine(snapshot)
    found = numbers(engine)
    sizes = {name: one.nbytes for name, one in stored(snapshot.tensors, snapshot.schemes).items()}
    padding = 13 * 128 * 4  # rows of the embeddings that nobody samples
    assert found.pop("publish/bytes") == sum(sizes.values()) - padding
    assert found.pop("publish/seconds") > 0.0
    assert found == {"publish/receive": 0.25, "publish/load": 0.5, "publish/read_back": 0.125}
    engine.generate(stage.small.prompts(*LENGTHS), 2, stage.small.sampling, SEED)
    assert 0.0 <= numbers(engine)["perf/bubble"] < 1.0


def test_the_bubble_is_the_share_of_places_that_stood_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 11.0, 13.0, 14.0])
    monkeypatch.setattr(engine_module, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    watch = engine_module._Watch(places=2, total=4, waiting=3, progress=None, stop=None)
    # Two places are busy for 3 s while three wait, one of them for the last second.
    assert [watch(finished) for finished in (0, 2, 3)] == [False, False, False]
    assert watch.metrics()["perf/bubble"].value() == 0.5 / 4.0


def test_one_place_after_the_other_is_no_bubble_and_few_completions_have_few_places(
    small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = made_stage(small, monkeypatch, places=1)
    engine = stage.engine(stage.snapshot(), max_concurrency=1)
    sampling = dataclasses.replace(stage.small.sampling, stop_token_ids=(), max_new_tokens=3)
    engine.generate(stage.small.prompts(5), 3, sampling, SEED)
    assert numbers(engine)["perf/bubble"] == pytest.approx(0.0, abs=1e-6)


LORA = LoraConfig(rank=4, alpha=6.0, targets=("*.q_proj", "*.down_proj"))


def trained(small: Any, versions: int, seed: int = 0) -> list[Snapshot]:
    """Versions of adapters on one base; the first adds nothing to it."""
    learner = small.learner("w8a8-int8", rules={"lm_head": "none"}, seed=seed, lora=LORA, lr=0.05)
    found = [learner.publish()]
    while len(found) < versions:
        groups = small.rollout(learner, *LENGTHS)
        learner.update(groups, small.advantages(groups))
        found.append(learner.publish())
    return found


def test_adapters_go_alone_to_a_base_that_is_served_already(stage: Stage, tmp_path: Path) -> None:
    versions = trained(stage.small, 3)
    engine = stage.engine(versions[0], lora=LORA, transport="disk", folder=str(tmp_path))
    assert stage.service.arguments["max_lora_rank"] == 8
    told = []
    for snapshot in versions:
        engine.load(snapshot)
        assert numbers(engine)["publish/bytes"] == sum(tensor.nbytes for tensor in snapshot.tensors.values())
        told.append(engine.generate(stage.small.prompts(*LENGTHS), 2, stage.small.sampling, SEED))
        assert engine.version == snapshot.version
    log = ["load 0", *("adapt version-0", "forget") * 2, "adapt version-1", "forget", "adapt version-2", "forget"]
    assert stage.service.log == log
    assert len({str(tokens(groups)) for groups in told}) == 3
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_what_the_service_samples_from_are_base_and_adapters(stage: Stage) -> None:
    versions = trained(stage.small, 2)
    engine, native = stage.engine(versions[1], lora=LORA), stage.small.engine(versions[1])
    [group] = engine.generate(stage.small.prompts(9), 2, stage.small.sampling, SEED)
    for completion in group.completions:
        with torch.no_grad():
            predicted = stage.small.predicted(native.decoder, group.prompt, completion).double()
        expected = (predicted / stage.small.sampling.temperature).log_softmax(-1)
        found = expected.gather(-1, completion.token_ids[:, None])[:, 0]
        torch.testing.assert_close(completion.engine_logprobs.double(), found, rtol=0, atol=1e-4)


def test_adapters_of_another_base_bring_it_with_them(stage: Stage) -> None:
    engine = stage.engine(lora=LORA)
    for seed in (0, 1, 1, 0):
        engine.load(trained(stage.small, 1, seed)[0])
    adapted = ["adapt version-0", "forget"]
    assert stage.service.log == [*(["load 0", *adapted] * 2), *adapted, "load 0", *adapted]


def test_a_base_whose_load_failed_is_loaded_again(stage: Stage) -> None:
    engine, [snapshot] = stage.engine(lora=LORA), trained(stage.small, 1)
    stage.service.spoil = flipped
    with pytest.raises(RunError, match=rf"weights of version 0: .* another tensor {QUERY}"):
        engine.load(snapshot)
    stage.service.spoil = lambda rank, tensors: tensors
    engine.load(snapshot)
    assert stage.service.log == ["load 0", "load 0", "adapt version-0", "forget"]


def test_a_worker_that_serves_other_adapters_ends_the_run_and_the_tensor_is_named(
    small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = made_stage(small, monkeypatch, workers=2)
    first, second = trained(small, 2)
    engine = stage.engine(first, lora=LORA)
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"
    stage.service.spoil = of_worker(1, lambda rank, tensors: tensors | {name: tensors[name] * 1.5})
    message = f"adapters of version 1: worker 1 of vLLM serves another tensor {name} than was published, and 0 more;"
    with pytest.raises(RunError, match=re.escape(message)):
        engine.load(second)
    assert engine.version == 0


def test_adapters_that_changed_after_they_were_published_are_never_sent(stage: Stage) -> None:
    first, second = trained(stage.small, 2)
    engine = stage.engine(first, lora=LORA)
    before = list(stage.service.log)
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"
    damaged = dataclasses.replace(second, tensors={**second.tensors, name: second.tensors[name] + 1e-3})
    with pytest.raises(RunError, match="adapters of version 1 changed between publishing and loading"):
        engine.load(damaged)
    assert (engine.version, stage.service.log) == (0, before)


def test_a_server_that_was_started_without_the_recipes_adapters_is_refused(stage: Stage) -> None:
    with pytest.raises(ConfigurationError, match=r"its max_lora_rank is 0, this recipe needs 8; start it with"):
        stage.engine(url="http://node1:8000", lora=LORA)
    stage.service.description |= {"max_lora_rank": 8, "lora_target_modules": ["q_proj"]}
    with pytest.raises(ConfigurationError, match=r"its lora_target_modules is \['q_proj'\], this recipe needs"):
        stage.engine(url="http://node1:8000", lora=LORA)
    with pytest.raises(ConfigurationError, match=r"its max_lora_rank is 8, this recipe needs 0"):
        stage.engine(url="http://node1:8000")
