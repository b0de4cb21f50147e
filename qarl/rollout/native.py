"""Our own engine: continuous batching over the learner's operations, so that log-probabilities agree.

Token in, token out. A prompt is prefilled once for its whole group; requests join and leave the batch at every
step; every random number belongs to its completion. So a rollout can be stopped after any step and resumed, and
`generate` is to resume completions that have no tokens yet. Shape letters: T tokens of a forward, B running requests,
D hidden, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qarl.errors import ConfigurationError, RunError
from qarl.metrics import Mean, Metrics
from qarl.models.config import ModelConfig
from qarl.models.decoder import Decoder
from qarl.ops.device import HOST, moved
from qarl.ops.graph import Memory
from qarl.ops.head import logits
from qarl.ops.kernels import kernels
from qarl.records import Completion, Group, Prompt, Sampling, Snapshot
from qarl.roles import Stop
from qarl.rollout.cache import PAGE, KVCache, bytes_per_token, pages_for
from qarl.rollout.config import NativeEngineConfig
from qarl.rollout.forward import Forward, Inputs
from qarl.rollout.request import Progress, Request, SharedPrompt, check_limit, requests_of, spans_of, unstarted
from qarl.rollout.seeds import uniforms
from qarl.sync.adapters import adapters_of, verify_adapters
from qarl.sync.snapshot import operands_of, unquantized, verify

Run = tuple[SharedPrompt | Request, Sequence[int]]
"""Tokens to compute next, and whose they are."""


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
    """Serves snapshots of one decoder, where their tensors are. `version` is -1 until the first `load`.

    Keys and values live as long as a rollout: between two of them the learner needs the memory.
    """

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
        self.is_running = False
        self._base = ""  # checksum of the served weights without adapters
        self._last_occupancy = _Occupancy(1)

    def load(self, snapshot: Snapshot) -> None:
        """Serve this version; of adapters, on the base that is served already, or else on the one they bring.

        RunError when its tensors are not all of this model's, as they were published, or when a rollout is running: its
        graphs hold the addresses of the weights it began with.
        """
        if self.is_running:
            raise RunError(f"version {snapshot.version} was loaded while a rollout runs; load between two rollouts")
        if snapshot.lora is None:
            self._load_base(snapshot)
            self.decoder.adapt({})
        else:
            verify_adapters(self.decoder, snapshot)
            if snapshot.lora.base.checksum != self._base:
                self._load_base(snapshot.lora.base)
            self.decoder.adapt(adapters_of(self.decoder, snapshot))
        self.version = snapshot.version

    def _load_base(self, snapshot: Snapshot) -> None:
        verify(self.decoder, snapshot)
        operands = operands_of(self.decoder, snapshot)
        self.decoder.assign(unquantized(snapshot), requires_grad=False)
        self.decoder.serve(operands)
        self._base = snapshot.checksum

    def metrics(self) -> Metrics:
        """`perf/bubble`: the share of the last rollout's slot time that stood idle (papers: SortedRL)."""
        last = self._last_occupancy
        return {"perf/bubble": Mean(last.seconds - last.busy_seconds, last.seconds or 1.0)}

    def generate(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        seed: tuple[int, ...],
        stop: Stop | None = None,
    ) -> list[Group]:
        """Complete every prompt `group_size` times; a function of the weights and the seed alone.

        Once `stop` says so, whatever is not finished is returned as it is: "aborted", perhaps without a token.
        ConfigurationError for a prompt that cannot fit the model's context or the cache, before anything is
        sampled. RunError for a log-probability that is not finite.
        """
        return self.resume(unstarted(prompts, group_size), sampling, seed, stop)

    @torch.no_grad()
    def resume(
        self, groups: Sequence[Group], sampling: Sampling, seed: tuple[int, ...], stop: Stop | None = None
    ) -> list[Group]:
        """Go on with the aborted completions of these groups; the finished ones are returned as they are.

        All the groups of a call of `generate`, in its order and with its seed and sampling: then what was aborted and
        resumed, however often, equals the unbroken completion. The tokens there are, which count in
        `max_new_tokens`, keep their log-probabilities and versions; their keys and values are computed again, with the
        weights of now. Errors are those of `generate`, and ConfigurationError for a completion already at the limit.
        """
        if self.version < 0:
            raise RunError("the engine serves no weights yet; load a snapshot before generating")
        requests = requests_of(groups, seed)
        if requests:
            self._run(requests, sampling, sum(len(group.completions) for group in groups), stop)
        resumed = iter([self._completion(request) for request in requests])
        return [
            Group(group.prompt, tuple(next(resumed) if c.finish_reason == "aborted" else c for c in group.completions))
            for group in groups
        ]

    def _run(self, requests: Sequence[Request], sampling: Sampling, total: int, stop: Stop | None) -> None:
        shared = list(dict.fromkeys(request.shared for request in requests))
        prompts = [one.prompt for one in shared]
        self.check_fit(prompts, sampling)
        check_limit(requests, sampling)
        cache = self.cache_for(prompts, max(one.waiting for one in shared), sampling)
        longest = max(len(prompt.token_ids) for prompt in prompts) + sampling.max_new_tokens
        run = Rollout(self, sampling, total, cache, longest, finished=total - len(requests))
        self.is_running = True
        try:
            run.all(requests, stop)
        finally:
            self.is_running = False
        assert cache.free_pages == cache.num_pages, "a rollout keeps pages"
        self._last_occupancy = run.occupancy

    def _completion(self, request: Request) -> Completion:
        assert request.finish_reason is not None
        new = len(request.token_ids) - len(request.versions)
        return Completion(
            token_ids=torch.tensor(request.token_ids, dtype=torch.int64, device=HOST),
            engine_logprobs=torch.tensor(request.logprobs, dtype=torch.float32, device=HOST),
            versions=torch.tensor(request.versions + [self.version] * new, dtype=torch.int64, device=HOST),
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
        """A cache with room for up to `group_size` completions of each prompt, or for what the budget holds of them."""
        running = min(self.config.max_concurrency, len(prompts) * group_size)
        # Requests are admitted in order, so running ones belong to neighbouring groups: these many, if no group lags.
        groups = min(len(prompts), -(-running // group_size) + 1)
        longest = max(pages_for(len(prompt.token_ids)) for prompt in prompts)
        pages = groups * longest + running * pages_for(sampling.max_new_tokens)
        pages = min(pages, self.config.kv_bytes // (PAGE * bytes_per_token(self.decoder.config, self.config.kv_cache)))
        return KVCache(self.decoder.config, pages, self.config.kv_cache, self.decoder.device)


class Rollout:
    """One call of `generate` or `resume`: who runs, who waits, and the steps until all are done or aborted.

    `total` counts all completions of the call, `finished` those that need no step (any more). No sequence, prompt
    included, gets longer than `longest`.
    """

    def __init__(
        self,
        engine: NativeEngine,
        sampling: Sampling,
        total: int,
        cache: KVCache,
        longest: int,
        finished: int = 0,
    ) -> None:
        self.engine = engine
        self.decoder = engine.decoder
        self.sampling = sampling
        self.cache = cache
        self.total = total
        self.finished = finished
        self.running: list[Request] = []
        self.forward = Forward(engine.decoder, cache, longest)
        self.occupancy = _Occupancy(min(engine.config.max_concurrency, total - finished))

    def all(self, requests: Sequence[Request], stop: Stop | None = None) -> None:
        queue = deque(requests)
        while queue or self.running:
            started = time.perf_counter()
            self._prefill(self._admit(queue))
            self._step()
            self.occupancy.add(len(self.running), time.perf_counter() - started)
            self._retire()
            if stop is not None and stop(self.finished, self.total):
                self._abort(queue)

    def _admit(self, queue: deque[Request]) -> list[Request]:
        """Let in waiting requests, in order, while there are places and pages for all they may need."""
        admitted: list[Request] = []
        while queue and len(self.running) < self.engine.config.max_concurrency:
            request, shared = queue[0], queue[0].shared
            prompt_length = 0 if shared.region.pages else len(shared.prompt.token_ids)
            if pages_for(self.sampling.max_new_tokens) + pages_for(prompt_length) > self.cache.free_pages:
                break
            queue.popleft()
            if prompt_length:
                shared.region = self.cache.reserve(prompt_length)
            request.region = self.cache.reserve(self.sampling.max_new_tokens)
            self.running.append(request)
            admitted.append(request)
        return admitted

    def _prefill(self, admitted: Sequence[Request]) -> None:
        """Compute new prompts, then the tokens requests came with; several in one forward, a long run in chunks."""
        owners: list[SharedPrompt | Request] = [*dict.fromkeys(request.shared for request in admitted), *admitted]
        todo = deque(owner for owner in owners if owner.to_prefill())
        memory = Memory()  # of its own: a prompt's rows are many, and not needed while tokens are decoded
        while todo:
            room = self.engine.config.prefill_tokens
            batch: list[Run] = []
            while todo and room > 0:
                tokens = todo[0].to_prefill()
                batch.append((todo[0], tokens[:room]))
                if len(tokens) <= room:
                    todo.popleft()
                room -= len(tokens)
            self._prefill_batch(batch, memory)

    def _prefill_batch(self, batch: Sequence[Run], memory: Memory) -> None:
        hidden_TD = self.forward.hidden(self._inputs(batch), memory)
        for (owner, _), rows in zip(batch, hidden_TD.split([len(tokens) for _, tokens in batch]), strict=True):
            if isinstance(owner, SharedPrompt):
                owner.hidden = rows[-1].clone()  # of a prompt in chunks, the last one's stands

    def _step(self) -> None:
        """One more token for every running request."""
        begun = [r for r in self.running if r.token_ids]
        fresh = [r for r in self.running if not r.token_ids]
        if begun:
            self._sample(begun, self.forward.logits(self._inputs([(r, r.token_ids[-1:]) for r in begun])))
        if fresh:
            hidden = [r.shared.hidden for r in fresh]
            self._sample(fresh, logits(self.decoder.head(), torch.stack([h for h in hidden if h is not None])))

    def _inputs(self, runs: Sequence[Run]) -> Inputs:
        """What a forward over these tokens is told; a prompt precedes its requests."""
        visible = [range(owner.next_position + 1, owner.next_position + len(new) + 1) for owner, new in runs]
        slots = [row for owner, new in runs for row in owner.region.next_rows(len(new))]
        with HOST:
            # Only now: a request sees all of its prompt, also what this very forward stores of it.
            spans = spans_of([owner.spans() for owner, _ in runs], visible)
            tokens = torch.tensor([token for _, new in runs for token in new])
            positions = torch.tensor([count - 1 for counts in visible for count in counts])
            inputs = Inputs(tokens, positions, torch.tensor(slots), spans)
        return moved(inputs, self.decoder.device)

    def _sample(self, requests: Sequence[Request], logits_BV: Tensor) -> None:
        if self.sampling.temperature == 0:
            tokens = logits_BV.argmax(-1)
            logprobs = kernels().token_logprobs(logits_BV, tokens, 1.0).logprobs
        else:
            draws = uniforms([r.stream for r in requests], [len(r.token_ids) for r in requests]).to(logits_BV.device)
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
            self.cache.release(request.region)
            request.shared.waiting -= 1
            if request.shared.waiting == 0:
                self.cache.release(request.shared.region)
        still = [r for r in self.running if r.finish_reason is None]
        self.finished += len(self.running) - len(still)
        if self.engine.progress is not None:
            self.engine.progress(self.finished, self.total)
        self.running = still

    def _abort(self, queue: deque[Request]) -> None:
        """Leave everybody where they are, and nothing in the cache."""
        for request in (*self.running, *queue):
            request.finish_reason = "aborted"
        self.running.clear()
        queue.clear()
        self.cache.release_all()
