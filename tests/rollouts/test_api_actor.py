# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""An actor behind an endpoint, here a server of this process."""

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from trl_multiagent.rollouts.api_actor import APIActor


class Endpoint:
    """A server that keeps what it was asked, and answers as `reply(request)` says: a status and a body."""

    def __init__(self, reply):
        endpoint, self.requests, self.headers = self, [], []
        lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    endpoint.requests.append(request)
                    endpoint.headers.append(self.headers)
                status, body = reply(request)
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args):
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


def choices(*texts) -> dict:
    return {
        "id": "1",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [
            {"index": i, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
            for i, text in enumerate(texts)
        ],
    }


def echo(request):
    asked = request["messages"][-1]["content"]
    return 200, choices(*(f"{asked}/{i}" for i in range(request["n"])))


@pytest.fixture
def serve(monkeypatch):
    monkeypatch.setenv("SOME_KEY", "a-secret")
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    endpoints = []

    def start(reply=echo, **kwargs):
        endpoint = Endpoint(reply)
        endpoints.append(endpoint)
        defaults = dict(max_tokens=7, temperature=0.6, top_p=0.9, base_url=endpoint.url, api_key_env="SOME_KEY")
        return endpoint, APIActor("m", **{**defaults, **kwargs})

    yield start
    for endpoint in endpoints:
        endpoint.server.shutdown()


def test_equal_neighbours_are_one_request_and_answers_keep_their_order(serve):
    endpoint, actor = serve()
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    assert actor.sample(["a", "a", "b", messages, "a"]) == ["a/0", "a/1", "b/0", "q/0", "a/0"]
    assert sorted(request["n"] for request in endpoint.requests) == [1, 1, 1, 2]
    assert messages in [request["messages"] for request in endpoint.requests]
    for request in endpoint.requests:
        assert (request["model"], request["max_tokens"], request["temperature"]) == ("m", 7, 0.6)
        assert request["top_p"] == 0.9


def test_order_is_kept_while_requests_overlap(serve):
    def slow_first(request):
        time.sleep(0.2 if request["messages"][0]["content"] == "0" else 0)
        return echo(request)

    _, actor = serve(slow_first)
    assert actor.sample([str(i) for i in range(6)]) == [f"{i}/0" for i in range(6)]


def test_only_what_counts_is_asked(serve):
    endpoint, actor = serve()
    assert actor.sample(["a", "b", "c"], num_kept=1) == ["a/0"]
    assert actor.sample(["a"], num_kept=0) == []
    assert len(endpoint.requests) == 1


def test_requests_ask_for_no_more_than_max_n(serve):
    endpoint, actor = serve(max_n=2)
    assert len(actor.sample(["a"] * 5)) == 5
    assert sorted(request["n"] for request in endpoint.requests) == [1, 2, 2]


def test_a_server_that_gives_one_choice_is_asked_again(serve):
    endpoint, actor = serve(lambda request: (200, choices("only one")))
    assert actor.sample(["a"] * 3) == ["only one"] * 3
    assert len(endpoint.requests) == 3


def test_a_choice_without_content_is_an_empty_text(serve):
    _, actor = serve(lambda request: (200, choices(None)))
    assert actor.sample(["a"]) == [""]


def test_greedy_is_without_temperature(serve):
    endpoint, actor = serve()
    actor.sample(["a"], greedy=True)
    assert endpoint.requests[0]["temperature"] == 0


def test_key_and_headers_are_sent(serve):
    endpoint, actor = serve(headers={"X-Team": "t"}, extra_body={"min_p": 0.1})
    actor.sample(["a"])
    assert endpoint.headers[0]["Authorization"] == "Bearer a-secret"
    assert endpoint.headers[0]["X-Team"] == "t"
    assert endpoint.requests[0]["min_p"] == 0.1


def test_a_passing_failure_is_tried_again(serve):
    left = [500, 429]
    endpoint, actor = serve(lambda request: (left.pop(), {}) if left else echo(request), max_retries=2)
    assert actor.sample(["a"]) == ["a/0"]
    assert len(endpoint.requests) == 3


@pytest.mark.parametrize(
    "reply",
    [
        (401, {"error": {"message": "wrong key"}}),
        (500, {}),
        (429, {}),
        (200, b"no json"),
        (200, {"object": "error"}),
        (200, choices()),
    ],
    ids=["401", "500", "429", "no json", "no choices", "empty choices"],
)
def test_a_lasting_failure_names_endpoint_and_model_and_not_the_key(serve, reply):
    endpoint, actor = serve(lambda request: reply, max_retries=1, name="the comparator of writer")
    with pytest.raises(RuntimeError, match="the comparator of writer.*127.0.0.1.*'m'") as caught:
        actor.sample(["a"])
    assert "a-secret" not in str(caught.value)
    assert "a-secret" not in repr(actor)


def test_a_request_that_takes_too_long_fails(serve):
    def sleep(request):
        time.sleep(0.6)
        return echo(request)

    _, actor = serve(sleep, timeout=0.1, max_retries=0)
    with pytest.raises(RuntimeError, match="APITimeoutError"):
        actor.sample(["a"])


def test_a_missing_key_is_found_at_once(monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(ValueError, match="NO_SUCH_KEY is not set"):
        APIActor("m", max_tokens=1, temperature=1.0, top_p=1.0, api_key_env="NO_SUCH_KEY")


def test_a_missing_client_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ImportError, match=r"trl_multiagent\[api\]"):
        APIActor("m", max_tokens=1, temperature=1.0, top_p=1.0)
