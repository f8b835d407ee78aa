# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""An actor behind an endpoint, here a server of this process."""

import logging
import sys
import threading
import time
import traceback

import pytest
from endpoint import Endpoint, choices, echo

from trl_multiagent.rollouts.api_actor import APIActor


KEY = "sk-a-secret-key"


@pytest.fixture
def serve(monkeypatch):
    """Starts servers: `serve(reply, **arguments)` gives one and an actor that asks it."""
    monkeypatch.setenv("SOME_KEY", KEY)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    endpoints = []

    def start(reply=echo, **kwargs):
        endpoints.append(Endpoint(reply))
        defaults = dict(base_url=endpoints[-1].url, max_tokens=7, temperature=0.6, top_p=0.9, api_key_env="SOME_KEY")
        return endpoints[-1], APIActor("m", **{**defaults, **kwargs})

    yield start
    for endpoint in endpoints:
        endpoint.close()


def sizes(endpoint) -> list[int]:
    return sorted(body["n"] for body in endpoint.bodies)


class TestRequests:
    def test_a_text_is_one_message_of_the_user(self, serve):
        endpoint, actor = serve()
        assert actor.sample(["a"]) == ["a/0"]
        assert endpoint.paths == ["/v1/chat/completions"]
        assert endpoint.bodies == [
            {
                "model": "m",
                "messages": [{"role": "user", "content": "a"}],
                "n": 1,
                "max_tokens": 7,
                "temperature": 0.6,
                "top_p": 0.9,
            }
        ]

    def test_messages_are_sent_as_they_are(self, serve):
        endpoint, actor = serve()
        messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
        assert actor.sample([messages]) == ["q/0"]
        assert endpoint.bodies[0]["messages"] == messages

    def test_equal_neighbours_are_one_request(self, serve):
        endpoint, actor = serve()
        assert actor.sample(["a", "a", "b", "a"]) == ["a/0", "a/1", "b/0", "a/0"]
        assert sizes(endpoint) == [1, 1, 2]

    def test_equal_message_lists_are_one_request(self, serve):
        endpoint, actor = serve()
        assert actor.sample([[{"role": "user", "content": "a"}] for _ in range(2)]) == ["a/0", "a/1"]
        assert sizes(endpoint) == [2]

    def test_requests_ask_for_no_more_than_max_n(self, serve):
        endpoint, actor = serve(max_n=2)
        assert actor.sample(["a"] * 5) == ["a/0", "a/1", "a/0", "a/1", "a/0"]
        assert sizes(endpoint) == [1, 2, 2]

    def test_only_what_counts_is_asked(self, serve):
        endpoint, actor = serve()
        assert actor.sample(["a", "a", "b"], num_kept=1) == ["a/0"]
        assert actor.sample(["a"], num_kept=0) == [] and actor.sample([]) == []
        assert sizes(endpoint) == [1]

    def test_greedy_asks_each_prompt_once_without_temperature(self, serve):
        endpoint, actor = serve()
        assert actor.sample(["a", "a", "b"], greedy=True) == ["a/0", "a/0", "b/0"]
        assert [(body["temperature"], body["n"]) for body in endpoint.bodies] == [(0, 1)] * 2
        assert actor.sample(["a"]) == ["a/0"] and endpoint.bodies[-1]["temperature"] == 0.6

    def test_a_temperature_of_zero_asks_each_prompt_once(self, serve):
        endpoint, actor = serve(temperature=0.0)
        assert actor.sample(["a", "a"]) == ["a/0", "a/0"]
        assert sizes(endpoint) == [1]

    def test_key_headers_and_extra_fields_are_sent(self, serve):
        endpoint, actor = serve(headers={"X-Team": "t"}, extra_body={"min_p": 0.1})
        actor.sample(["a"])
        assert endpoint.headers[0]["Authorization"] == f"Bearer {KEY}"
        assert endpoint.headers[0]["X-Team"] == "t"
        assert endpoint.bodies[0]["min_p"] == 0.1

    def test_another_word_for_the_length_limit_replaces_the_usual_one(self, serve):
        endpoint, actor = serve(extra_body={"max_completion_tokens": 9})
        actor.sample(["a"])
        assert endpoint.bodies[0]["max_completion_tokens"] == 9 and "max_tokens" not in endpoint.bodies[0]


