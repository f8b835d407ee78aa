# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""One actor that writes the joint response of N roles, each role's part in a section of its own."""

import inspect
import math
import re
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any

from ..rewards import JointReward, RewardFunc
from ..signatures import accepted_keywords
from .formatters import ActorFormatter, Prompt, prompt_text


SECTION_TAG = re.compile(r"<\s*(?P<end>/\s*)?agent\s*_\s*(?P<role>[0-9]+)\s*>", re.IGNORECASE)


class JointResponseFormat:
    """
    How a joint response is asked for and read: role i's part is between `<agent_i>` and `</agent_i>`, with i from 0.

    Both methods may be overridden, for other words or another layout.
    """

    def build_prompt(self, row: dict[str, Any], prompts: list[Prompt]) -> Prompt:
        """
        The prompt of the actor that writes for all roles.

        Args:
            row (`dict`):
                The dataset row, for formats that want more of it.
            prompts (list of `str` or of message lists):
                The prompt of each role.

        Returns:
            `str`, or a list with one user message if the prompt of a role is a list of messages.
        """
        parts = [
            f"Write the responses of {len(prompts)} agents that work together, each to its own prompt. The responses "
            f"are judged together."
        ]
        parts += [f"Prompt of agent {role}:\n{prompt_text(prompt)}" for role, prompt in enumerate(prompts)]
        layout = "\n".join(f"<agent_{role}>...</agent_{role}>" for role in range(len(prompts)))
        parts.append(f"Put each agent's response in its section, and use each section exactly once:\n{layout}")
        text = "\n\n".join(parts)
        if all(isinstance(prompt, str) for prompt in prompts):
            return text
        return [{"role": "user", "content": text}]

    def parse(self, completion: str, num_roles: int) -> list[str] | None:
        """
        The texts of the roles in a completion.

        Sections may come in any order, text outside them is ignored, and so are sections of roles that do not exist.
        Case, and spaces within a tag, do not matter.

        Args:
            completion (`str`):
                What the actor wrote.
            num_roles (`int`):
                Number N of roles.

        Returns:
            List of N `str` without the white space around them, in the order of the roles. `None` if the completion
            is unparsable: a section is missing, not closed, there twice or inside another, or a tag is left over.
        """
        roles = {str(role): role for role in range(num_roles)}
        tags = [tag for tag in SECTION_TAG.finditer(completion) if tag["role"] in roles]
        if len(tags) != 2 * num_roles:
            return None
        sections: dict[int, str] = {}
        for start, end in zip(tags[::2], tags[1::2], strict=True):
            role = roles[start["role"]]
            if start["end"] or not end["end"] or end["role"] != start["role"] or role in sections:
                return None
            sections[role] = completion[start.end() : end.start()].strip()
        return [sections[role] for role in range(num_roles)]


class CentralizedFormatter:
    """
    From a dataset row to the prompt of the actor that writes for all roles.

    Args:
        role_formatters (list of [`ActorFormatter`]):
            The formatter of each role.
        response_format ([`JointResponseFormat`]):
            How the joint response is asked for.

    Raises:
        ValueError: a role's formatter takes `earlier_completions`.
    """

    def __init__(self, role_formatters: Sequence[ActorFormatter], response_format: JointResponseFormat):
        for formatter in role_formatters:
            if formatter.takes_earlier:
                raise ValueError(
                    f"The formatter of {formatter.name} takes `earlier_completions`, but one actor writes the "
                    f"responses of all roles at once: no role hears another. Use a formatter without it."
                )
        self.role_formatters = list(role_formatters)
        self.response_format = response_format

    def __call__(self, row: dict[str, Any]) -> Prompt:
        prompts = [formatter.first_prompt(row) for formatter in self.role_formatters]
        return self.response_format.build_prompt(row, prompts)


