# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""What users' objects offer to be saved in checkpoints, and what a saved state may hold."""

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch


if TYPE_CHECKING:
    import pandas as pd


@runtime_checkable
class Stateful(Protocol):
    """A dataset, callback or reward function with a state that a resumed run goes on with."""

    def state_dict(self) -> Any:
        """The state: tensors, numbers, texts, and lists, tuples and dicts of them."""

    def load_state_dict(self, state: Any) -> None:
        """Go on from a state that `state_dict` returned."""


@runtime_checkable
class RunTracker(Protocol):
    """A callback that logs to a run which is kept elsewhere, and which a resumed training goes on with."""

    tracker: str  # its name in a checkpoint's metadata

    def identity(self) -> dict[str, Any] | None:
        """What finds the run again, as JSON; `None` without one. Asked on the main process."""

    def continue_run(self, identity: dict[str, Any]) -> None:
        """Log to the run of a checkpoint; called before training begins."""

    def on_preemption(self) -> None:
        """The training is ended by SIGTERM; called on every process, after a checkpoint was saved."""


@runtime_checkable
class CompletionsLogger(Protocol):
    """A callback that shows tables of what the actors said."""

    def on_completions(self, args, state, control, table: "pd.DataFrame") -> None:
        """A table, see [`CompletionsLog`]; on the main process, right before `on_log` of the same step."""


def check_plain(name: str, value: Any, path: str = "state_dict()") -> None:
    """
    Check that a state can be loaded without running code.

    Raises:
        TypeError: it holds something else than tensors, numbers, texts, lists, tuples and dicts; it is named.
    """
    if isinstance(value, torch.Tensor) or type(value) in (type(None), bool, int, float, complex, str, bytes):
        return
    if type(value) in (list, tuple):
        for index, entry in enumerate(value):
            check_plain(name, entry, f"{path}[{index}]")
    elif type(value) in (dict, OrderedDict):
        for key, entry in value.items():
            check_plain(name, key, f"a key of {path}")
            check_plain(name, entry, f"{path}[{key!r}]")
    else:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise TypeError(
            f"The state of {name} cannot be saved: {path} is a {kind}, expected tensors, numbers, texts, lists, "
            "tuples and dicts, which are loaded without running code. Convert it in `state_dict()`."
        )