class TestConcurrency:
    def test_order_is_kept_where_later_answers_come_first(self, serve):
        came, last = [], threading.Event()

        def backwards(body):
            if body["messages"][0]["content"] == "3":
                last.set()
            assert last.wait(5)
            came.append(body["messages"][0]["content"])
            return echo(body)

        _, actor = serve(backwards, max_concurrency=4)
        assert actor.sample(["0", "1", "2", "3"]) == ["0/0", "1/0", "2/0", "3/0"]
        assert sorted(came) == ["0", "1", "2", "3"]

    def test_no_more_requests_than_allowed_are_in_flight(self, serve):
        lock, flying, most = threading.Lock(), [], []

        def count(body):
            with lock:
                flying.append(body)
                most.append(len(flying))
            time.sleep(0.05)
            with lock:
                flying.pop()
            return echo(body)

        _, actor = serve(count, max_concurrency=2)
        actor.sample([str(i) for i in range(6)])
        assert max(most) == 2


class TestAnswers:
    def test_a_server_that_gives_one_choice_is_asked_for_the_missing(self, serve):
        replies = iter(["x", "y", "z"])
        endpoint, actor = serve(lambda body: (200, choices(next(replies))))
        assert actor.sample(["a"] * 3) == ["x", "y", "z"]
        assert [body["n"] for body in endpoint.bodies] == [3, 2, 1]

    def test_a_server_that_stops_giving_choices_is_an_error_with_both_numbers(self, serve):
        replies = iter([choices("x"), choices()])
        _, actor = serve(lambda body: (200, next(replies)))
        with pytest.raises(RuntimeError, match="1 of 3 answers came.*max_n=1"):
            actor.sample(["a"] * 3)

    def test_choices_beyond_those_asked_for_do_not_shift_other_prompts(self, serve):
        _, actor = serve(lambda body: (200, choices(body["messages"][0]["content"], "more")))
        assert actor.sample(["a", "b"]) == ["a", "b"]

    def test_a_choice_without_content_is_an_empty_text(self, serve):
        _, actor = serve(lambda body: (200, choices(None, "")))
        assert actor.sample(["a", "a"]) == ["", ""]

    def test_a_passing_failure_is_tried_again(self, serve):
        left = [500, 429]
        endpoint, actor = serve(lambda body: (left.pop(), {}) if left else echo(body), max_retries=2)
        assert actor.sample(["a"]) == ["a/0"]
        assert len(endpoint.bodies) == 3


class TestFailures:
    @pytest.mark.parametrize(
        ("status", "body", "what", "todo", "tries"),
        [
            (400, {"error": {"message": "one choice only"}}, "one choice only", "max_n=1", 1),
            (401, {"error": {"message": f"bad key {KEY}"}}, r"bad key \*\*\*", "SOME_KEY", 1),
            (403, {}, "403", "SOME_KEY", 1),
            (404, {}, "404", "/v1", 1),
            (422, {}, "422", "max_n=1", 1),
            (429, {}, "429", "max_concurrency", 2),
            (500, {}, "500", "log", 2),
            (503, b"<html>busy</html>", "503|busy", "max_retries", 2),
            (200, b"{no json", "JSONDecodeError", "base_url", 1),
            (200, b"<html>welcome</html>", "welcome", "/v1", 1),
            (200, b"<" + b"x" * 5000, r"xxx\.\.\.", "/v1", 1),
            (200, {"error": {"message": "no credit"}}, "no credit", "base_url", 1),
            (200, {"choices": "text"}, "choices='text'", "base_url", 1),
            (200, {"choices": [{"index": 0}]}, "message=None", "base_url", 1),
            (200, choices(["parts"]), "parts", "base_url", 1),
            (200, [], r"\[\]", "base_url", 1),
            (200, choices(), "0 of 1 answers", "log", 1),
        ],
    )
    def test_a_lasting_failure_says_where_what_and_what_to_do(self, serve, caplog, status, body, what, todo, tries):
        caplog.set_level(logging.DEBUG)
        endpoint, actor = serve(lambda _: (status, body), max_retries=1, name="the comparator of writer")
        with pytest.raises(RuntimeError, match=f"(?s)the comparator of writer.*'m'.*({what}).*{todo}") as caught:
            actor.sample(["a"])
        assert endpoint.url in str(caught.value) and len(str(caught.value)) < 1000
        assert len(endpoint.bodies) == tries
        shown = "".join(traceback.format_exception(caught.value)) + repr(actor) + repr(vars(actor)) + caplog.text
        assert KEY not in shown

    def test_the_client_error_is_the_cause(self, serve):
        _, actor = serve(lambda body: (500, {}), max_retries=0)
        with pytest.raises(RuntimeError) as caught:
            actor.sample(["a"])
        assert type(caught.value.__cause__).__name__ == "InternalServerError"

    def test_a_request_that_takes_too_long_fails(self, serve):
        release = threading.Event()

        def wait(body):
            release.wait(5)
            return echo(body)

        _, actor = serve(wait, timeout=0.1, max_retries=0)
        with pytest.raises(RuntimeError, match="APITimeoutError.*Raise `timeout`"):
            actor.sample(["a"])
        release.set()

    def test_a_server_that_is_not_there_is_named(self, serve):
        endpoint, actor = serve(max_retries=0)
        endpoint.server.server_close()
        with pytest.raises(RuntimeError, match="127.0.0.1.*APIConnectionError.*reached from here"):
            actor.sample(["a"])

    def test_one_failure_among_many_requests_is_raised_and_the_rest_not_asked(self, serve):
        endpoint, actor = serve(
            lambda body: (400, {}) if body["messages"][0]["content"] == "0" else echo(body), max_concurrency=1
        )
        with pytest.raises(RuntimeError, match="400"):
            actor.sample([str(i) for i in range(20)])
        assert len(endpoint.bodies) < 20


