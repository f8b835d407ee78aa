# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Tiny models, tokenizers and data, built in code: no hub, no network."""

import gc
import hashlib

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    TrainerCallback,
    set_seed,
)
from trl import GRPOTrainer


# A model this small has nothing to share out: a second thread only waits, by far most of the time on a busy machine.
torch.set_num_threads(1)

# `Trainer.train` begins with a garbage collection: half a second over all that the imports left, each time.
gc.freeze()

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} : {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)


def tok(
    size: int = 32,
    pad: str | None = "<pad>",
    reverse: bool = False,
    chat_template: str | None = None,
    bos: bool = False,
):
    """
    A word-level tokenizer: `<unk>`=0 `<pad>`=1 `<eos>`=2, then w0, w1, ... up to `size` tokens.

    With `reverse` the words have their ids in the opposite order, so that the same text gets other ids. With `bos` the
    last token is `<bos>`, which the tokenizer puts before every text.
    """
    words = [f"w{i}" for i in range(size - 3)]
    if bos:
        words = [*words[:-1], "<bos>"]
    vocab = {word: i for i, word in enumerate(["<unk>", "<pad>", "<eos>", *(reversed(words) if reverse else words)])}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos:
        inner.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", vocab["<bos>"])])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<bos>" if bos else None,
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


def even_lm(seed: int, vocab: int) -> Qwen2ForCausalLM:
    """A model that says all tokens about equally often, so that there is little to unlearn."""
    model = lm(seed, vocab)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.2)
    return model


def llama(seed: int = 0, vocab: int = 32, hidden: int = 24, **kwargs) -> LlamaForCausalLM:
    set_seed(seed)
    return LlamaForCausalLM(_llama_config(vocab, hidden, **kwargs))


def reward_model(seed: int = 0, vocab: int = 32, hidden: int = 16, **kwargs) -> LlamaForSequenceClassification:
    set_seed(seed)
    return LlamaForSequenceClassification(_llama_config(vocab, hidden, **{"num_labels": 1, **kwargs}))


def _llama_config(vocab: int, hidden: int, **kwargs) -> LlamaConfig:
    defaults = dict(
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
    return LlamaConfig(vocab_size=vocab, hidden_size=hidden, **{**defaults, **kwargs})


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
        bits = parameter.detach().cpu().reshape(-1).view(torch.uint8)  # NumPy has no bfloat16
        digest.update(bits.numpy().tobytes())
    return digest.hexdigest()


def word_reward(*completions, batch_items=None):
    """A reward that varies between joint samples: word counts and positions of the texts, the same for any order."""
    return [
        float(sum(int(word[1:]) % 7 if word.startswith("w") else 0 for text in joint for word in text.split()))
        + 0.1 * sum(len(text) for text in joint)
        for joint in zip(*completions, strict=True)
    ]


# Training one step at a time


def team_args(config_class, output_dir, **kwargs):
    """Arguments of a short, silent run on the CPU: one generation batch of 4 joint samples, two for each prompt."""
    defaults = dict(
        output_dir=str(output_dir),
        use_cpu=True,
        max_steps=1,
        num_generations=2,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        max_completion_length=6,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    return config_class(**{**defaults, **kwargs})


def preference_args(config_class, output_dir, **kwargs):
    """Arguments of a short, silent preference run on the CPU: four candidates, up to two pairs for each task."""
    defaults = dict(
        output_dir=str(output_dir),
        use_cpu=True,
        max_completion_length=6,
        learning_rate=1e-2,
        logging_steps=1,
        num_train_epochs=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        preference_num_candidates=4,
        preference_pairs_per_sample=2,
    )
    return config_class(**{**defaults, **kwargs})


def stub_rollouts(monkeypatch, trainer, rows_of_agents) -> None:
    """
    Let every actor of `trainer` answer fixed token ids: `rows_of_agents[i][j]` is what actor i answers in row j of a
    generation batch, from the start again where there are fewer rows. A callable gets the prompts' ids instead.
    """
    rows_of = {id(agent): rows for agent, rows in zip(trainer.agent_trainers, rows_of_agents, strict=True)}

    def generate(agent, prompt_ids, *args, **kwargs):
        rows = rows_of[id(agent)]
        if callable(rows):
            return [list(ids) for ids in rows(prompt_ids)], None
        return [list(rows[row % len(rows)]) for row in range(len(prompt_ids))], None

    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", generate)


def record_batches(trainer) -> list[dict]:
    """A list that will hold what each generation batch of `trainer` gives to the losses, before it is shuffled."""
    batches, scored = [], trainer._sample_and_score

    def sample_and_score(rows):
        batch = scored(rows)
        batches.append({k: v.detach().clone() if isinstance(v, torch.Tensor) else v for k, v in batch.items()})
        return batch

    trainer._sample_and_score = sample_and_score
    return batches


class RecordGradients(TrainerCallback):
    """Keeps every entity's gradient, as one flat vector, right before each optimizer step."""

    def __init__(self):
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.steps.append({name: gradient(module) for name, module in model.entities()})


def gradient(module: torch.nn.Module) -> torch.Tensor:
    """All gradients as one flat vector, zeros where there is none."""
    return torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).detach().float().reshape(-1) for p in module.parameters()]
    )


def logged(trainer, name: str) -> list:
    """What was logged under `name`, in order."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]