class CentralizedReward:
    """
    A reward function of N roles as one of the actor that writes for all of them.

    It is called as `f(completions, batch_items=rows, turn=turn)`. Each completion is parsed, and `reward_func` gets
    those that are parsable, as N lists of texts. It is called once, or not at all if nothing is parsable.

    Args:
        reward_func (`Callable`):
            Called as [`JointReward`] does: `f(completions1, ..., completionsN)`, with `batch_items=` and `turn=` if it
            takes these. It returns one value for each joint response. It may be async.
        num_roles (`int`):
            Number N of roles.
        response_format ([`JointResponseFormat`]):
            How completions are read.
        unparsable_reward (`float`, *optional*):
            Reward of a completion that cannot be parsed; `None` for no reward.

    Raises:
        TypeError: `reward_func` is not callable.
        ValueError: it cannot take one argument for each role, or `unparsable_reward` is not finite.
    """

    def __init__(
        self,
        reward_func: RewardFunc,
        num_roles: int,
        response_format: JointResponseFormat,
        unparsable_reward: float | None = None,
    ):
        if unparsable_reward is not None and not math.isfinite(unparsable_reward):
            raise ValueError(
                f"unparsable_reward={unparsable_reward} must be a finite number, or None for no reward at all."
            )
        # The trainer sees only this object, so what it would check of the function is checked here
        (self.__name__,) = JointReward([reward_func], num_roles).names
        self.reward_func = reward_func
        self.num_roles = num_roles
        self.response_format = response_format
        self.unparsable_reward = unparsable_reward
        self._takes = accepted_keywords(reward_func, ("batch_items",), explicit=("turn",))
        if self._takes:  # a parameter of such a name among the first N gets a list of texts
            self._takes -= inspect.signature(reward_func).bind_partial(*[None] * num_roles).arguments.keys()

    def __call__(
        self, completions: Sequence[str], batch_items: Sequence[dict[str, Any]], turn: int = 1
    ) -> list | Awaitable[list]:
        """
        Score completions.

        Args:
            completions (list of `str`, length B):
                What the actor wrote.
            batch_items (list of `dict`, length B):
                The dataset row of each completion.
            turn (`int`, *optional*, defaults to `1`):
                Number of the turn.

        Returns:
            List of B values, those of `reward_func` as it returned them; an awaitable of it if `reward_func` is async.

        Raises:
            ValueError: `reward_func` returned something else than one value for each joint response.
        """
        parsed = [self.parse(completion) for completion in completions]
        kept = [index for index, texts in enumerate(parsed) if texts is not None]
        if not kept:
            return [self.unparsable_reward] * len(parsed)
        offered = {"batch_items": [batch_items[index] for index in kept], "turn": turn}
        kwargs = {name: value for name, value in offered.items() if name in self._takes}
        output = self.reward_func(
            *([parsed[index][role] for index in kept] for role in range(self.num_roles)), **kwargs
        )
        if inspect.isawaitable(output):
            return self._spread_later(output, kept, len(parsed))
        return self._spread(output, kept, len(parsed))

    def parse(self, completion: str) -> list[str] | None:
        """The text of each role in a completion; `None` if it cannot be parsed."""
        texts = self.response_format.parse(completion, self.num_roles)
        if texts is not None and len(texts) != self.num_roles:
            raise ValueError(
                f"{type(self.response_format).__name__}.parse returned {len(texts)} texts, expected {self.num_roles}, "
                f"one for each role, or None for a completion that cannot be parsed."
            )
        return texts

    async def _spread_later(self, output: Awaitable, kept: list[int], size: int) -> list:
        return self._spread(await output, kept, size)

    def _spread(self, output: Any, kept: list[int], size: int) -> list:
        """The values for the completions `kept`, among all `size` of them."""
        # A 0-d tensor or array can be asked for an iterator but has none
        is_list = isinstance(output, Iterable) and not isinstance(output, (str, bytes, dict))
        if not is_list or getattr(output, "ndim", 1) == 0:
            raise ValueError(
                f"The reward function '{self.__name__}' returned {type(output).__name__} ({str(output)[:80]!r}), "
                f"expected a list of {len(kept)} numbers: one for each joint response."
            )
        values = list(output)
        if any(isinstance(value, (list, tuple)) or getattr(value, "ndim", 0) > 0 for value in values):
            raise ValueError(
                f"The reward function '{self.__name__}' returned a list of lists, as for one reward of each actor. "
                f"Here one actor writes for all {self.num_roles} roles, and a joint policy has one reward: return a "
                f"flat list of {len(kept)} numbers, one for each joint response."
            )
        if len(values) != len(kept):
            raise ValueError(
                f"The reward function '{self.__name__}' returned {len(values)} values, expected {len(kept)}: one for "
                f"each joint response. Return a list as long as each of the lists of texts it is given."
            )
        rewards = [self.unparsable_reward] * size
        for index, value in zip(kept, values, strict=True):
            rewards[index] = value
        return rewards
