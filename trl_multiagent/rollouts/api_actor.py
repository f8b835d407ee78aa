# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""An actor that answers through an OpenAI-compatible endpoint."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .formatters import Prompt
from .pairing import runs


class APIActor:
    """
    Answers prompts by chat completions of an endpoint: OpenAI's, or that of a server such as vLLM or llama.cpp. It is
    an [`~trl_multiagent.rollouts.interaction.Actor`] that learns nothing.

    Equal neighbouring prompts are one request for several choices; servers that give fewer are asked again.

    Args:
        model (`str`):
            The model to ask for.
        base_url (`str`, *optional*):
            The endpoint, with its `/v1`. Default: the client's own.
        api_key_env (`str`, *optional*, defaults to `"OPENAI_API_KEY"`):
            Environment variable that holds the key. The key is shown nowhere.
        max_tokens (`int`), temperature (`float`), top_p (`float`):
            How answers are sampled.
        timeout (`float`, *optional*, defaults to `120.0`):
            Seconds that a request may take.
        max_retries (`int`, *optional*, defaults to `3`):
            How often the client sends a request again that failed for a reason that may pass.
        max_n (`int`, *optional*):
            Most choices of one request.
        headers, extra_body (`dict`, *optional*):
            What requests have besides.
        max_concurrency (`int`, *optional*, defaults to `8`):
            Most requests at once.
        name (`str`, *optional*):
            Its name, for errors.

    Raises:
        ImportError: the client library is not installed.
        ValueError: the environment variable is not set.
    """

    def __init__(
        self,
        model: str,
        *,
        max_tokens: int,
        temperature: float,
        top_p: float,
        base_url: str | None = None,
        api_key_env: str = "OPENAI_API_KEY",
        timeout: float = 120.0,
        max_retries: int = 3,
        max_n: int | None = None,
        headers: dict[str, str] | None = None,
        extra_body: dict[str, Any] | None = None,
        max_concurrency: int = 8,
        name: str = "the API actor",
    ):
        try:
            import openai
        except ImportError as error:
            raise ImportError(
                'An API comparator needs the client library: pip install "trl_multiagent[api]".'
            ) from error
        if not os.environ.get(api_key_env):
            raise ValueError(
                f"The environment variable {api_key_env} is not set. It holds the endpoint's key; for a server that "
                "asks for none, set it to any word."
            )
        self._errors = openai.OpenAIError
        self._client = openai.OpenAI(
            api_key=os.environ[api_key_env],
            base_url=base_url,
            timeout=timeout,
            max_retries=max_retries,
            default_headers=headers,
        )
        self.model = model
        self.name = name
        self.max_n = max_n
        self.max_concurrency = max_concurrency
        # `max_tokens` is the word that all servers know
        self._sampling = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p}
        self._extra_body = extra_body

    def sample(self, prompts: list[Prompt], num_kept: int | None = None, greedy: bool = False) -> list[str]:
        """
        One answer to each of the first `num_kept` prompts.

        Raises:
            RuntimeError: the endpoint gave an error, after all retries, or no answer.
        """
        wanted = prompts if num_kept is None else prompts[:num_kept]
        requests: list[tuple[Prompt, int]] = []
        for same in _runs_of_equal(wanted):
            size = self.max_n or len(same)
            requests += [(same[0], len(same[start : start + size])) for start in range(0, len(same), size)]
        with ThreadPoolExecutor(self.max_concurrency) as pool:
            answers = list(pool.map(lambda request: self._ask(*request, greedy), requests))
        return [text for texts in answers for text in texts]

    def _ask(self, prompt: Prompt, count: int, greedy: bool) -> list[str]:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        sampling = {**self._sampling, "temperature": 0.0} if greedy else self._sampling
        texts: list[str] = []
        while len(texts) < count:
            try:
                answer = self._client.chat.completions.create(
                    model=self.model,
                    messages=messages,
                    n=count - len(texts),
                    extra_body=self._extra_body,
                    **sampling,
                )
                choices = [choice.message.content or "" for choice in answer.choices]
            except (self._errors, AttributeError, TypeError, ValueError) as error:
                raise RuntimeError(
                    f"{self.name}: {self._client.base_url} gave no answer of the model {self.model!r} "
                    f"({type(error).__name__}: {error}). Check the endpoint, the model's name and the key, or raise "
                    "`comparator_api_timeout` and `comparator_api_max_retries`."
                ) from error
            if not choices:
                raise RuntimeError(
                    f"{self.name}: {self._client.base_url} answered without a choice of the model {self.model!r}."
                )
            texts += choices
        return texts[:count]


def _runs_of_equal(prompts: Sequence[Prompt]) -> list[list[Prompt]]:
    return [[prompts[place] for place in run] for run in runs(prompts)]
