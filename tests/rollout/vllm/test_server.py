"""A vLLM server as its client sees it: a real one on this host, which says what vLLM 0.32 says and fails as it may."""

from __future__ import annotations

import json
import math
import socket
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Barrier, Event, Thread
from typing import Any

import pytest

from qarl.errors import ConfigurationError, RunError
from qarl.records import Sampling
from qarl.rollout.vllm.server import ADAPT, CALL, FORGET, GENERATE, GIVE_UP, Server
from qarl.rollout.vllm.service import Answer, Ask, sampling_params

SAMPLING = Sampling(temperature=0.8, max_new_tokens=8, stop_token_ids=(3,))
SHORT = 0.4
"""Seconds of silence that are too long, where a test waits for them."""


class Talk(BaseHTTPRequestHandler):
    """One request; what is said to it is up to the server's `replies`."""

    protocol_version = "HTTP/1.1"
    server: Pretended

    def log_message(self, *_: Any) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        self.say({}, self.server.health if self.path == "/health" else 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, body))
        try:
            self.server.replies[self.path](self, body)
        except (BrokenPipeError, ConnectionResetError):
            self.server.left.set()

    def say(self, content: Any, status: int = 200) -> None:
        self.text(json.dumps(content), status)

    def text(self, content: str, status: int = 200) -> None:
        text = content.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def begin(self) -> None:
        """A stream of events."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def event(self, content: Any) -> None:
        text = f"data: {content if isinstance(content, str) else json.dumps(content)}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(text), text))

    def token(self, token: int, finish_reason: str | None = None, logprob: float | None = None) -> None:
        value = -token / 8 if logprob is None else logprob
        content = [{"token_id": token, "logprob": value, "rank": 1, "top_logprobs": []}]
        self.choice([token], {"content": content}, finish_reason)

    def choice(self, token_ids: list[int], logprobs: Any, finish_reason: str | None) -> None:
        choice = {"index": 0, "token_ids": token_ids, "logprobs": logprobs, "finish_reason": finish_reason}
        self.event({"request_id": "generate-1", "choices": [choice]})

    def end(self) -> None:
        self.event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def lose(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)


Reply = Callable[[Talk, dict[str, Any]], None]


class Pretended(ThreadingHTTPServer):
    """`left` is set when somebody hangs up, `over` when the test ends."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Talk)
        self.health = 200
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.replies: dict[str, Reply] = {}
        self.left, self.over = Event(), Event()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def client(self, timeout_s: float = 20.0) -> Server:
        return Server(self.url, timeout_s)

    def complete(
        self, reply: Reply, asks: int = 1, timeout_s: float = 20.0, watch: Callable[[int], bool] | None = None
    ) -> list[Answer]:
        """Ask for completions of [0], [1] and so on."""
        self.replies[GENERATE] = reply
        wanted = [Ask([index], 8, 100 + index) for index in range(asks)]
        return self.client(timeout_s).complete(wanted, SAMPLING, watch or (lambda finished: False))


@pytest.fixture
def vllm() -> Iterator[Pretended]:
    with Pretended() as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.over.set()
        server.shutdown()


def three_tokens(talk: Talk, body: dict[str, Any]) -> None:
    first = body["token_ids"][0]
    talk.begin()
    talk.token(10 + first)
    talk.choice([], {"content": []}, None)
    talk.choice([], None, None)
    talk.token(20 + first)
    talk.token(3, "stop")
    talk.end()


def expected(index: int) -> Answer:
    tokens = [10 + index, 20 + index, 3]
    return Answer(tokens, [-token / 8 for token in tokens], "stop")


def test_answers_come_in_the_order_of_the_asks_whoever_is_first(vllm: Pretended) -> None:
    others = [Event() for _ in range(5)]

    def last_first(talk: Talk, body: dict[str, Any]) -> None:
        index = body["token_ids"][0]
        assert index == 4 or others[index + 1].wait(10)
        three_tokens(talk, body)
        others[index].set()

    told: list[int] = []

    def watch(finished: int) -> bool:
        told.append(finished)
        return False

    answers = vllm.complete(last_first, asks=5, watch=watch)
    assert answers == [expected(index) for index in range(5)]
    assert told == sorted(told) and told[-1] == 5


def test_the_server_is_told_tokens_and_how_to_sample(vllm: Pretended) -> None:
    vllm.complete(three_tokens)
    params = sampling_params(Ask([0], 8, 100), SAMPLING)
    assert vllm.seen == [(GENERATE, {"token_ids": [0], "sampling_params": params, "stream": True})]


