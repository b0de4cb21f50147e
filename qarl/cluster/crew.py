"""The processes of one run: rank 0 leads it, the others do what it orders.

Orders and answers go over a group whose members wait for one another as long as all give signs of life, since a
rollout, a reward or an evaluation may take its time. Tensors go over another, in which nobody waits longer than
`cluster.timeout_s`. Why a run ended is left in the store that all share, by whoever knows it first.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from qarl.cluster.exchange import Exchange
from qarl.cluster.pulse import Pulse
from qarl.errors import ConfigurationError, RunError
from qarl.interrupts import Interrupted

LEADER = 0
STOP = "stop"

ENDLESS = timedelta(days=3650)
SHORTEST_POLL_S, LONGEST_POLL_S = 2e-5, 1e-3
"""How often one who waits looks whether what it waits for is there: ever less often."""

LOOK_S = 0.5
"""And how often, whether those it waits for are."""

FAULTS: dict[str, type[ConfigurationError] | type[RunError]] = {
    "ConfigurationError": ConfigurationError,
    "RunError": RunError,
}


@dataclass(frozen=True, slots=True)
class Fault:
    """A rank's error in its own words."""

    kind: str
    words: str

    @classmethod
    def of(cls, error: BaseException, place: str = "") -> Fault:
        """What is told of an error; `place` goes before it."""
        if isinstance(error, ConfigurationError | RunError):
            return cls(type(error).__name__, f"{place}{error}")
        return cls("RunError", f"{place}{type(error).__name__}: {error}")

    def error(self) -> ConfigurationError | RunError:
        """To be raised elsewhere."""
        return FAULTS[self.kind](self.words)


class Lost(Exception):
    """A rank gives no sign of life."""


