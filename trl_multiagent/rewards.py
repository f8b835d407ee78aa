# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Calling the user's reward functions and checking what they return."""

import copy
import inspect
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ._compat import get_callable_name
from .signatures import accepted_keywords, await_all


logger = logging.getLogger(__name__)

# reward_func(completions1, completions2, ..., batch_items=rows) -> one value for each joint response, or one list for
# each actor
RewardFunc = Callable[..., Any]


class JointReward:
    """
    Scores joint responses with one or several reward functions.

    Args:
        reward_funcs (`Callable` or list of `Callable`):
            Each is called as `f(completions1, ..., completionsN)`, one list of texts for each actor, in actor order;
            also with `batch_items=`, the dataset rows, if it takes that, and with `turn=`, the number of the turn from
            1, if it names that. It may be async. It returns one value for each joint response (list, tuple, tensor or
            array of numbers; `None` or NaN where there is no reward), or one such list for each actor.
        num_agents (`int`):
            Number N of actors.
        reward_processor (`Callable`, *optional*):
            Maps each value that a function returned, before anything else happens to it; `None` for no reward.
        batched (`bool`, *optional*, defaults to `False`):
            Whether a function is called once for all joint responses of a batch instead of once for each task item.

    Raises:
        TypeError: a reward function is not callable.
        ValueError: a reward function cannot take one argument for each actor.
    """

    def __init__(
        self,
        reward_funcs: RewardFunc | list[RewardFunc],
        num_agents: int,
        reward_processor: Callable[[float], float] | None = None,
        batched: bool = False,
    ):
        self.funcs = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
        self.num_agents = num_agents
        self.reward_processor = reward_processor
        self.batched = batched
        if not self.funcs:
            raise ValueError("No reward function was given. Pass `reward_func=`, a callable or a list of them.")
        for func in self.funcs:
            if not callable(func):
                raise TypeError(
                    f"A reward function must be a callable that takes one list of texts for each actor, got "
                    f"{type(func).__name__}. A reward model can be called inside such a function."
                )
        if reward_processor is not None and not callable(reward_processor):
            raise TypeError(f"`reward_processor` must be a callable, got {type(reward_processor).__name__}.")
        self.names = unique_names([get_callable_name(func) for func in self.funcs])
        self._takes = [self._check_signature(func, name) for func, name in zip(self.funcs, self.names, strict=True)]
        self._warned_infinite = False

    def __call__(
        self,
        completions: Sequence[Sequence[str]],
        rows: Sequence[dict[str, Any]],
        sizes: Sequence[int],
        turn: int = 1,
    ) -> torch.Tensor:
        """
        Score joint responses.

        Args:
            completions (list of lists of `str`, `N x B`):
                The actors' texts; entry `[i][j]` is actor i's part of joint response j.
            rows (list of `dict`, length B):
                The dataset row of each joint response; those of one task item are neighbours.
            sizes (list of `int`):
                How many joint responses each task item has, in order; they sum to B.
            turn (`int`, *optional*, defaults to `1`):
                Number of the turn.

        Returns:
            `torch.Tensor` of shape `(N, B, F)`, float32, on the CPU: NaN where there is no reward.

        Raises:
            ValueError: a function returned something else than one value for each joint response, or one list for each
                actor. What a function itself raises is not touched.
        """
        ends = list(itertools.accumulate([len(rows)] if self.batched else sizes))
        chunks = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        rewards = torch.full((self.num_agents, len(rows), len(self.funcs)), math.nan)
        pending = []  # (function index, chunk, coroutine)
        for index, func in enumerate(self.funcs):
            for chunk in chunks:
                offered = {"batch_items": [copy.deepcopy(row) for row in rows[chunk]], "turn": turn}
                kwargs = {name: value for name, value in offered.items() if name in self._takes[index]}
                output = func(*([*texts[chunk]] for texts in completions), **kwargs)
                if inspect.isawaitable(output):
                    pending.append((index, chunk, output))
                else:
                    rewards[:, chunk, index] = self._to_tensor(output, len(rows[chunk]), self.names[index])
        for (index, chunk, _), output in zip(pending, await_all([p[2] for p in pending]), strict=True):
            rewards[:, chunk, index] = self._to_tensor(output, len(rows[chunk]), self.names[index])
        return rewards

    def _check_signature(self, func: RewardFunc, name: str) -> set[str]:
        """Which keywords `func` takes; an error if it cannot take the actors' texts."""
        takes = accepted_keywords(func, ("batch_items",), explicit=("turn",))
        try:
            signature = inspect.signature(func)
        except ValueError:  # some built-ins have none
            return takes
        positional = [
            p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        if any(p.name == "prompts" for p in positional[: self.num_agents]):
            raise ValueError(
                f"The reward function '{name}{signature}' has the parameter `prompts` where it gets the texts of an "
                f"actor: it is called with one list of texts for each of the {self.num_agents} actors. The prompts "
                f"are in `batch_items`: take that and read `row['prompt']`."
            )
        takes -= {"turn"} & {p.name for p in positional[: self.num_agents]}  # that is a list of texts
        try:
            signature.bind(*([None] * self.num_agents), **dict.fromkeys(takes))
        except TypeError as error:
            raise ValueError(
                f"The reward function '{name}{signature}' cannot be called with the texts of {self.num_agents} "
                f"actors: {error}. It must take {self.num_agents} positional arguments (one list of texts for each "
                f"actor, in actor order) and, if it wants the dataset rows, `batch_items`."
            ) from None
        return takes

    def _to_tensor(self, output: Any, expected: int, name: str) -> torch.Tensor:
        """One function's answer for `expected` joint responses as a tensor of shape `(N, expected)`."""
        values = _as_list(output, name, expected)
        # One list for each actor is told from a list of values by its entries, never by its length
        if values and all(_is_sequence(value) for value in values):
            if len(values) != self.num_agents:
                raise ValueError(
                    f"The reward function '{name}' returned {len(values)} lists, expected {self.num_agents} (one list "
                    f"for each actor) or a flat list of {expected} values (one for each joint response)."
                )
            return torch.stack([self._numbers(_as_list(v, name, expected), expected, name) for v in values])
        return self._numbers(values, expected, name).expand(self.num_agents, expected)

    def _numbers(self, values: list, expected: int, name: str) -> torch.Tensor:
        if len(values) != expected:
            raise ValueError(
                f"The reward function '{name}' returned {len(values)} values, expected {expected}: one for each joint "
                f"response. Return a list as long as each of the lists of texts it is given."
            )
        numbers = torch.tensor([self._number(value, name) for value in values], dtype=torch.float32)
        infinite = torch.isinf(numbers)
        if infinite.any():
            if not self._warned_infinite:
                logger.warning(
                    "The reward function '%s' returned an infinite value. Infinite rewards count as missing.", name
                )
                self._warned_infinite = True
            numbers[infinite] = math.nan
        return numbers

    def _number(self, value: Any, name: str) -> float:
        if value is None:
            return math.nan
        if isinstance(value, (str, bytes)):
            raise ValueError(f"The reward function '{name}' returned the text {value!r}, expected a number or None.")
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise ValueError(
                f"The reward function '{name}' returned a {type(value).__name__} ({str(value)[:80]}) in its list, "
                f"expected a number or None for each joint response."
            ) from None
        if self.reward_processor is None or math.isnan(number):
            return number
        processed = self.reward_processor(number)
        return math.nan if processed is None else float(processed)


def unique_names(names: Sequence[str]) -> list[str]:
    """Metric names of callables: stable, not empty, and different where callables share a name."""
    names = ["reward_func" if name in ("", "<lambda>") else name for name in names]
    unique: list[str] = []
    for name in names:
        count = 2
        candidate = name
        while candidate in unique:
            candidate, count = f"{name}_{count}", count + 1
        unique.append(candidate)
    return unique


def _is_sequence(value: Any) -> bool:
    # A 0-d tensor or array has `__len__` but is a number
    return isinstance(value, (list, tuple)) or getattr(value, "ndim", 0) > 0


def _as_list(output: Any, name: str, expected: int) -> list:
    if isinstance(output, torch.Tensor):
        output = output.detach().cpu().tolist()
    elif hasattr(output, "tolist"):  # NumPy arrays and scalars, pandas columns
        output = output.tolist()
    if isinstance(output, (str, bytes, dict)) or not isinstance(output, Iterable):
        raise ValueError(
            f"The reward function '{name}' returned {type(output).__name__} ({str(output)[:80]!r}), expected a list "
            f"of {expected} numbers: one for each joint response."
        )
    return list(output)