class TestConstruction:
    @pytest.mark.parametrize("value", [None, "", " \n"])
    def test_a_missing_key_is_found_at_once(self, monkeypatch, value):
        monkeypatch.delenv("SOME_KEY", raising=False)
        if value is not None:
            monkeypatch.setenv("SOME_KEY", value)
        with pytest.raises(ValueError, match="SOME_KEY is not set or empty"):
            APIActor("m", max_tokens=1, api_key_env="SOME_KEY")

    @pytest.mark.parametrize("value", [f"{KEY}\nmore", f"{KEY}é"])
    def test_a_key_that_no_header_can_have_is_not_shown(self, monkeypatch, value):
        monkeypatch.setenv("SOME_KEY", value)
        with pytest.raises(ValueError, match="SOME_KEY.*printable ASCII") as caught:
            APIActor("m", max_tokens=1, api_key_env="SOME_KEY")
        assert KEY not in str(caught.value)

    def test_a_line_break_after_the_key_is_not_part_of_it(self, serve, monkeypatch):
        monkeypatch.setenv("OTHER_KEY", f"{KEY}\n")
        endpoint, actor = serve(api_key_env="OTHER_KEY")
        actor.sample(["a"])
        assert endpoint.headers[0]["Authorization"] == f"Bearer {KEY}"

    def test_the_key_is_read_once(self, serve, monkeypatch):
        endpoint, actor = serve()
        monkeypatch.delenv("SOME_KEY")
        actor.sample(["a"])
        assert endpoint.headers[0]["Authorization"] == f"Bearer {KEY}"

    def test_without_a_base_url_the_client_chooses(self, monkeypatch):
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        monkeypatch.setenv("OPENAI_BASE_URL", "http://elsewhere:1/v1")
        assert APIActor("m", max_tokens=1).base_url.startswith("http://elsewhere:1/v1")

    def test_a_missing_client_says_what_to_install(self, monkeypatch):
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        monkeypatch.setitem(sys.modules, "openai", None)
        with pytest.raises(ImportError, match=r'pip install "trl_multiagent\[api\]"'):
            APIActor("m", max_tokens=1)

    @pytest.mark.parametrize(
        "wrong",
        [
            {"model": ""},
            {"max_tokens": 0},
            {"temperature": -0.1},
            {"top_p": 0},
            {"timeout": 0},
            {"max_retries": -1},
            {"max_n": 0},
            {"max_concurrency": 0},
            {"base_url": "localhost:8000/v1"},
            {"base_url": "http://user:word@localhost/v1"},
            {"extra_body": {"n": 2}},
            {"extra_body": {"max_tokens": 2}},
        ],
    )
    def test_a_wrong_argument_is_named(self, monkeypatch, wrong):
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        (argument,) = wrong
        with pytest.raises(ValueError, match=f"{argument}.* of the API comparator.*") as caught:
            APIActor(**{"model": "m", "max_tokens": 1, **wrong})
        assert "word@" not in str(caught.value)
