"""A vLLM server, over HTTP: tokens in and out.

They are streamed, so that an aborted answer keeps what it has, and silence is noticed.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any
from uuid import uuid4

import httpx2

from qarl.errors import ConfigurationError, RunError
from qarl.records import Sampling
from qarl.rollout.vllm.service import Answer, Ask, Watch, sampling_params

GENERATE, CALL, FORGET = "/inference/v1/generate", "/collective_rpc", "/reset_prefix_cache"
ADAPT, GIVE_UP = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"

DONE = "[DONE]"

CLAMPED = -9999.0
"""What the server sends in place of a log-probability that is not finite."""


class Server:
    """vLLM at a URL, started by `qarl serve`. ConfigurationError where nobody answers there."""

    def __init__(self, url: str, timeout_s: float, max_concurrency: int = 256) -> None:
        self.name = f"vLLM at {url}"
        self._url = url
        self._timeout = timeout_s
        self._connections = max_concurrency
        self._adapters: str | None = None  # the server's name for those that are served
        try:
            httpx2.get(f"{self._url}/health", timeout=min(timeout_s, 10.0)).raise_for_status()
        except httpx2.HTTPError as error:
            raise ConfigurationError(
                f"engine.urls: no vLLM server answers at {url} ({str(error) or type(error).__name__}); start one with "
                "`qarl serve` and this recipe"
            ) from error

    def complete(self, asks: Sequence[Ask], sampling: Sampling, watch: Watch) -> list[Answer]:
        return asyncio.run(self._complete(asks, sampling, watch))

    def call(self, method: str, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        found = self._post(CALL, {"method": method, "args": [json.dumps(message)]}).json()
        return list(found["results"])

    def adapt(self, folder: str) -> None:
        before, name = self._adapters, f"qarl-{uuid4().hex}"  # a name that no run before has left there
        self._post(ADAPT, {"lora_name": name, "lora_path": folder})
        self._adapters = name
        if before is not None:
            self._post(GIVE_UP, {"lora_name": before})

    def forget(self) -> None:
        if not self._post(FORGET, {}).json()["success"]:
            raise RunError(f"{self.name} did not drop its cached keys and values, of weights that are no longer served")

    def close(self) -> None:
        """Others may use it too."""

    def _post(self, path: str, body: Mapping[str, Any]) -> httpx2.Response:
        try:
            answer = httpx2.post(f"{self._url}{path}", json=body, timeout=self._timeout)
        except httpx2.HTTPError as error:
            raise self._failure(error) from error
        if answer.is_error:
            raise RunError(
                f"{self.name} refused {path}: {answer.status_code} {answer.text[:500]}; its own log says more"
            )
        return answer

    async def _complete(self, asks: Sequence[Ask], sampling: Sampling, watch: Watch) -> list[Answer]:
        answers = [Answer() for _ in asks]
        enough, sign, finished = asyncio.Event(), asyncio.Event(), 0

        def heard(answer: Answer) -> None:
            nonlocal finished
            finished += answer.finish_reason != "aborted"
            sign.set()
            if watch(finished):
                enough.set()

        # A single stream may be silent for long, while the server completes others first.
        timeout = httpx2.Timeout(self._timeout, read=None, pool=None)
        limits = httpx2.Limits(max_connections=self._connections)
        async with httpx2.AsyncClient(base_url=self._url, timeout=timeout, limits=limits) as client:
            streams = [
                self._one(client, ask, sampling, answer, heard) for ask, answer in zip(asks, answers, strict=True)
            ]
            everyone: asyncio.Future[Any] = asyncio.gather(*streams)
            ends = [everyone, asyncio.ensure_future(enough.wait()), asyncio.ensure_future(self._silence(sign))]
            try:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                for end in ends:
                    if end.done():
                        end.result()
            except httpx2.HTTPError as error:
                raise self._failure(error) from error
            finally:  # the server aborts what nobody listens to any more
                for end in ends:
                    end.cancel()
                await asyncio.gather(*ends, return_exceptions=True)
        return answers

    async def _silence(self, sign: asyncio.Event) -> None:
        """Ends, as RunError, when no stream gave a sign for too long."""
        while True:
            try:
                await asyncio.wait_for(sign.wait(), self._timeout)
            except TimeoutError as error:
                raise self._silent() from error
            sign.clear()

    async def _one(
        self, client: httpx2.AsyncClient, ask: Ask, sampling: Sampling, answer: Answer, heard: Callable[[Answer], None]
    ) -> None:
        body = {"token_ids": list(ask.token_ids), "sampling_params": sampling_params(ask, sampling), "stream": True}
        if self._adapters is not None:
            body["model"] = self._adapters
        async with client.stream("POST", GENERATE, json=body) as response:
            if response.is_error:
                text = (await response.aread()).decode(errors="replace")
                raise RunError(f"{self.name} refused to generate: {response.status_code} {text[:500]}")
            async for event in _events(response):
                if "error" in event:
                    raise RunError(f"{self.name} failed while it generated: {event['error']}; its own log says more")
                for choice in event["choices"]:
                    content = (choice["logprobs"] or {"content": []})["content"]
                    logprobs = [one["logprob"] if one["logprob"] > CLAMPED else math.nan for one in content]
                    answer.take(choice["token_ids"] or [], logprobs, choice["finish_reason"])
                heard(answer)
        if answer.finish_reason == "aborted":
            raise RunError(f"{self.name} ended a completion before it was finished; its own log says why")

    def _failure(self, error: httpx2.HTTPError) -> RunError:
        if isinstance(error, httpx2.TimeoutException):
            return self._silent()
        return RunError(f"{self.name} is lost: {str(error) or type(error).__name__}")

    def _silent(self) -> RunError:
        return RunError(f"{self.name} gave no sign of life for {self._timeout:g} s (engine.timeout_s)")


async def _events(response: httpx2.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON of server-sent events."""
    async for line in response.aiter_lines():
        if line.startswith("data: ") and (text := line.removeprefix("data: ")) != DONE:
            yield json.loads(text)
