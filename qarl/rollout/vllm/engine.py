"""vLLM in the engine's role: it serves the published codes, and every load is proven by what is served after it."""

from __future__ import annotations

import logging
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors.torch import load
from torch import Tensor

from qarl.errors import ConfigurationError, RunError
from qarl.metrics import Last, Mean, Metrics
from qarl.models.config import ModelConfig
from qarl.models.decoder import Decoder
from qarl.models.lora import LoraConfig
from qarl.records import Completion, Group, Lora, Prompt, Sampling, Snapshot
from qarl.roles import Stop
from qarl.rollout.config import VllmEngineConfig
from qarl.rollout.request import Progress, Request, check_limit, requests_of, unstarted
from qarl.rollout.seeds import stream_key
from qarl.rollout.vllm.launch import (
    adapter_arguments,
    adapters_as_served,
    as_served,
    fingerprint,
    require_vllm,
    settings,
    write_model,
)
from qarl.rollout.vllm.service import Answer, Ask, Service, check_version
from qarl.sync.adapters import verify_adapters
from qarl.sync.snapshot import verify
from qarl.sync.transport import Transport, transport

log = logging.getLogger("qarl")


class VllmEngine:
    """One vLLM: `url` names a server, or it is None and vLLM starts with the first `load`. `version` is -1 until then.

    A completion's draws follow its own seed, but vLLM's products depend on the batch in their last bits, so completions
    may too. One that is resumed goes on with draws of its own, other than those of an unbroken one.
    """

    def __init__(
        self,
        config: VllmEngineConfig,
        url: str | None,
        model: ModelConfig,
        vocab_size: int,
        max_model_len: int,
        decode: Callable[[Sequence[int]], str],
        progress: Progress | None = None,
        lora: LoraConfig | None = None,
    ) -> None:
        with torch.device("meta"):
            self._decoder = Decoder(model, vocab_size)
        self.version = -1
        self._config = config
        self._model = model
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._decode = decode
        self._progress = progress
        self._adapters = adapter_arguments(lora, self._decoder)
        self._base = ""  # checksum of the base that is served, where adapters are
        self._service: Service | None = None
        self._transport: Transport | None = None
        self._readings: Metrics = {}
        self._load = ""  # names what we loaded last
        if url is None:
            require_vllm()
        else:
            self._connect(url)

    def load(self, snapshot: Snapshot) -> None:
        """Serve this version; of adapters, on the base that is served already, or else on the one they bring.

        RunError, with the tensor's name, when what is served then is not what was published.
        """
        assert (snapshot.lora is not None) == self._adapters["enable_lora"], "vLLM starts with or without adapters"
        started = time.perf_counter()
        found = self._load_whole(snapshot) if snapshot.lora is None else self._load_adapters(snapshot, snapshot.lora)
        self._require_service().forget()
        self.version = snapshot.version
        found["seconds"] = time.perf_counter() - started
        self._readings |= {f"publish/{name}": Last(value) for name, value in found.items()}

    def metrics(self) -> Metrics:
        """Readings of the last `generate` and the last `load`."""
        return self._readings

    def generate(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        seed: tuple[int, ...],
        stop: Stop | None = None,
    ) -> list[Group]:
        """As `NativeEngine.generate`."""
        return self.resume(unstarted(prompts, group_size), sampling, seed, stop)

    def resume(
        self, groups: Sequence[Group], sampling: Sampling, seed: tuple[int, ...], stop: Stop | None = None
    ) -> list[Group]:
        """Go on with the aborted completions of these groups; the finished ones are returned as they are."""
        if self.version < 0:
            raise RunError("the engine serves no weights yet; load a snapshot before generating")
        self.check_fit([group.prompt for group in groups], sampling)
        requests = requests_of(groups, seed)
        check_limit(requests, sampling)
        total = sum(len(group.completions) for group in groups)
        watch = _Watch(min(len(requests), self._config.max_concurrency), total, len(requests), self._progress, stop)
        answers = self._require_service().complete(
            [self._ask(request, sampling) for request in requests], sampling, watch
        )
        self._check_undisturbed()
        self._readings |= watch.metrics()
        done = iter([self._completion(request, one) for request, one in zip(requests, answers, strict=True)])
        return [
            Group(group.prompt, tuple(next(done) if c.finish_reason == "aborted" else c for c in group.completions))
            for group in groups
        ]

    def check_fit(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        """ConfigurationError for a prompt with no tokens, or whose completions vLLM's context cannot hold."""
        for prompt in prompts:
            if not prompt.token_ids:
                raise ConfigurationError(
                    f"prompt {prompt.id}: has no tokens; a completion needs at least one before it"
                )
            if len(prompt.token_ids) + sampling.max_new_tokens > self._max_model_len:
                raise ConfigurationError(
                    f"prompt {prompt.id}: {len(prompt.token_ids)} prompt tokens + sampling.max_new_tokens = "
                    f"{sampling.max_new_tokens} exceed vLLM's {self._max_model_len} here; shorten one"
                )

    def layer_outputs(self, token_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Hidden states after every layer [L, T, D] and the likeliest next tokens [T], of a sequence computed at once.

        For vLLM that is not compiled and shares this host's files.
        """
        service = self._require_service()
        service.forget()  # what is cached is not computed again
        service.call("qarl_watch", {})
        service.complete([Ask(token_ids, 1, 0)], Sampling(1.0, 1), lambda finished: False)
        file = Path(service.call("qarl_watched", {})[0]["file"])
        found = load(file.read_bytes())
        file.unlink()
        return found["layers"][:, : len(token_ids)], found["best"][: len(token_ids)]

    def close(self) -> None:
        """End vLLM where it is this engine's own."""
        if self._service is not None:
            self._service.close()
            self._service = None

    @property
    def _dtype(self) -> torch.dtype:
        return getattr(torch, self._config.dtype)  # type: ignore[no-any-return]

    def _ask(self, request: Request, sampling: Sampling) -> Ask:
        so_far = len(request.token_ids)
        key = (
            request.stream
            if so_far == 0
            else stream_key((request.stream, so_far), request.shared.prompt.id, request.index)
        )
        tokens = [*request.shared.prompt.token_ids, *request.token_ids]
        return Ask(tokens, sampling.max_new_tokens - so_far, key - 2**63)

    def _completion(self, request: Request, answer: Answer) -> Completion:
        for place, logprob in enumerate(answer.logprobs):
            if not math.isfinite(logprob):
                raise RunError(
                    f"prompt {request.shared.prompt.id}, completion {request.index}, token {place}: vLLM's "
                    f"log-probability is {logprob}; the weights of version {self.version} overflow"
                )
        tokens = [*request.token_ids, *answer.token_ids]
        return Completion(
            token_ids=torch.tensor(tokens, dtype=torch.int64),
            engine_logprobs=torch.tensor([*request.logprobs, *answer.logprobs], dtype=torch.float32),
            versions=torch.tensor([*request.versions, *[self.version] * len(answer.token_ids)], dtype=torch.int64),
            finish_reason=answer.finish_reason,
            text=self._decode(tokens),
        )

    def _start(self, served: Snapshot) -> None:
        """Start vLLM from a model folder with these very codes; the folder is not needed afterwards."""
        from qarl.rollout.vllm.offline import Offline

        with tempfile.TemporaryDirectory(prefix="qarl-vllm-") as home:
            folder = Path(home) / "model"
            write_model(folder, self._model, served, self._config.head_dtype)
            log.info("starting vLLM")
            self._service = Offline(folder, self._config, self._max_model_len, self._adapters)
        self._open_transport(self._describe(self._service))

    def _connect(self, url: str) -> None:
        from qarl.rollout.vllm.server import Server

        service = Server(url, self._config.timeout_s, self._config.max_concurrency)
        found = self._describe(service)
        check_version(str(found["vllm"]), service.name)
        wanted = {
            "dtype": self._config.dtype,
            "head_dtype": self._config.dtype if self._config.head_dtype == "model" else "float32",
            "logprobs_mode": "processed_logprobs",
            "rounds_activations_of_int4": False,
            "model": fingerprint(self._model, self._vocab_size),
            "max_lora_rank": self._adapters.get("max_lora_rank", 0),
            "lora_target_modules": self._adapters.get("lora_target_modules", []),
            **settings(self._config),
        }
        for name, value in wanted.items():
            if found.get(name) != value:
                raise ConfigurationError(
                    f"{service.name}: its {name} is {found.get(name)}, this recipe needs {value}; start it with `qarl "
                    "serve` and this recipe"
                )
        if int(found["max_model_len"]) < self._max_model_len:
            raise ConfigurationError(
                f"{service.name}: its context is {found['max_model_len']} tokens, this recipe needs "
                f"{self._max_model_len} (prompts.max_prompt_tokens + sampling.max_new_tokens); start it with `qarl "
                "serve` and this recipe"
            )
        self._service = service
        self._open_transport(found)

    def _describe(self, service: Service) -> Mapping[str, Any]:
        try:
            return service.call("qarl_describe", {})[0]
        except RunError as error:
            raise ConfigurationError(
                f"{service.name}: does not know qarl's calls; start it with `qarl serve` and this recipe ({error})"
            ) from error

    def _open_transport(self, found: Mapping[str, Any]) -> None:
        workers = int(found["world_size"])
        config = self._config
        self._transport = transport(config.transport, config.folder, workers, config.timeout_s)

    def _load_whole(self, snapshot: Snapshot) -> dict[str, float]:
        """Serve all weights of a version, from the start of vLLM on; bytes that were sent and seconds of the parts."""
        snapshot = replace(
            snapshot, tensors=dict(snapshot.tensors)
        )  # codes are read back where they are multiplied: once
        published = verify(self._decoder, snapshot)
        served, expected = as_served(snapshot, self._vocab_size, self._dtype, published)
        if self._service is None:
            self._start(served)
        with self._offered(served, expected) as message:
            reports = self._require_service().call("qarl_load", message)
        self._compare(f"weights of version {served.version}", expected, reports)
        return {
            "bytes": float(message["bytes"]),
            **{part: float(seconds) for part, seconds in reports[0]["seconds"].items()},
        }

    def _load_adapters(self, snapshot: Snapshot, lora: Lora) -> dict[str, float]:
        """Serve adapters, on their base; bytes that were sent of them and seconds of the parts."""
        verify_adapters(self._decoder, snapshot)
        if self._base != lora.base.checksum or not self._is_undisturbed():
            self._base = ""
            self._load_whole(lora.base)
            self._base = lora.base.checksum
        started = time.perf_counter()
        served, expected = adapters_as_served(snapshot, self._dtype)
        with self._offered(served, expected) as message:
            self._require_service().adapt(message["folder"])
            loaded = time.perf_counter()
            reports = self._require_service().call("qarl_adapters", message)
        self._compare(f"adapters of version {served.version}", expected, reports)
        return {"bytes": float(message["bytes"]), "load": loaded - started, "read_back": time.perf_counter() - loaded}

    @contextmanager
    def _offered(self, served: Snapshot, digests: Mapping[str, str]) -> Iterator[dict[str, Any]]:
        """How workers receive this version, while it is there for them."""
        assert self._transport is not None
        self._load = uuid4().hex
        message = {**self._transport.offer(served, digests), "load": self._load}
        try:
            yield message
        except RunError:
            with suppress(RunError):  # what was not received could not be sent either
                self._transport.withdraw()
            raise
        self._transport.withdraw()

    def _is_undisturbed(self) -> bool:
        """Whether nobody else has loaded weights into this vLLM since we did."""
        return all(report["load"] == self._load for report in self._require_service().call("qarl_serving", {}))

    def _check_undisturbed(self) -> None:
        if not self._is_undisturbed():
            raise RunError(
                f"{self._require_service().name}: somebody else has loaded weights there since version "
                f"{self.version}, or it was started again: what it has sampled is of no known weights. Give every "
                "run a server of its own"
            )

    def _compare(self, what: str, expected: Mapping[str, str], reports: Sequence[Mapping[str, Any]]) -> None:
        """What every worker serves with what was sent."""
        for report in reports:
            found = report["digests"]
            differing = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
            if differing:
                raise RunError(
                    f"{what}: worker {report['rank']} of {self._require_service().name} serves another tensor "
                    f"{differing[0]} than was published, and {len(differing) - 1} more; the run cannot go on with it"
                )

    def _require_service(self) -> Service:
        assert self._service is not None, "vLLM starts with the first load"
        return self._service


class _Watch:
    """Follows one rollout: tells progress, asks whether to stop, and measures how busy the places were."""

    def __init__(self, places: int, total: int, waiting: int, progress: Progress | None, stop: Stop | None) -> None:
        self._places = places
        self._total = total
        self._waiting = waiting
        self._progress = progress
        self._stop = stop
        self._unfinished = waiting
        self._last = self._started = time.perf_counter()
        self._busy = 0.0

    def __call__(self, finished: int) -> bool:
        now = time.perf_counter()
        self._busy += (now - self._last) * min(self._unfinished, self._places) / max(self._places, 1)
        self._last, self._unfinished = now, self._waiting - finished
        done = self._total - self._unfinished
        if self._progress is not None:
            self._progress(done, self._total)
        return self._stop is not None and self._stop(done, self._total)

    def metrics(self) -> Metrics:
        """`perf/bubble`, as the native engine's."""
        seconds = self._last - self._started
        return {"perf/bubble": Mean(seconds - self._busy, seconds or 1.0)}
