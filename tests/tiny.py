# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Tiny models, tokenizers and data, built in code: no hub, no network."""

import hashlib

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    set_seed,
)


CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} : {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)


def tok(size: int = 32, pad: str | None = "<pad>", reverse: bool = False, chat_template: str | None = None):
    """
    A word-level tokenizer: `<unk>`=0 `<pad>`=1 `<eos>`=2, then w0, w1, ... up to `size` tokens.

    With `reverse` the words have their ids in the opposite order, so that the same text gets other ids.
    """
    words = [f"w{i}" for i in range(size - 3)]
    vocab = {word: i for i, word in enumerate(["<unk>", "<pad>", "<eos>", *(reversed(words) if reverse else words)])}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        unk_token="<unk>",
        eos_token="<eos>",
        pad_token=pad,
        padding_side="left",
        chat_template=chat_template,
    )


def lm(seed: int = 0, vocab: int = 32, hidden: int = 16, tie: bool = False, **kwargs) -> Qwen2ForCausalLM:
    set_seed(seed)
    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.5,
        tie_word_embeddings=tie,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=1,
        **kwargs,
    )
    return Qwen2ForCausalLM(config)


def llama(seed: int = 0, vocab: int = 32, hidden: int = 24) -> LlamaForCausalLM:
    set_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=1,
    )
    return LlamaForCausalLM(config)


def gpt2(seed: int = 0, vocab: int = 32, hidden: int = 16, dropout: float = 0.0) -> GPT2LMHeadModel:
    """Learned positions and tied embeddings."""
    set_seed(seed)
    config = GPT2Config(
        vocab_size=vocab,
        n_embd=hidden,
        n_layer=1,
        n_head=2,
        n_positions=128,
        initializer_range=0.5,
        resid_pdrop=dropout,
        attn_pdrop=dropout,
        embd_pdrop=dropout,
        bos_token_id=2,
        eos_token_id=2,
        pad_token_id=1,
    )
    return GPT2LMHeadModel(config)


def dataset(rows: int = 8) -> Dataset:
    return Dataset.from_dict(
        {"prompt": [f"w{i} w{i + 1} w{(3 * i) % 20}" for i in range(rows)], "gold": [f"w{i}" for i in range(rows)]}
    )


def parameters(module: torch.nn.Module) -> torch.Tensor:
    """All parameters as one flat vector."""
    return torch.cat([p.detach().float().reshape(-1) for p in module.parameters()])


def weights_hash(module: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in module.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def word_reward(*completions, batch_items=None):
    """A reward that varies between joint samples: word counts and positions of the texts, the same for any order."""
    return [
        float(sum(int(word[1:]) % 7 if word.startswith("w") else 0 for text in joint for word in text.split()))
        + 0.1 * sum(len(text) for text in joint)
        for joint in zip(*completions, strict=True)
    ]
