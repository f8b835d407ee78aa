# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Between two turns: calling the user's environment and checking what it says."""

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .._compat import get_callable_name
from ..signatures import accepted_keywords, await_all
from .formatters import Prompt, check_prompt


@dataclass
class History:
    """
    What was said in the turns so far, along one branch.

    Attributes:
        prompts (list of lists, `N x turns`): what each actor was asked, as it was asked.
        responses (list of lists of `str`, `N x turns`): what each actor answered.
    """

    prompts: list[list[Prompt]]
    responses: list[list[str]] = field(default_factory=list)

    @classmethod
    def empty(cls, num_agents: int) -> "History":
        return cls([[] for _ in range(num_agents)], [[] for _ in range(num_agents)])

    def then(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> "History":
        """This history and one more turn, in new lists."""
        return History(
            [[*past, new] for past, new in zip(self.prompts, prompts, strict=True)],
            [[*past, new] for past, new in zip(self.responses, responses, strict=True)],
        )


class Transition:
    """
    The environment between two turns.

    Args:
        function (`Callable`):
            Called for each joint response that goes on, as `f(prompt=, agent_completions=, num_agents=)`, where
            `prompt` is the dataset's in every turn (`None` without such a column); also with
            `prompt_history_per_agent=` and `response_history_per_agent=` (lists over the turns for each actor, the
            latest turn included; prompts as the actor got them) if it takes them, and with `batch_item=` (the dataset
            row) and `turn=` (the number of the turn that just ended, from 1) if it names them. It returns the next
            prompt of each actor. It may be async.
        names (list of `str`):
            Names of the actors.

    Raises:
        TypeError: it is not callable.
        ValueError: it does not take what it is called with.
    """

    def __init__(self, function: Callable[..., Sequence[Prompt]], names: Sequence[str]):
        if not callable(function):
            raise TypeError(f"`external_transition` must be a callable, got {type(function).__name__}.")
        self.function = function
        self.name = get_callable_name(function)
        self.names = list(names)
        self._takes = accepted_keywords(
            function,
            ("prompt_history_per_agent", "response_history_per_agent"),
            explicit=("batch_item", "turn"),
        )
        self._check_signature()

    def _check_signature(self) -> None:
        try:
            signature = inspect.signature(self.function)
        except ValueError:  # some built-ins have none
            return
        try:
            signature.bind(**dict.fromkeys({"prompt", "agent_completions", "num_agents", *self._takes}))
        except TypeError as error:
            raise ValueError(
                f"The external transition '{self.name}{signature}' cannot be called with `prompt=`, "
                f"`agent_completions=` and `num_agents=`: {error}. Give it these parameters, and `**history` for the "
                f"earlier turns."
            ) from None

    def __call__(self, rows: Sequence[dict[str, Any]], histories: Sequence[History], turn: int) -> list[list[Prompt]]:
        """
        Next prompts of every branch.

        Args:
            rows (list of `dict`, length B):
                The dataset row of each branch.
            histories (list of [`History`], length B):
                What was said in each branch, the turn that just ended included.
            turn (`int`):
                Number of the turn that just ended, from 1.

        Returns:
            list of lists, `B x N`.

        Raises:
            ValueError: the function did not return one prompt for each actor. What it raises itself is not touched.
        """
        outputs = [self._call(row, history, turn) for row, history in zip(rows, histories, strict=True)]
        awaited = iter(await_all([output for output in outputs if inspect.isawaitable(output)]))
        outputs = [next(awaited) if inspect.isawaitable(output) else output for output in outputs]
        return [self._checked(output) for output in outputs]

    def _call(self, row: dict[str, Any], history: History, turn: int) -> Any:
        # Branches share what they came from, and a function may build the next prompt in place: it gets copies
        offered = {
            "prompt_history_per_agent": history.prompts,
            "response_history_per_agent": history.responses,
            "batch_item": row,
            "turn": turn,
        }
        return self.function(
            prompt=copy.deepcopy(row.get("prompt")),
            agent_completions=[past[-1] for past in history.responses],
            num_agents=len(self.names),
            **{name: copy.deepcopy(value) for name, value in offered.items() if name in self._takes},
        )

    def _checked(self, output: Any) -> list[Prompt]:
        if not isinstance(output, (list, tuple)) or len(output) != len(self.names):
            got = f"{len(output)} entries" if isinstance(output, (list, tuple)) else type(output).__name__
            raise ValueError(
                f"The external transition '{self.name}' returned {got} ({str(output)[:80]!r}), expected a list of "
                f"{len(self.names)} prompts, one for each actor."
            )
        return [
            copy.deepcopy(check_prompt(prompt, f"The external transition '{self.name}', for {name}"))
            for name, prompt in zip(self.names, output, strict=True)
        ]
