# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""An actor that answers through an OpenAI-compatible endpoint."""

import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

from .formatters import Prompt


SHOWN_CHARACTERS = 500  # of what a server answered, in an error

# What the actor sends itself: in `extra_body` it would win without a word
RESERVED = ("max_tokens", "messages", "model", "n", "stream", "temperature", "top_p")

REFUSED = (
    "Where the server takes no `n`, set max_n=1; where the model takes no `max_tokens`, put `max_completion_tokens` "
    "into `extra_body`; where it takes one temperature alone, set temperature=1.0 and top_p=1.0."
)
NO_CHAT = "Check `base_url`, which mostly ends in /v1, and that the server offers chat completions."
STATUS_ADVICE = {
    400: REFUSED,
    401: "Check the key in the environment variable {api_key_env}.",
    403: "Check what the key in the environment variable {api_key_env} may use.",
    404: "Check `model`, and `base_url`, which mostly ends in /v1.",
    422: REFUSED,
    429: "Lower `max_concurrency`, raise `max_retries`, or check the account's limits.",
}


class APIActor:
    """
    Answers prompts by chat completions of an endpoint: OpenAI's, or that of a server such as vLLM or llama.cpp. It is
    an [`~trl_multiagent.rollouts.interaction.Actor`] that learns nothing.

    The length limit is sent as `max_tokens`, which vLLM, llama.cpp and Ollama know; older versions overlook
    `max_completion_tokens` and answer without a limit. For a model that refuses `max_tokens` put
    `max_completion_tokens` into `extra_body`; then `max_tokens` is not sent.

    Args:
        model (`str`):
            The model to ask for.
        base_url (`str`, *optional*):
            The endpoint, mostly with its `/v1`. Default: the client's own, which is the environment variable
            `OPENAI_BASE_URL` or else OpenAI.
        max_tokens (`int`):
            Most tokens of an answer.
        temperature (`float`, *optional*, defaults to `1.0`):
            Sampling temperature. At 0 answers are taken to be the same each time: equal neighbours are asked once.
        top_p (`float`, *optional*, defaults to `1.0`):
            Probability mass that is sampled from.
        api_key_env (`str`, *optional*, defaults to `"OPENAI_API_KEY"`):
            Environment variable that holds the key, read once, here. The key is shown nowhere.
        timeout (`float`, *optional*, defaults to `120.0`):
            Seconds to wait for the server, in each try.
        max_retries (`int`, *optional*, defaults to `3`):
            How often the client tries again after a connection error, a time-out, or the status 408, 409, 429 or 5xx.
        max_n (`int`, *optional*):
            Most answers of one request. Set 1 for a server that takes no `n`, so that it is asked side by side.
        extra_body (`dict`, *optional*):
            More fields of each request's body, for instance `{"top_k": 20}` for vLLM.
        headers (`dict`, *optional*):
            More headers of each request.
        name (`str`, *optional*, defaults to `"the API comparator"`):
            What errors call this actor.
        max_concurrency (`int`, *optional*, defaults to `8`):
            Most requests in flight at once, in each process.

    Raises:
        ValueError: an argument has a wrong value, or there is no usable key.
        ImportError: the client library is not installed.
    """

    def __init__(
        self,
        model: str,
        base_url: str | None = None,
        *,
        max_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        api_key_env: str = "OPENAI_API_KEY",
        timeout: float = 120.0,
        max_retries: int = 3,
        max_n: int | None = None,
        extra_body: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
        name: str = "the API comparator",
        max_concurrency: int = 8,
    ):
        for argument, value, fits, expected in (
            ("model", model, bool(model), "the name of a model on the server"),
            ("max_tokens", max_tokens, max_tokens >= 1, "at least 1"),
            ("temperature", temperature, temperature >= 0, "at least 0"),
            ("top_p", top_p, 0 < top_p <= 1, "above 0 and at most 1"),
            ("timeout", timeout, timeout > 0, "seconds above 0"),
            ("max_retries", max_retries, max_retries >= 0, "at least 0"),
            ("max_n", max_n, max_n is None or max_n >= 1, "None or at least 1"),
            ("max_concurrency", max_concurrency, max_concurrency >= 1, "at least 1"),
        ):
            if not fits:
                raise ValueError(f"{argument}={value!r} of {name}, expected {expected}.")
        self.model = model
        self.max_tokens = max_tokens
        self.temperature = temperature
        self.top_p = top_p
        self.api_key_env = api_key_env
        self.max_n = max_n
        self.extra_body = _check_body(extra_body or {}, name)
        self.name = name
        self.max_concurrency = max_concurrency
        self._client = _client_library().OpenAI(
            api_key=_read_key(api_key_env, name),
            base_url=base_url,
            timeout=timeout,
            max_retries=max_retries,
            default_headers=headers,
        )
        url = self._client.base_url
        if url.scheme not in ("http", "https") or not url.host or url.userinfo:
            raise ValueError(
                f"`base_url` of {name} is not 'http://host/path' or 'https://host/path' without a user name and a "
                f"password. Put credentials into the environment variable {api_key_env} or into `headers`."
            )
        self.base_url = str(url)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(model={self.model!r}, base_url={self.base_url!r}, name={self.name!r})"

    def sample(self, prompts: list[Prompt], num_kept: int | None = None, greedy: bool = False) -> list[str]:
        """
        Ask for one answer to each prompt. Equal neighbours are asked in one request, or in parts of `max_n`.

        Args:
            prompts (list of `str` or of message lists, length B):
                Prompts, one for each answer wanted. A text is sent as one message of the user.
            num_kept (`int`, *optional*):
                How many of them count; the others are not asked.
            greedy (`bool`, *optional*, defaults to `False`):
                Whether to ask with temperature 0.

        Returns:
            list of `str`: the answers to the prompts that count, in their order. An answer without text is "".

        Raises:
            RuntimeError: the server cannot be reached, refuses, or answers something else than chat completions.
        """
        temperature = 0.0 if greedy else self.temperature
        runs = [(prompt, len(list(same))) for prompt, same in itertools.groupby(prompts[:num_kept])]
        if temperature == 0:
            # All answers of a run would be the same, and vLLM refuses n > 1
            answers = self._ask_all([(prompt, 1) for prompt, _ in runs], temperature)
            return [text for (_, count), [text] in zip(runs, answers, strict=True) for _ in range(count)]
        requests = [(prompt, part) for prompt, count in runs for part in _parts(count, self.max_n)]
        return [text for texts in self._ask_all(requests, temperature) for text in texts]

    def _ask_all(self, requests: list[tuple[Prompt, int]], temperature: float) -> list[list[str]]:
        """For each prompt as many answers as it wants. The first error cancels what is not yet in flight."""
        with ThreadPoolExecutor(max_workers=self.max_concurrency) as pool:
            return list(pool.map(lambda request: self._ask(*request, temperature), requests))

    def _ask(self, prompt: Prompt, count: int, temperature: float) -> list[str]:
        """`count` answers to one prompt. A server that gives fewer is asked again, at most `count` times in all."""
        texts: list[str] = []
        while len(texts) < count:
            missing = count - len(texts)
            answers = self._texts(self._complete(prompt, missing, temperature))
            if not answers:
                raise self._error(
                    f"a reply has no choices, {len(texts)} of {count} answers came",
                    "Look into the server's log; set max_n=1 where it does not take `n`.",
                )
            texts += answers[:missing]  # a server may give more than it was asked for
        return texts

    def _complete(self, prompt: Prompt, count: int, temperature: float) -> Any:
        """One request; the client's errors, which come after its retries, as a `RuntimeError`."""
        limit = {} if "max_completion_tokens" in self.extra_body else {"max_tokens": self.max_tokens}
        try:
            return self._client.chat.completions.create(
                model=self.model,
                messages=[{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt,
                n=count,
                temperature=temperature,
                top_p=self.top_p,
                extra_body=self.extra_body,
                **limit,
            )
        except (_client_library().OpenAIError, ValueError) as error:  # a `ValueError` is a body that is not JSON
            what = f"{error} ({error.__cause__})" if error.__cause__ else str(error)
            # A server may repeat the key that it refuses
            cause = None if self._client.api_key in what else error
            raise self._error(f"{type(error).__name__}: {what}", self._advice(error)) from cause

    def _texts(self, reply: Any) -> list[str]:
        """The texts of a reply, which the client hands over unchecked."""
        try:
            contents = [choice.message.content for choice in reply.choices]
            well_formed = all(content is None or isinstance(content, str) for content in contents)
        except (AttributeError, TypeError):
            well_formed = False
        if not well_formed:
            raise self._error(f"the reply is no chat completion with a list of choices, but {reply!r}", NO_CHAT)
        return [content or "" for content in contents]

    def _error(self, what: str, advice: str) -> RuntimeError:
        """What to raise, with no key in it."""
        what = what.replace(self._client.api_key, "***").rstrip(".")
        if len(what) > SHOWN_CHARACTERS:
            what = f"{what[:SHOWN_CHARACTERS]}..."
        where = f"{self.base_url} gave no answer of the model {self.model!r}"
        return RuntimeError(f"{self.name}: {where} ({what}). {advice}")

    def _advice(self, error: Exception) -> str:
        """What to do about an error of the client."""
        openai = _client_library()
        if isinstance(error, openai.APITimeoutError):
            return "Raise `timeout`, or lower `max_tokens`, `max_n` or `max_concurrency`."
        if isinstance(error, openai.APIConnectionError):
            return "Check `base_url`, and that the server runs and can be reached from here."
        if isinstance(error, openai.APIStatusError):
            default = "Look into the server's log; raise `max_retries` where it is only busy."
            return STATUS_ADVICE.get(error.status_code, default).format(api_key_env=self.api_key_env)
        return NO_CHAT


def _client_library() -> ModuleType:
    """The package `openai`, which nothing else here needs."""
    try:
        import openai
    except ImportError as error:
        raise ImportError(
            'An API comparator needs the client library `openai`: pip install "trl_multiagent[api]".'
        ) from error
    return openai


def _read_key(variable: str, name: str) -> str:
    """The key of an environment variable, or a `ValueError` that shows nothing of it."""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ValueError(
            f"The environment variable {variable} is not set or empty. It holds the key of {name}; for a server that "
            f"asks for none, set it to any word, such as EMPTY."
        )
    if not (key.isascii() and key.isprintable()):
        raise ValueError(
            f"The environment variable {variable} with the key of {name} has characters that a header cannot have, "
            f"expected printable ASCII in one line. Set it again, to the key alone."
        )
    return key


def _check_body(extra_body: dict[str, Any], name: str) -> dict[str, Any]:
    """A copy of `extra_body`, or a `ValueError` where it has what the actor sends itself."""
    reserved = sorted(set(RESERVED) & set(extra_body))
    if reserved:
        raise ValueError(
            f"`extra_body` of {name} has {reserved}, expected only what the actor does not send itself. Leave them "
            f"out, and use the arguments of the same name where there are such."
        )
    return dict(extra_body)


def _parts(count: int, limit: int | None) -> list[int]:
    """`count` as parts of at most `limit`: 5 by 2 is 2, 2, 1."""
    limit = limit or count
    return [min(limit, count - start) for start in range(0, count, limit)]