def test_no_asks_are_no_answers(vllm: Pretended) -> None:
    assert vllm.complete(three_tokens, asks=0) == []


def test_all_asks_are_with_the_server_at_once(vllm: Pretended) -> None:
    count = 101  # more than httpx2's pool has by default
    everybody = Barrier(count)

    def together(talk: Talk, body: dict[str, Any]) -> None:
        everybody.wait(20)
        three_tokens(talk, body)

    assert vllm.complete(together, asks=count) == [expected(index) for index in range(count)]


def test_what_is_stopped_keeps_its_tokens_and_the_server_sees_that_nobody_listens(vllm: Pretended) -> None:
    def endless(talk: Talk, body: dict[str, Any]) -> None:
        if body["token_ids"] == [1]:
            return three_tokens(talk, body)
        talk.begin()
        for _ in range(2000):
            talk.token(7)
            time.sleep(0.005)

    first, second = vllm.complete(endless, asks=2, watch=lambda finished: finished == 1)
    assert second == expected(1)
    assert first.finish_reason == "aborted"
    assert set(first.token_ids) <= {7} and len(first.token_ids) == len(first.logprobs) < 2000
    assert vllm.left.wait(10)


def test_what_has_not_begun_may_be_stopped_too(vllm: Pretended) -> None:
    def waits(talk: Talk, body: dict[str, Any]) -> None:
        if body["token_ids"] == [0]:
            return three_tokens(talk, body)
        vllm.over.wait()

    assert vllm.complete(waits, asks=2, watch=lambda finished: finished == 1) == [expected(0), Answer()]


@pytest.mark.parametrize("begun", [False, True], ids=["no answer", "no token more"])
def test_silence_ends_the_rollout_in_time(vllm: Pretended, begun: bool) -> None:
    def silent(talk: Talk, body: dict[str, Any]) -> None:
        if begun:
            talk.begin()
            talk.token(7)
        vllm.over.wait()

    started = time.monotonic()
    with pytest.raises(RunError, match=rf"vLLM at {vllm.url} gave no sign of life for {SHORT:g} s"):
        vllm.complete(silent, asks=3, timeout_s=SHORT)
    assert SHORT <= time.monotonic() - started < 10 * SHORT


def test_one_that_waits_for_its_turn_is_not_silence(vllm: Pretended) -> None:
    done = Event()

    def in_turn(talk: Talk, body: dict[str, Any]) -> None:
        if body["token_ids"] == [1]:
            talk.begin()
            assert done.wait(10)
            talk.token(7, "length")
            return talk.end()
        talk.begin()
        for _ in range(6):
            time.sleep(0.25)
            talk.token(7)
        talk.token(7, "length")
        talk.end()
        done.set()

    first, second = vllm.complete(in_turn, asks=2, timeout_s=1.0)
    assert (len(first.token_ids), second.token_ids) == (7, [7])


def test_a_connection_that_is_lost_ends_the_rollout(vllm: Pretended) -> None:
    def lost(talk: Talk, body: dict[str, Any]) -> None:
        talk.begin()
        talk.token(7)
        talk.lose()

    with pytest.raises(RunError, match=rf"vLLM at {vllm.url} is lost: \S"):
        vllm.complete(lost, asks=2)


def test_what_the_server_says_of_its_failure_is_told(vllm: Pretended) -> None:
    def fails(talk: Talk, body: dict[str, Any]) -> None:
        talk.begin()
        talk.token(7)
        talk.event({"error": {"message": "EngineCore died", "code": 500}})
        talk.end()

    with pytest.raises(RunError, match=r"failed while it generated: .*EngineCore died"):
        vllm.complete(fails)


@pytest.mark.parametrize("said", [None, "abort"])
def test_a_stream_that_ends_before_its_completion_is_a_failure(vllm: Pretended, said: str | None) -> None:
    def ends(talk: Talk, body: dict[str, Any]) -> None:
        talk.begin()
        talk.token(7, said)
        talk.end()

    with pytest.raises(RunError, match="ended a completion before it was finished"):
        vllm.complete(ends)


def test_what_is_sent_for_a_logprob_that_is_no_number_is_none(vllm: Pretended) -> None:
    def clamped(talk: Talk, body: dict[str, Any]) -> None:
        talk.begin()
        talk.token(7, logprob=-9998.5)
        talk.token(8, "length", logprob=-9999.0)
        talk.end()

    [answer] = vllm.complete(clamped)
    assert answer.logprobs[0] == -9998.5 and math.isnan(answer.logprobs[1])


