"""vLLM in processes of this run: its `LLM`, stepped here so that a rollout can be watched and stopped."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

from qarl.errors import ConfigurationError, RunError
from qarl.records import Sampling
from qarl.rollout.config import VllmEngineConfig
from qarl.rollout.vllm.launch import arguments, environment
from qarl.rollout.vllm.overheard import Overheard
from qarl.rollout.vllm.service import RUN, Answer, Ask, Watch, sampling_params

SECONDS_BETWEEN_LOOKS = 0.5
"""How often a waiting client looks whether vLLM is alive."""

ELSEWHERE = "root cause above"
"""In the error that vLLM raises here for one of its other processes, which has told its own to standard error."""


class Offline:
    """vLLM on this machine, started from the model in `folder`.

    ConfigurationError where it cannot start, with the first cause; RunError where it takes too long.
    """

    name = "vLLM"

    def __init__(self, folder: Path, config: VllmEngineConfig, max_model_len: int, adapters: Mapping[str, Any]) -> None:
        self._timeout = config.timeout_s
        self._calls = 0
        self._adapters: Any = None  # vLLM's request for those that are served
        overheard, limit = Overheard(), config.start_timeout_s
        try:
            # vLLM reads some of its environment when it is imported, the rest when it starts.
            with _in_environment(environment(config) | {RUN: str(os.getpid())}), overheard, _ended_after(limit):
                import vllm

                self._vllm = vllm
                self._llm = vllm.LLM(str(folder), **arguments(config, max_model_len, adapters))
        except (ConfigurationError, RunError):
            raise
        except Exception as error:
            cause = overheard.first_error() if ELSEWHERE in str(error) else None
            reason = f"vLLM does not start with this recipe: {cause or error}; what it said is above"
            raise ConfigurationError(reason) from error

    def complete(self, asks: Sequence[Ask], sampling: Sampling, watch: Watch) -> list[Answer]:
        engine = self._llm.llm_engine
        self._calls += 1
        answers = {f"{self._calls}/{index}": Answer() for index in range(len(asks))}
        finished, is_stopped = 0, False

        with self._watchdog() as heard:
            for name, ask in zip(answers, asks, strict=True):
                prompt = {"prompt_token_ids": list(ask.token_ids)}
                engine.add_request(name, prompt, self._params(ask, sampling), lora_request=self._adapters)
            while engine.has_unfinished_requests():
                outputs = engine.step()
                heard()
                for output in outputs:
                    answers[output.request_id].take(*_delta(output.outputs[0]))
                done = sum(output.finished for output in outputs)
                finished += done
                if not is_stopped and _told(watch, finished):
                    is_stopped = True
                    engine.abort_request([name for name, one in answers.items() if one.finish_reason == "aborted"])
        if not is_stopped and any(answer.finish_reason == "aborted" for answer in answers.values()):
            raise RunError("vLLM ended a completion before it was finished; what it said is above")
        return list(answers.values())

    def call(self, method: str, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        with self._watchdog():
            return list(self._llm.collective_rpc(method, args=(json.dumps(message),)))

    def adapt(self, folder: str) -> None:
        number = 1 if self._adapters is None else self._adapters.lora_int_id + 1
        request = self._vllm.lora.request.LoRARequest(f"adapters-{number}", number, folder)
        with self._watchdog():
            self._llm.llm_engine.add_lora(request)
        self._adapters = request

    def forget(self) -> None:
        with self._watchdog():
            is_done = self._llm.reset_prefix_cache()
        if not is_done:
            raise RunError("vLLM did not drop its cached keys and values, of weights that are no longer served")

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()

    def _params(self, ask: Ask, sampling: Sampling) -> Any:
        kind = self._vllm.sampling_params.RequestOutputKind.DELTA  # what there is of an aborted one is kept
        return self._vllm.SamplingParams(**sampling_params(ask, sampling), output_kind=kind)

    @contextmanager
    def _watchdog(self) -> Iterator[Callable[[], None]]:
        """What to call at every sign of life. RunError where vLLM dies inside, or is silent too long: then it is ended.

        vLLM's own client waits for a killed engine for ever, so it is told of its death here.
        """
        client = self._llm.llm_engine.engine_core
        last, is_over, silent = [time.monotonic()], Event(), Event()

        def watch() -> None:
            while not is_over.wait(SECONDS_BETWEEN_LOOKS):
                if time.monotonic() - last[0] > self._timeout:
                    silent.set()
                    _end_processes()
                if silent.is_set() or client.resources.engine_dead:
                    return _tell_of_death(client)

        Thread(target=watch, daemon=True).start()
        try:
            yield lambda: last.__setitem__(0, time.monotonic())
        except _OfCaller as error:
            raise error.error from None
        except Exception as error:
            if silent.is_set():
                reason = f"vLLM gave no sign of life for {self._timeout:g} s (engine.timeout_s); it was ended"
                raise RunError(reason) from error
            raise RunError(f"vLLM failed: {str(error) or type(error).__name__}; what it said is above") from error
        finally:
            is_over.set()


class _OfCaller(Exception):
    """Carries what who watches a rollout raised past what is said of vLLM's own errors."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


def _told(watch: Watch, finished: int) -> bool:
    try:
        return watch(finished)
    except Exception as error:
        raise _OfCaller(error) from error


def _tell_of_death(client: Any) -> None:
    """End every wait for this engine's answers, of which there will be none."""
    error = RuntimeError("its engine process is dead")
    client.outputs_queue.put_nowait(error)
    for future in list(client.utility_results.values()):
        if not future.done():
            future.set_exception(error)


@contextmanager
def _in_environment(values: Mapping[str, str]) -> Iterator[None]:
    """These in the environment for processes that are started inside the block, and none later."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _ended_after(seconds: float) -> Iterator[None]:
    """RunError where vLLM has not started by then: whoever waits for its processes inside the block sees them ended."""
    is_over, is_late = Event(), Event()

    def watch() -> None:
        if is_over.wait(seconds):
            return
        is_late.set()
        while not is_over.is_set():
            _end_processes()
            is_over.wait(SECONDS_BETWEEN_LOOKS)

    Thread(target=watch, daemon=True).start()
    try:
        yield
    except Exception as error:
        if is_late.is_set():
            raise RunError(f"vLLM did not start within {seconds:g} s (engine.start_timeout_s); it was ended") from error
        raise
    finally:
        is_over.set()


def _delta(output: Any) -> tuple[Sequence[int], list[float], str | None]:
    """New tokens, their log-probabilities, and why it is finished, if it is."""
    logprobs = [place[token].logprob for token, place in zip(output.token_ids, output.logprobs, strict=True)]
    return output.token_ids, logprobs, output.finish_reason


def _end_processes() -> None:
    for process in multiprocessing.active_children():
        if process.name.startswith(("EngineCore", "VllmWorker")):
            process.kill()
