# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""From dataset rows to prompts."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

from .._compat import is_conversational
from ..signatures import accepted_keywords


Prompt = str | list[dict[str, Any]]
# A formatter maps a dataset row to a prompt. It may also take `earlier_completions=` (in sequential turns, the texts
# of the actors before it) and `external_prompts=` (after the first turn, what `external_transition` gave).
Formatter = Callable[..., Prompt]

ORIGINAL_PROMPT = "_original_prompt"


def prompt_column(row: dict[str, Any]) -> Prompt:
    """The default formatter: every actor gets the row's `prompt`."""
    return row["prompt"]


def prompt_text(prompt: Prompt) -> str:
    """A prompt as plain text: messages become lines `role: content`, without a template."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def of_one_kind(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts as they are if all are texts or all are messages, else all as texts: a table holds one kind."""
    kinds = {isinstance(prompt, str) for prompt in prompts}
    return list(prompts) if len(kinds) == 1 else [prompt_text(prompt) for prompt in prompts]


def check_prompt(prompt: Any, source: str) -> Prompt:
    """`prompt` itself, if it is a text or a list of messages; else a `ValueError` that names its source."""
    is_messages = isinstance(prompt, list) and prompt and is_conversational({"prompt": prompt})
    is_messages = is_messages and all(isinstance(message, dict) and "content" in message for message in prompt)
    if not isinstance(prompt, str) and not is_messages:
        raise ValueError(
            f"{source}: the prompt is a {type(prompt).__name__} ({str(prompt)[:80]!r}), expected a text or a list of "
            f"messages with 'role' and 'content'."
        )
    return prompt


class ActorFormatter:
    """
    One actor's formatter, called with what it takes, its prompts checked.

    Args:
        name (`str`):
            Name of the actor, for errors.
        formatter (`Callable`, *optional*):
            Dataset row to prompt. Default: the column `prompt`.
    """

    def __init__(self, name: str, formatter: Formatter | None = None):
        self.name = name
        self.formatter = prompt_column if formatter is None else formatter
        takes = accepted_keywords(self.formatter, ("external_prompts",), explicit=("earlier_completions",))
        self.takes_external = "external_prompts" in takes
        self.takes_earlier = "earlier_completions" in takes

    def first_prompt(self, row: dict[str, Any], earlier: Sequence[str] | None = None) -> Prompt:
        """
        The prompt of the first turn.

        Args:
            row (`dict`):
                The dataset row.
            earlier (list of `str`, *optional*):
                In a sequential turn, what the actors before this one said.
        """
        return check_prompt(self.formatter(_own(row), **self._earlier(earlier)), self.name)

    def next_prompt(self, row: dict[str, Any], external: Prompt, earlier: Sequence[str] | None = None) -> Prompt:
        """
        The prompt of a later turn: the formatter sees the row with `prompt` replaced by what the environment said; the
        dataset's own prompt is then `_original_prompt`.
        """
        replaced = _own({**row, ORIGINAL_PROMPT: row.get("prompt"), "prompt": external})
        extra = {"external_prompts": copy.deepcopy(external)} if self.takes_external else {}
        return check_prompt(self.formatter(replaced, **extra, **self._earlier(earlier)), self.name)

    def _earlier(self, texts: Sequence[str] | None) -> dict[str, list[str]]:
        return {"earlier_completions": list(texts)} if self.takes_earlier and texts is not None else {}


def _own(row: dict[str, Any]) -> dict[str, Any]:
    """A row that a formatter may change, the messages of its prompts too."""
    return {
        name: copy.deepcopy(value) if name in ("prompt", ORIGINAL_PROMPT) else value for name, value in row.items()
    }


def resolve_formatters(
    formatters: Formatter | Sequence[Formatter] | None, names: Sequence[str]
) -> list[ActorFormatter]:
    """
    One formatter for each actor, from one for all, a list in actor order, or none (the column `prompt`).

    Raises:
        ValueError: the list has the wrong length.
        TypeError: an entry is not callable.
    """
    if formatters is None or callable(formatters):
        return [ActorFormatter(name, formatters) for name in names]
    formatters = list(formatters)
    if len(formatters) != len(names):
        raise ValueError(
            f"`formatters` has {len(formatters)} entries, expected {len(names)}, one for each actor ({names})."
        )
    for index, formatter in enumerate(formatters):
        if not callable(formatter):
            raise TypeError(f"formatters[{index}] must map a dataset row to a prompt, got {type(formatter).__name__}.")
    return [ActorFormatter(name, formatter) for name, formatter in zip(names, formatters, strict=True)]


def check_formatters(
    row: dict[str, Any], formatters: Sequence[ActorFormatter], tokenizers: Sequence, sequential: bool = False
) -> None:
    """
    Try every actor's formatter and chat template on one row, so that a misfit is found before training. In sequential
    turns the actors before are taken to have said nothing, which an actor may do.

    Raises:
        ValueError: the row has no `prompt`, a formatter fails, a prompt is neither text nor messages, an actor that
            gets messages has no chat template, or a formatter wants to hear others in simultaneous turns.
    """
    for index, (formatter, tokenizer) in enumerate(zip(formatters, tokenizers, strict=True)):
        if formatter.formatter is prompt_column and "prompt" not in row:
            raise ValueError(
                f"{formatter.name} gets the column 'prompt', but the dataset has only the columns {sorted(row)}. "
                f"Rename the column, or pass `formatters=`, which map a row to each actor's prompt."
            )
        if formatter.takes_earlier and not sequential:
            raise ValueError(
                f"The formatter of {formatter.name} takes `earlier_completions`, but turn_order='simultaneous': no "
                f"actor hears another. Set turn_order='sequential'."
            )
        earlier = [""] * index if sequential else None
        try:
            prompt = formatter.first_prompt(row, earlier)
        except Exception as error:
            tried = f", with earlier_completions={earlier}, since an actor may say nothing" if sequential else ""
            raise ValueError(
                f"The formatter of {formatter.name} failed on the dataset's first row{tried} "
                f"({type(error).__name__}: {error})."
            ) from error
        check_chat_template(formatter.name, prompt, tokenizer)


def check_chat_template(name: str, prompt: Prompt, tokenizer: Any) -> None:
    """Raise a `ValueError` where an actor is asked messages that its tokenizer cannot render."""
    if not isinstance(prompt, str) and not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"{name} gets a conversational prompt (a list of messages), but its tokenizer has no chat template. Set "
            f"`tokenizer.chat_template`, use an instruction-tuned model, or give text as prompt."
        )


def check_one_kind(name: str, prompts: Sequence[Prompt]) -> None:
    """Raise a `ValueError` where one actor is asked both texts and message lists at once."""
    if len({isinstance(prompt, str) for prompt in prompts}) > 1:
        raise ValueError(
            f"{name} got both texts and message lists as prompts in one batch. Its formatter, or "
            f"`external_transition`, must return the same kind for every row."
        )
