"""Engines as Ray actors: each in a process of its own, on this machine or another of the cluster.

Weights are put into Ray's object store once a version; all actors of a machine read them from the same shared memory.
"""

from __future__ import annotations

import logging
import os
import socket
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from qarl.cluster.config import ClusterConfig
from qarl.errors import ConfigurationError, RunError
from qarl.metrics import Last, Metrics
from qarl.process import prepare
from qarl.records import Completion, FinishReason, Group, Prompt, Sampling, Snapshot
from qarl.roles import Engine, Stop
from qarl.rollout.fleet import EngineLost
from qarl.rollout.probe import differences
from qarl.rollout.request import Progress
from qarl.sync.arrays import Parcel, pack, unpack

SIGNS = "signs"
"""The calls of an actor that are answered beside its work."""

POLL_SECONDS = 0.2
"""How often an engine at work is asked for a sign of life; its answer itself is not waited for in such steps."""

WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
"""What in the environment says how threads wait: the same in an actor as here."""

Builder = Callable[[Progress | None], Engine]
"""Makes the recipe's engine, in whichever process it is called; it must be picklable."""

Identity = Callable[[], Mapping[str, str]]
"""Tells what must be the same in two processes for their bits to agree; it must be picklable."""

PlainCompletion = tuple[Any, Any, Any, FinishReason, str]
"""Tokens, log-probabilities and versions as arrays, the finish reason and the text: cheap to send."""


class Actors:
    """Makes engines that are actors, as a `Fleet` asks for them; they end with the last reference to them.

    ConfigurationError where Ray is not installed or cannot be reached, or has not what the engines need.
    """

    def __init__(self, config: ClusterConfig, build: Builder, identity: Identity | None) -> None:
        """`identity`: asked here and in every actor, which must say the same; None where bits need not agree."""
        self.config = config
        self.shelf = Shelf()
        self._build = build
        self._identity = identity
        self._ours = {} if identity is None else identity()
        _connect(config)

    def __call__(self, index: int, progress: Progress) -> RayEngine:
        engine = RayEngine(self._process(), self.shelf, self.config.timeout_s, progress)
        theirs = engine.start(self._build, self._identity)
        found = differences(self._ours, theirs)
        if found:
            raise ConfigurationError(
                f"engine {index} ({engine.where}) would not give the learner's bits: {'; '.join(found)}; run engines "
                "on machines of one kind, or set alignment = 'none' and a correction"
            )
        return engine

    def _process(self) -> Any:
        """A new actor. On this machine alone there is no choice of places, and Ray need not count its CPUs."""
        config = self.config
        environment = {name: os.environ[name] for name in WAITING if name in os.environ}
        environment["OMP_NUM_THREADS"] = str(config.engine_cpus)
        remote = _ray().remote(
            num_cpus=config.engine_cpus if config.ray_address else 0,
            num_gpus=config.engine_gpus,
            max_restarts=0,
            concurrency_groups={SIGNS: 1},
            runtime_env={"env_vars": environment},
        )
        return remote(EngineActor).remote()


class Shelf:
    """Ray's object store, with the newest version of the weights in it; the one before goes when it comes."""

    def __init__(self) -> None:
        # One thread for good: what another one frees stays with it, and the next would ask the system for as much.
        self._packer = ThreadPoolExecutor(1)
        self._snapshot: Snapshot | None = None
        self._reference: Any = None
        self._base: tuple[str, Any] | None = None
        self.num_bytes = 0

    def put(self, snapshot: Snapshot) -> Any:
        """Ray's reference to this snapshot, put there when it is first asked for."""
        return self._packer.submit(self._put, snapshot).result()

    def put_base(self, base: Snapshot) -> Any:
        """The same of the base of adapters, which stays."""
        return self._packer.submit(self._put_base, base).result()

    def _put_base(self, base: Snapshot) -> Any:
        if self._base is None or self._base[0] != base.checksum:
            self._base = base.checksum, _ray().put(pack(base))
        return self._base[1]

    def _put(self, snapshot: Snapshot) -> Any:
        if self._snapshot is not snapshot:
            self._snapshot = self._reference = None  # so that there is room; where the next one fails there is none
            parcel = pack(snapshot)
            self._reference = _ray().put(parcel)
            self._snapshot, self.num_bytes = snapshot, parcel.num_bytes
        return self._reference


@dataclass(frozen=True, slots=True)
class Started:
    """What an actor tells of itself."""

    process: int
    host: str
    identity: Mapping[str, str]


