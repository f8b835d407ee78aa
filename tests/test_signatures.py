# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Which keywords a function takes, and results of coroutines in order."""

import asyncio
import functools

import pytest

from trl_multiagent.signatures import accepted_keywords, await_all


class Callable:
    def __call__(self, a, b=1):
        return a

    def method(self, b):
        return b


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda a: 0, {"a"}),
        (lambda *, b: 0, {"b"}),
        (lambda a, /, b: 0, {"b"}),
        (lambda *a: 0, set()),
        (lambda **anything: 0, {"a", "b"}),
        (functools.partial(lambda a, b, c: 0, 1), {"b"}),
        (Callable(), {"a", "b"}),
        (Callable().method, {"b"}),
        (dict.fromkeys, set()),  # takes by position only
    ],
)
def test_keywords_are_those_that_can_be_given_by_name(function, expected):
    assert accepted_keywords(function, ("a", "b")) == expected


def test_what_must_be_named_is_not_covered_by_any_keywords():
    assert accepted_keywords(lambda **anything: 0, ("a",), explicit=("b",)) == {"a"}
    assert accepted_keywords(lambda b, **anything: 0, ("a",), explicit=("b",)) == {"a", "b"}


def test_coroutines_wait_together_and_answer_in_order():
    async def after(turns, value):
        for _ in range(turns):
            await asyncio.sleep(0)
        return value

    assert await_all([after(3, "slow"), after(0, "fast")]) == ["slow", "fast"]
    assert await_all([]) == []


def test_an_exception_surfaces_unchanged():
    async def fails():
        raise KeyError("x")

    with pytest.raises(KeyError, match="x"):
        await_all([fails()])
