# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""
The tokens of preference pairs.

P pairs; rows are the P winners, then the P losers. L prompt tokens, T completion tokens.
"""

from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from .formatters import Prompt
from .preferences import PreferencePair


def encode_pair(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, winner: str, loser: str
) -> tuple[list[int], list[int], list[int]]:
    """
    The tokens of one actor's prompt and completions, as TRL's `DPOTrainer` cuts them: prompt and completion are
    encoded together, and the completion begins where that leaves the prompt's own tokens. A completion in plain text
    ends with EOS; one that answers messages ends as the chat template ends it.

    Returns:
        Ids of the prompt, the winner and the loser.
    """
    if isinstance(prompt, str):
        eos = tokenizer.eos_token or ""
        texts = [prompt, *(prompt + text + ("" if text.endswith(eos) else eos) for text in (winner, loser))]
        start, *whole = (_without_second_bos(tokenizer, text, tokenizer(text)["input_ids"]) for text in texts)
    else:
        start = _rendered(tokenizer, prompt, add_generation_prompt=True)
        whole = [_rendered(tokenizer, [*prompt, {"role": "assistant", "content": text}]) for text in (winner, loser)]
    length = min(_common_length(start, ids) for ids in whole)
    return start[:length], whole[0][length:], whole[1][length:]


def encode_completion(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The tokens of an answer that another policy gave, as if the actor had sampled them: apart from the prompt."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids if tokenizer.eos_token_id is None else [*ids, tokenizer.eos_token_id]


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: list[dict], **kwargs) -> list[int]:
    return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **kwargs)["input_ids"]


def _without_second_bos(tokenizer: PreTrainedTokenizerBase, text: str, ids: list[int]) -> list[int]:
    """A text that brings a BOS of its own gets no other."""
    bos = tokenizer.bos_token
    twice = bos is not None and text.startswith(bos) and ids[:2] == [tokenizer.bos_token_id] * 2
    return ids[1:] if twice else ids


def _common_length(first: Sequence[int], second: Sequence[int]) -> int:
    length = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        length += 1
    return length


def collate_pairs(
    pairs: Sequence[PreferencePair], agent: int, pad_token_id: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """
    One actor's tokens of some pairs: prompts padded at the left, completions at the right.

    Returns:
        `dict`: `input_ids`, `attention_mask` of shape `(2P, L + T)`, `completion_mask` of shape `(2P, T)`, bool.
    """
    prompts = [pair.prompt_ids[agent] for pair in pairs] * 2
    completions = [pair.winner_ids[agent] for pair in pairs] + [pair.loser_ids[agent] for pair in pairs]
    before, after = max(map(len, prompts)), max(map(len, completions))
    rows, mask = [], []
    for prompt, completion in zip(prompts, completions, strict=True):
        left, right = before - len(prompt), after - len(completion)
        rows.append([pad_token_id] * left + prompt + completion + [pad_token_id] * right)
        mask.append([0] * left + [1] * (len(prompt) + len(completion)) + [0] * right)
    attention_mask = torch.tensor(mask, device=device)
    return {
        "input_ids": torch.tensor(rows, device=device),
        "attention_mask": attention_mask,
        "completion_mask": attention_mask[:, before:].bool(),
    }


def check_tokens(tokenizers: Sequence[PreTrainedTokenizerBase], pairs: Sequence[PreferencePair]) -> None:
    """Raise a `ValueError` if the tokens of the first pairs are not those of their texts: of another tokenizer."""
    for pair in pairs[:8]:
        if not pair.has_tokens:
            continue
        for agent, tokenizer in enumerate(tokenizers):
            for ids, text in (
                (pair.winner_ids[agent], pair.winner_completions[agent]),
                (pair.loser_ids[agent], pair.loser_completions[agent]),
            ):
                decoded = tokenizer.decode(ids, skip_special_tokens=True)
                if decoded.strip() != text.strip():
                    raise ValueError(
                        f"The tokens of task {pair.task} for actor {agent} read {decoded[:80]!r}, but its text is "
                        f"{text[:80]!r}: they are of another tokenizer. Remove the columns prompt_ids, winner_ids "
                        "and loser_ids, and the texts are encoded anew."
                    )
