"""Our own engine: continuous batching over the learner's operations, so that log-probabilities agree.

Token in, token out. A prompt is prefilled once for its whole group; requests join and leave the batch at every
step; every random number belongs to its completion. Shape letters: B running requests, D hidden, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qarl.errors import ConfigurationError, RunError
from qarl.metrics import Last, Metrics
from qarl.models.config import ModelConfig
from qarl.models.decoder import Cache, Decoder
from qarl.ops.head import logits
from qarl.ops.kernels import kernels
from qarl.records import Completion, Group, Prompt, Sampling, Snapshot
from qarl.rollout.cache import PAGE, KVCache, bytes_per_token, pages_for
from qarl.rollout.config import NativeEngineConfig
from qarl.rollout.request import Request, SharedPrompt, spans_of
from qarl.rollout.seeds import stream_key, uniforms
from qarl.sync.snapshot import operands_of, unquantized, verify

Progress = Callable[[int, int], None]
"""Called with (finished, total) completions as a rollout goes on."""


@dataclass(slots=True)
class _Occupancy:
    """How busy the engine was: seconds, and the same weighted by the share of places in use."""

    places: int
    seconds: float = 0.0
    busy_seconds: float = 0.0

    def add(self, running: int, seconds: float) -> None:
        self.seconds += seconds
        self.busy_seconds += seconds * running / self.places


class NativeEngine:
    """Serves snapshots of one decoder on the CPU. `version` is -1 until the first `load`."""

    def __init__(
        self,
        config: NativeEngineConfig,
        model: ModelConfig,
        vocab_size: int,
        decode: Callable[[Sequence[int]], str],
        progress: Progress | None = None,
    ) -> None:
        with torch.device("meta"):
            self.decoder = Decoder(model, vocab_size)
        self.config = config
        self.version = -1
        self.decode = decode
        self.progress = progress
        self.cache: KVCache | None = None
        self._last_occupancy = _Occupancy(1)

    def load(self, snapshot: Snapshot) -> None:
        """Serve this version; RunError when its tensors are not those that were published."""
        verify(snapshot)
        operands = operands_of(self.decoder, snapshot)
        self.decoder.assign(unquantized(snapshot), requires_grad=False)
        self.decoder.serve(operands)
        self.version = snapshot.version

    def metrics(self) -> Metrics:
        """`perf/bubble`: the share of the last rollout's slot time that stood idle (papers: SortedRL)."""
        last = self._last_occupancy
        return {"perf/bubble": Last(1.0 - last.busy_seconds / last.seconds if last.seconds else 0.0)}

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, seed: tuple[int, ...]
    ) -> list[Group]:
        """Complete every prompt `group_size` times; a function of the weights and the seed alone.

        ConfigurationError for a prompt that cannot fit the model's context or the cache, before anything is
        sampled. RunError for a log-probability that is not finite.
        """
        assert self.version >= 0, "generate before load"
        self.check_fit(prompts, sampling)
        requests = make_requests(prompts, group_size, seed)
        run = Rollout(self, sampling, len(requests), self.cache_for(prompts, group_size, sampling))
        run.all(requests)
        self._last_occupancy = run.occupancy
        return [
            Group(prompt, tuple(self._completion(r) for r in requests[g * group_size : (g + 1) * group_size]))
            for g, prompt in enumerate(prompts)
        ]

    def _completion(self, request: Request) -> Completion:
        assert request.finish_reason is not None
        return Completion(
            token_ids=torch.tensor(request.token_ids),
            engine_logprobs=torch.tensor(request.logprobs, dtype=torch.float32),
            versions=torch.full((len(request.token_ids),), self.version),
            finish_reason=request.finish_reason,
            text=self.decode(request.token_ids),
        )

    def check_fit(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        """ConfigurationError for a prompt with no tokens, or whose completions the context or the cache cannot hold."""
        context = self.decoder.config.max_position_embeddings
        for prompt in prompts:
            length = len(prompt.token_ids)
            if length == 0:
                raise ConfigurationError(
                    f"prompt {prompt.id}: has no tokens; a completion needs at least one before it"
                )
            if length + sampling.max_new_tokens > context:
                raise ConfigurationError(
                    f"prompt {prompt.id}: {length} prompt tokens + sampling.max_new_tokens = {sampling.max_new_tokens} "
                    f"exceed the model's context of {context}; shorten one of them"
                )
            pages = pages_for(length) + pages_for(sampling.max_new_tokens)
            needed = pages * PAGE * bytes_per_token(self.decoder.config, self.config.kv_cache)
            if needed > self.config.kv_bytes:
                raise ConfigurationError(
                    f"prompt {prompt.id}: one completion may need {needed} bytes of key/value cache, "
                    f"engine.kv_bytes = {self.config.kv_bytes}; raise it or lower sampling.max_new_tokens"
                )

    def cache_for(self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling) -> KVCache:
        """A cache with room for this rollout, or for as much of it as the budget holds; reused when big enough."""
        running = min(self.config.max_concurrency, len(prompts) * group_size)
        # Requests are admitted in order, so running ones belong to neighbouring groups: these many, if no group lags.
        groups = min(len(prompts), -(-running // group_size) + 1)
        longest = max(pages_for(len(prompt.token_ids)) for prompt in prompts)
        pages = groups * longest + running * pages_for(sampling.max_new_tokens)
        pages = min(pages, self.config.kv_bytes // (PAGE * bytes_per_token(self.decoder.config, self.config.kv_cache)))
        if self.cache is None or self.cache.num_pages < pages:
            self.cache = None  # freed before its successor is made
            self.cache = KVCache(self.decoder.config, pages, self.config.kv_cache)
        self.cache.release_all()
        return self.cache


def make_requests(prompts: Sequence[Prompt], group_size: int, seed: tuple[int, ...]) -> list[Request]:
    """`group_size` requests for every prompt, in order, sharing the prompt."""
    requests = []
    repeats: Counter[str] = Counter()
    for prompt in prompts:
        shared = SharedPrompt(prompt, waiting=group_size)
        for index in range(group_size):
            # How often a prompt came before tells apart two equal ones; its place in the batch must not matter.
            key = stream_key((*seed, repeats[prompt.id]), prompt.id, index)
            requests.append(Request(shared, index, key))
        repeats[prompt.id] += 1
    return requests


class Rollout:
    """One call of `generate`: who runs, who waits, and the steps until all are done."""

    def __init__(self, engine: NativeEngine, sampling: Sampling, total: int, cache: KVCache) -> None:
        self.engine = engine
        self.decoder = engine.decoder
        self.sampling = sampling
        self.cache = cache
        self.total = total
        self.finished = 0
        self.running: list[Request] = []
        self.occupancy = _Occupancy(min(engine.config.max_concurrency, total))

    def all(self, requests: Sequence[Request]) -> None:
        queue = deque(requests)
        while queue or self.running:
            started = time.perf_counter()
            continuing = list(self.running)
            admitted = self._admit(queue)
            self._prefill([r.shared for r in admitted])
            if continuing:
                self._decode(continuing)
            if admitted:
                self._first_tokens(admitted)
            self.occupancy.add(len(self.running), time.perf_counter() - started)
            self._retire()

    def _admit(self, queue: deque[Request]) -> list[Request]:
        """Let in waiting requests, in order, while there are places and pages for all they may need."""
        admitted: list[Request] = []
        while queue and len(self.running) < self.engine.config.max_concurrency:
            request, shared = queue[0], queue[0].shared
            prompt_length = len(shared.prompt.token_ids)
            needed = pages_for(self.sampling.max_new_tokens) + (0 if shared.region else pages_for(prompt_length))
            if needed > self.cache.free_pages:
                break
            queue.popleft()
            shared.region = shared.region or self.cache.reserve(prompt_length)
            request.region = self.cache.reserve(self.sampling.max_new_tokens)
            self.running.append(request)
            admitted.append(request)
        return admitted

    def _prefill(self, prompts: Sequence[SharedPrompt]) -> None:
        """Compute new prompts, several in one forward, a long one in chunks."""
        new = list(dict.fromkeys(shared for shared in prompts if shared.hidden is None))
        todo = deque((shared, 0) for shared in new)
        while todo:
            room = self.engine.config.prefill_tokens
            batch: list[tuple[SharedPrompt, int, int]] = []
            while todo and room > 0:
                shared, first = todo.popleft()
                length = len(shared.prompt.token_ids)
                last = min(length, first + room)
                room -= last - first
                batch.append((shared, first, last))
                if last < length:
                    todo.appendleft((shared, last))
            self._prefill_batch(batch)

    def _prefill_batch(self, batch: Sequence[tuple[SharedPrompt, int, int]]) -> None:
        tokens: list[int] = []
        slots: list[int] = []
        for shared, first, last in batch:
            assert shared.region is not None
            tokens += shared.prompt.token_ids[first:last]
            slots += shared.region.next_rows(last - first)
        visible = [range(first + 1, last + 1) for _, first, last in batch]
        regions = [shared.region.spans() for shared, _, _ in batch if shared.region is not None]
        hidden = self._forward(tokens, [count - 1 for counts in visible for count in counts], slots, regions, visible)
        end = 0
        for shared, first, last in batch:
            end += last - first
            if last == len(shared.prompt.token_ids):
                shared.hidden = hidden[end - 1].clone()

    def _decode(self, requests: Sequence[Request]) -> None:
        """One more token for each."""
        positions = [r.position for r in requests]
        slots: list[int] = []
        regions: list[list[tuple[int, int]]] = []
        for request in requests:
            assert request.region is not None and request.shared.region is not None
            slots += request.region.next_rows(1)
            regions.append(request.shared.region.spans() + request.region.spans())
        visible = [[position + 1] for position in positions]
        hidden = self._forward([r.token_ids[-1] for r in requests], positions, slots, regions, visible)
        self._sample(requests, hidden)

    def _first_tokens(self, requests: Sequence[Request]) -> None:
        hidden = [r.shared.hidden for r in requests]
        self._sample(requests, torch.stack([h for h in hidden if h is not None]))

    def _forward(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        slots: Sequence[int],
        regions: Sequence[Sequence[tuple[int, int]]],
        visible: Sequence[Sequence[int]],
    ) -> Tensor:
        cache = Cache(self.cache.keys, self.cache.values, torch.tensor(slots))
        spans = spans_of(regions, visible)
        return self.decoder.hidden_cached(torch.tensor(tokens), torch.tensor(positions), spans, spans.longest, cache)

    def _sample(self, requests: Sequence[Request], hidden_BD: Tensor) -> None:
        logits_BV = logits(self.decoder.head(), hidden_BD)
        if self.sampling.temperature == 0:
            tokens = logits_BV.argmax(-1)
            logprobs = kernels().token_logprobs(logits_BV, tokens, 1.0).logprobs
        else:
            draws = uniforms([r.stream for r in requests], [len(r.token_ids) for r in requests])
            tokens, logprobs = kernels().sample(logits_BV, draws, 1.0 / self.sampling.temperature)
        for request, token, logprob in zip(requests, tokens.tolist(), logprobs.tolist(), strict=True):
            if not math.isfinite(logprob):
                raise RunError(
                    f"prompt {request.shared.prompt.id}, completion {request.index}, token {len(request.token_ids)}: "
                    f"the engine's log-probability is {logprob}; the weights of version {self.engine.version} overflow"
                )
            request.take(token, logprob, self.sampling.stop_token_ids, self.sampling.max_new_tokens)

    def _retire(self) -> None:
        for request in self.running:
            if request.finish_reason is None:
                continue
            assert request.region is not None and request.shared.region is not None
            self.cache.release(request.region)
            request.shared.waiting -= 1
            if request.shared.waiting == 0:
                self.cache.release(request.shared.region)
        still = [r for r in self.running if r.finish_reason is None]
        self.finished += len(self.running) - len(still)
        if self.engine.progress is not None and len(still) < len(self.running):
            self.engine.progress(self.finished, self.total)
        self.running = still