class EngineActor:
    """The engine's own process. Calls come one at a time; `signs` is answered beside them."""

    def __init__(self) -> None:
        prepare()
        self._signs = (0, 0)
        self._given_up = 0
        self._engine: Engine | None = None
        self._base: Snapshot | None = None

    def start(self, build: Builder, identity: Identity | None) -> Started:
        self._engine = build(self._tell)
        return Started(os.getpid(), socket.gethostname(), {} if identity is None else identity())

    def signs(self) -> tuple[int, int]:
        """How often the engine told of its progress so far, and the completions finished when it last did."""
        return self._signs

    def stop(self, rollout: int) -> None:
        """Hand back what there is of the rollout with this number; beside it, as `signs`."""
        self._given_up = rollout

    def load(self, parcel: Parcel) -> int:
        """The version then served."""
        engine = self._started()
        engine.load(unpack(parcel, self._base))
        return engine.version

    def keep_base(self, parcel: Parcel) -> None:
        """The base of the adapters that will come."""
        self._base = unpack(parcel)

    def generate(
        self, rollout: int, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, seed: tuple[int, ...]
    ) -> tuple[list[list[PlainCompletion]], Metrics]:
        """The rollout with this number; a later one has a higher."""
        engine = self._started()
        self._tell(0, 0)
        groups = engine.generate(prompts, group_size, sampling, seed, lambda *_: self._given_up == rollout)
        return [[_plain(completion) for completion in group.completions] for group in groups], engine.metrics()

    def _tell(self, finished: int, total: int) -> None:
        self._signs = (self._signs[0] + 1, finished)

    def _started(self) -> Engine:
        assert self._engine is not None, "an actor is started before it is asked"
        return self._engine


class RayEngine:
    """An engine in another process, as the learner's process sees it.

    EngineLost when the process or its machine is gone, or silent for `timeout_s`: then it is ended.
    """

    def __init__(self, actor: Any, shelf: Shelf, timeout_s: float, progress: Progress) -> None:
        self.version = -1
        self.where = "no process yet, for want of room or because it cannot start"
        self._actor = actor
        self._shelf = shelf
        self._timeout_s = timeout_s
        self._progress = progress
        self._metrics: Metrics = {}
        self._rollout = 0
        self._base = ""  # the checksum of the one that the actor has

    def start(self, build: Builder, identity: Identity | None) -> Mapping[str, str]:
        """Build the engine over there; what the process says of itself."""
        started: Started = self._wait(self._actor.start.remote(build, identity), "starting")
        self.where = f"process {started.process} on {started.host}"
        return started.identity

    def load(self, snapshot: Snapshot) -> None:
        """As of every engine; the actor verifies the checksum. The base of adapters is sent once."""
        base = snapshot.lora.base if snapshot.lora is not None else None
        if base is not None and base.checksum != self._base:
            self._wait(self._actor.keep_base.remote(self._shelf.put_base(base)), "loading a base")
            self._base = base.checksum
        self.version = self._wait(self._actor.load.remote(self._shelf.put(snapshot)), "loading weights")

    def generate(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        seed: tuple[int, ...],
        stop: Stop | None = None,
    ) -> list[Group]:
        """As of every engine; `stop` is asked several times a second."""
        self._rollout += 1
        bare = [Prompt(prompt.id, prompt.token_ids, "", {}) for prompt in prompts]  # rows are for rewards
        answer = self._actor.generate.remote(self._rollout, bare, group_size, sampling, seed)
        plain, self._metrics = self._wait(answer, "generating", len(prompts) * group_size, stop)
        completions = [tuple(map(_completion, group)) for group in plain]
        return [Group(prompt, group) for prompt, group in zip(prompts, completions, strict=True)]

    def metrics(self) -> Metrics:
        """The engine's own, and `publish/bytes`, the size of the weights it serves as they were sent."""
        return self._metrics | {"publish/bytes": Last(float(self._shelf.num_bytes))}

    def _wait(self, answer: Any, doing: str, total: int = 0, stop: Stop | None = None) -> Any:
        """What the actor answers; its own errors as themselves."""
        ray = _ray()
        signs: tuple[int, int] | None = None
        question, heard = None, time.monotonic()
        try:
            while not ray.wait([answer], timeout=POLL_SECONDS)[0]:
                question = question or self._beside("signs")
                if ray.wait([question], timeout=0)[0]:
                    found, question = ray.get(question), None
                    if signs is not None and found != signs:
                        self._progress(found[1], total)
                    if found != signs:
                        signs, heard = found, time.monotonic()
                if stop is not None and stop(0 if signs is None else signs[1], total):
                    self._beside("stop", self._rollout)
                    stop = None
                if time.monotonic() - heard > self._timeout_s:
                    raise self._lost(f"{doing}, no sign of life for cluster.timeout_s = {self._timeout_s:g} s")
            return ray.get(answer, timeout=self._timeout_s)
        except ray.exceptions.RayTaskError as error:
            raise _as_itself(error) from error
        except ray.exceptions.RayError as error:
            raise self._lost(f"{doing}, it has ended: {_reason(error)}") from error

    def _beside(self, method: str, *arguments: Any) -> Any:
        """Ray's reference to the answer of a method that does not wait for what the actor is doing."""
        return getattr(self._actor, method).options(concurrency_group=SIGNS).remote(*arguments)

    def _lost(self, what: str) -> EngineLost:
        """To raise; what may be left of the process is ended, so that it keeps no room."""
        _ray().kill(self._actor)
        return EngineLost(f"{self.where}: {what}")