def test_a_refusal_is_told_with_its_reason(vllm: Pretended) -> None:
    def refuses(talk: Talk, body: dict[str, Any]) -> None:
        talk.say({"error": "not for you"}, 403)

    with pytest.raises(RunError, match=r'refused to generate: 403 .*"not for you"'):
        vllm.complete(refuses)
    vllm.replies = {CALL: refuses, FORGET: refuses}
    with pytest.raises(RunError, match=r'refused /collective_rpc: 403 .*"not for you"'):
        vllm.client().call("qarl_describe", {})
    with pytest.raises(RunError, match="refused /reset_prefix_cache: 403"):
        vllm.client().forget()


def test_a_call_goes_to_every_worker_as_json(vllm: Pretended) -> None:
    vllm.replies[CALL] = lambda talk, body: talk.say({"results": [{"rank": 0}, {"rank": 1}]})
    message = {"way": "folder", "folder": "/dev/shm/ü"}
    assert vllm.client().call("qarl_load", message) == [{"rank": 0}, {"rank": 1}]
    [(path, body)] = vllm.seen
    assert (path, body["method"], [json.loads(one) for one in body["args"]]) == (CALL, "qarl_load", [message])


def test_a_call_without_an_answer_ends_in_time(vllm: Pretended) -> None:
    def silent(talk: Talk, body: dict[str, Any]) -> None:
        vllm.over.wait()

    vllm.replies[CALL] = silent
    with pytest.raises(RunError, match=rf"gave no sign of life for {SHORT:g} s \(engine\.timeout_s\)"):
        vllm.client(SHORT).call("qarl_load", {})


def test_a_cache_that_was_not_dropped_ends_the_run(vllm: Pretended) -> None:
    vllm.replies[FORGET] = lambda talk, body: talk.say({"success": True})
    vllm.client().forget()
    vllm.replies[FORGET] = lambda talk, body: talk.say({"success": False})
    with pytest.raises(RunError, match="did not drop its cached keys and values"):
        vllm.client().forget()


def test_a_server_that_is_not_there_or_not_well_is_refused_by_its_url(vllm: Pretended) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        with pytest.raises(
            ConfigurationError, match=rf"engine\.urls: no vLLM server answers at {url} \(\S.*`qarl serve`"
        ):
            Server(url, 5.0)
    vllm.health = 503
    with pytest.raises(ConfigurationError, match=rf"no vLLM server answers at {vllm.url} .*503"):
        vllm.client()


def test_a_server_that_dies_between_two_rollouts_is_lost() -> None:
    with Pretended() as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        client = server.client()
        server.shutdown()
    with pytest.raises(RunError, match=rf"vLLM at {server.url} is lost: \S"):
        client.forget()
    with pytest.raises(RunError, match=rf"vLLM at {server.url} is lost: \S"):
        client.complete([Ask([1], 8, 0)], SAMPLING, lambda finished: False)


def test_what_is_asked_is_asked_of_the_adapters_that_were_loaded_last(vllm: Pretended) -> None:
    vllm.replies |= {ADAPT: lambda talk, body: talk.text("Success"), GIVE_UP: lambda talk, body: talk.text("Success")}
    vllm.replies[GENERATE] = three_tokens
    client = vllm.client()
    for folder in (None, "/shm/version-1", "/shm/version-2"):
        if folder is not None:
            client.adapt(folder)
        client.complete([Ask([1], 8, 0)], SAMPLING, lambda finished: False)
    (_, plain), (_, first), (_, asked_first), (_, second), (_, given_up), (_, asked_second) = vllm.seen
    assert [path for path, _ in vllm.seen] == [GENERATE, ADAPT, GENERATE, ADAPT, GIVE_UP, GENERATE]
    assert (first["lora_path"], second["lora_path"]) == ("/shm/version-1", "/shm/version-2")
    assert "model" not in plain
    assert (asked_first["model"], asked_second["model"]) == (first["lora_name"], second["lora_name"])
    assert given_up == {"lora_name": first["lora_name"]} and first["lora_name"] != second["lora_name"]


def test_adapters_that_are_refused_are_not_asked(vllm: Pretended) -> None:
    vllm.replies |= {ADAPT: lambda talk, body: talk.say({"error": "no adapter"}, 404), GENERATE: three_tokens}
    client = vllm.client()
    with pytest.raises(RunError, match=r"refused /v1/load_lora_adapter: 404 .*no adapter"):
        client.adapt("/shm/version-1")
    client.complete([Ask([1], 8, 0)], SAMPLING, lambda finished: False)
    assert "model" not in vllm.seen[-1][1]