class Crew:
    """This process's place among the others, and what it can say to them."""

    def __init__(self, store: Store, rank: int, count: int, timeout_s: float) -> None:
        self.rank = rank
        self.count = count
        self.timeout_s = timeout_s
        self.patience_s = timeout_s
        self._store = store
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        limit = timedelta(seconds=timeout_s)
        dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=limit)
        self._orders = dist.new_group(backend="gloo", timeout=ENDLESS)
        self.exchange = Exchange(rank, count)
        self._places = self.exchange.objects(f"process {os.getpid()} on {socket.gethostname()}")
        self._pulse = Pulse(store, rank, count, timeout_s)
        self._clerk = ThreadPoolExecutor(1, "orders")
        self._order = 0
        self._is_busy = False
        self._has_left = False
        self._results: dict[str, Any] = {}
        self._broken: ConfigurationError | RunError | None = None

    @property
    def leads(self) -> bool:
        """Whether this is the rank that runs the loop."""
        return self.rank == LEADER

    def describe(self, shards: bool) -> str:
        """For people; `shards`: whether masters are divided."""
        held = "every matrix's rows divided among them" if shards else "the base and its adapters whole on each of them"
        return f"cluster: {self.count} ranks, {held}; rank {self.rank} leads"

    @contextmanager
    def order(self, name: str, *arguments: Any) -> Iterator[list[Any]]:
        """Have the followers do `name` while the block does the leader's part; the list holds their answers after it.

        A follower's error is raised here, in its words. RunError when a rank is lost, and from then on.
        """
        if self._broken is not None:
            raise self._broken
        self._order, self._is_busy, self._results = self._order + 1, True, {}
        answers: list[Any] = []
        try:
            self._once("send", lambda: self._broadcast((self._order, name, arguments)))
            yield answers
            found = self._once("collect", lambda: self._collect(None))
        except (Interrupted, ConfigurationError, RunError):
            self._call_off(name, arguments)
            raise
        except Exception as error:
            raise self._explanation(error) from error
        self._is_busy = False
        for answer in found[1:]:
            if isinstance(answer, Fault):
                raise answer.error()
        answers += found[1:]

    def next_order(self) -> tuple[str, tuple[Any, ...]]:
        """Wait for the leader to say what is to be done."""
        self._order, name, arguments = self._broadcast(None)
        return name, arguments

    def answer(self, found: Any) -> None:
        """Tell the leader what an order came to; a `Fault` if it failed."""
        self._collect(found)

    def is_called_off(self) -> bool:
        """Whether the leader no longer wants what it ordered last."""
        return bool(self._store.check([f"off/{self._order}"]))

    def give_up(self) -> None:
        """Tell the followers that the rest of what was ordered last is not wanted: they answer with what they have."""
        self._store.set(f"off/{self._order}", "")

    def dismiss(self) -> None:
        """Tell the followers that it is over, if they listen."""
        if self._broken is None and not self._is_busy:
            self._broadcast((self._order + 1, STOP, ()))

    def leave(self) -> None:
        """Wait and beat no more. Groups are not destroyed: that would wait for ranks that are lost."""
        self._has_left = True
        self._clerk.shutdown()
        self._pulse.end()

    def fault_of_others(self) -> Fault | None:
        """Why this rank cannot go on, if that is not its own doing: what another one left word of, or who is lost."""
        missing = self._pulse.missing()
        if self._pulse.word:
            return Fault(**json.loads(self._pulse.word))
        return Fault("RunError", self._lost(missing)) if missing else None

    def leave_word(self, fault: Fault) -> None:
        """Of what ends this rank, and with it the run."""
        self._pulse.leave_word(json.dumps(asdict(fault)))

    def _once(self, step: str, act: Callable[[], Any]) -> Any:
        """One step of the current order, in a thread where no signal cuts it short: what a signal interrupts here is
        the wait for it, which can be taken up again.
        """

        def unless_done() -> Any:
            if step not in self._results:
                self._results[step] = act()
            return self._results[step]

        return self._clerk.submit(unless_done).result()

    def _call_off(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Get the ranks in step again after the leader's part ended early."""
        try:
            self.give_up()
            self._once("send", lambda: self._broadcast((self._order, name, arguments)))
            self._once("collect", lambda: self._collect(None))
            self._is_busy = False
        except Exception as error:
            self._explanation(error)

    def _explanation(self, error: Exception) -> Exception:
        """What to raise now that the ranks are out of step: the error itself, if it is nobody else's fault."""
        fault = self.fault_of_others()
        self._broken = RunError("the ranks are out of step") if fault is None else fault.error()
        return error if fault is None else self._broken

    def _broadcast(self, message: Any) -> Any:
        """The leader's message, on every rank."""
        sent = _packed(message) if self.leads else None
        size = torch.tensor([0 if sent is None else len(sent)])
        self._wait(dist.broadcast(size, LEADER, group=self._orders, async_op=True))
        content = torch.empty(int(size), dtype=torch.uint8) if sent is None else sent
        self._wait(dist.broadcast(content, LEADER, group=self._orders, async_op=True))
        return message if self.leads else _unpacked(content)

    def _collect(self, answer: Any) -> list[Any]:
        """Every rank's answer, at the leader; nothing elsewhere."""
        own = _packed(answer)
        sizes = torch.zeros(self.count, dtype=torch.int64)
        size = torch.tensor([len(own)])
        self._wait(dist.all_gather_single(sizes, size, group=self._orders, async_op=True))
        padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
        padded[: len(own)] = own
        places = [torch.empty_like(padded) for _ in range(self.count)] if self.leads else None
        self._wait(dist.gather(padded, places, LEADER, group=self._orders, async_op=True))
        return [_unpacked(place[:length]) for place, length in zip(places or [], sizes.tolist(), strict=False)]

    def _wait(self, work: dist.Work | None) -> None:
        """As long as those waited for give signs of life: all followers, or the leader."""
        assert work is not None
        waited_for = range(1, self.count) if self.leads else [LEADER]
        looked, pause = time.monotonic(), SHORTEST_POLL_S
        while not work.is_completed():
            time.sleep(pause)
            pause = min(1.1 * pause, LONGEST_POLL_S)
            if time.monotonic() - looked > LOOK_S:
                looked = time.monotonic()
                if self._has_left or self._pulse.silent_for(waited_for) > self.patience_s:
                    raise Lost
        work.wait()

    def _lost(self, ranks: Sequence[int]) -> str:
        names = ", ".join(f"rank {rank} ({self._places[rank]})" for rank in ranks)
        verb = "gives" if len(ranks) == 1 else "give"
        return (
            f"{names} of {self.count} ranks {verb} no sign of life: killed, stopped, or the machine is lost; start "
            "the run again with --resume"
        )


def own_device(device: torch.device) -> torch.device:
    """The device, or of this machine's GPUs this rank's own; ConfigurationError where it has none."""
    if device.type == "cpu":
        return device
    index, found = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if index >= found:
        raise ConfigurationError(
            f"device: every rank needs a GPU of its own, and torch sees {found} for the {index + 1} or more ranks of "
            f"{socket.gethostname()}; start no more there (--nproc-per-node {found}), or set device = 'cpu'"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def lead(recipe: str, timeout_s: float) -> Crew:
    """Join the others as their leader and tell them the recipe."""
    store, rank, count = _meet()
    store.set("recipe", json.dumps({"recipe": recipe, "timeout_s": timeout_s}))
    return Crew(store, rank, count, timeout_s)


def follow() -> tuple[Crew, str]:
    """Join the leader, once it has a recipe; and that."""
    store, rank, count = _meet()
    told = json.loads(store.get("recipe"))
    return Crew(store, rank, count, told["timeout_s"]), told["recipe"]


def _meet() -> tuple[Store, int, int]:
    store, rank, count = next(rendezvous("env://"))
    # Of its own, in a launcher's store that also knows other things.
    return PrefixStore("qarl", store), rank, count


def _packed(message: Any) -> Tensor:
    """Pickled: the ranks of one run trust one another, as in torch.distributed's own collectives of objects."""
    return torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)


def _unpacked(content: Tensor) -> Any:
    return pickle.loads(content.numpy().tobytes())