def _ray() -> Any:
    """The package; ConfigurationError where it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anybody
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # who still waits when Ray is stopped must not start it again
    os.environ.setdefault("RAY_worker_niceness", "0")  # an engine's work is the run's: no other program goes before it
    try:
        import ray
    except ImportError as error:
        raise ConfigurationError(
            "cluster.engines above 0 needs the package ray; install it with: pip install 'qarl-llm[cluster]'"
        ) from error
    return ray


def _connect(config: ClusterConfig) -> None:
    """Join the cluster or start Ray on this machine, unless this process has done so already."""
    ray = _ray()
    if not ray.is_initialized():
        _check_answers(config.ray_address)
        quietly = {"log_to_driver": False, "logging_level": logging.ERROR}
        try:
            if config.ray_address:
                ray.init(address=config.ray_address, **quietly)
            else:
                ray.init(address="local", include_dashboard=False, **quietly)
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            where = f"cluster.ray_address = '{config.ray_address}'" if config.ray_address else "Ray on this machine"
            raise ConfigurationError(f"{where}: cannot be used: {_reason(error)}") from error
    _check_resources(config, ray.cluster_resources())


def _check_answers(address: str) -> None:
    """ConfigurationError where nobody listens at host:port; Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except OSError as error:
        raise ConfigurationError(
            f"cluster.ray_address = '{address}': nobody answers there ({error}); start the cluster (ray start --head), "
            "or leave the key out to start Ray on this machine"
        ) from error


def _check_resources(config: ClusterConfig, there: Mapping[str, float]) -> None:
    """ConfigurationError for more engines than there is room for."""
    for kind, each in (("CPU", config.engine_cpus), ("GPU", config.engine_gpus)):
        needed, found = config.engines * each, there.get(kind, 0)
        if needed > found:
            raise ConfigurationError(
                f"cluster.engines = {config.engines} with cluster.engine_{kind.lower()}s = {each:g} need {needed:g} "
                f"{kind}s, and there are {found:g}; lower one of them, or add machines"
            )


def _as_itself(error: Any) -> Exception:
    """What was raised in the actor, if it is ours; else Ray's error, which shows the actor's traceback."""
    cause = error.cause
    if isinstance(cause, ConfigurationError | RunError):
        return type(cause)(*cause.args)
    return error  # type: ignore[no-any-return]


def _reason(error: Exception) -> str:
    """The beginning of what Ray says, in one line; its lines that are indented are numbers of its own."""
    lines = [line for line in str(error).splitlines() if not line.startswith("\t")]
    return textwrap.shorten(" ".join(lines), 400, placeholder=" ...")


def _plain(completion: Completion) -> PlainCompletion:
    tensors = (completion.token_ids, completion.engine_logprobs, completion.versions)
    return (*(tensor.numpy() for tensor in tensors), completion.finish_reason, completion.text)  # type: ignore[return-value]


def _completion(plain: PlainCompletion) -> Completion:
    tokens, logprobs, versions, finish_reason, text = plain
    # Copies: what Ray hands over must not be written to.
    tokens, logprobs, versions = (torch.from_numpy(np.array(one)) for one in (tokens, logprobs, versions))
    return Completion(tokens, logprobs, versions, finish_reason, text)
