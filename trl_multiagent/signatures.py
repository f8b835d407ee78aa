# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""What the user's functions can be called with, and awaiting what they return."""

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def accepted_keywords(function: Callable, names: Sequence[str], explicit: Sequence[str] = ()) -> set[str]:
    """
    Which keyword arguments a function takes.

    Args:
        function (`Callable`):
            Any callable; one without a signature (some built-ins) takes none.
        names (sequence of `str`):
            Keywords that also a function with `**kwargs` gets.
        explicit (sequence of `str`, *optional*):
            Keywords that only a function gets which names them.
    """
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:
        return set()
    named = {
        name
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name for name in names if takes_any or name in named} | {name for name in explicit if name in named}


def await_all(coroutines: Sequence[Coroutine]) -> list[Any]:
    """Results of all coroutines, run together, on an event loop of their own (the caller may already run one)."""
    if not coroutines:
        return []

    async def gather() -> list:
        return await asyncio.gather(*coroutines)

    with ThreadPoolExecutor(max_workers=1) as executor:
        return executor.submit(asyncio.run, gather()).result()
