# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""
Padding is inert: what the losses of a batch see of a row is what the bare model says of the row alone, without
padding. Through the trainers' own code, with left-padded prompts and right-padded completions.
"""

import copy

import pytest
import torch
from datasets import Dataset
from tiny import gpt2, llama, lm, stub_rollouts, team_args, tok, word_reward
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    MptConfig,
    MptForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    set_seed,
)

from trl_multiagent import IACConfig, IACTrainer


TOKENS = {"vocab_size": 32, "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1}


def spread(model, seed=7):
    """Weights large enough that every token, and its position, is seen in every output."""
    set_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.4)
    return model


def opt(projected=16):
    sizes = {"hidden_size": 16, "word_embed_proj_dim": projected, "ffn_dim": 32, "num_hidden_layers": 2}
    return OPTForCausalLM(OPTConfig(**TOKENS, **sizes, num_attention_heads=2, max_position_embeddings=64, dropout=0.0))


BACKBONES = {
    "Qwen2, rotary": lambda: lm(0),
    "Llama, rotary": lambda: llama(1),
    "GPT-2, learned": lambda: gpt2(2),
    "OPT, learned": opt,
    "OPT, projected": lambda: opt(projected=8),
    "Bloom, ALiBi": lambda: BloomForCausalLM(BloomConfig(**TOKENS, hidden_size=16, n_layer=2, n_head=2)),
    "MPT, ALiBi": lambda: MptForCausalLM(MptConfig(**TOKENS, d_model=16, n_layers=2, n_heads=2, max_seq_len=64)),
}
PROMPTS = ["w1", "w2 w3 w4 w5 w6 w7 w8", "w9 w10", "w11 w12 w13 w4"]
# Of several lengths, one of them without an end; the shortest prompt does not have the shortest answer
ANSWERS = [[9, 5, 11, 2], [7, 2], [2], [20, 21, 22, 23, 24, 25]]


class Seen:
    """What the losses of a trainer's first step see: each row's text, log-probabilities and values."""

    def __init__(self, trainer, monkeypatch):
        self.passes, self.values, self.old_values = [], None, None
        agent, value_loss = trainer.agent_trainers[0], trainer._value_loss
        logps_of = agent._get_per_token_logps_and_entropies

        def logps(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
            result = logps_of(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
            self.passes.append((input_ids, attention_mask, logits_to_keep, result[0].detach()))
            return result

        def loss(team, valuation, inputs, values, layout):
            self.values, self.old_values = values.detach(), inputs["old_values"]
            return value_loss(team, valuation, inputs, values, layout)

        monkeypatch.setattr(agent, "_get_per_token_logps_and_entropies", logps)
        monkeypatch.setattr(trainer, "_value_loss", loss)

    def rows(self):
        """For each row its text without padding, the number of tokens of its completion, and its numbers."""
        ((ids, mask, keep, logps),) = self.passes
        assert (mask == 0).any(dim=1).sum() >= 3  # there is padding
        assert mask[:, :-keep].sum(dim=1).unique().numel() > 2 and mask[:, -keep:].sum(dim=1).unique().numel() > 2
        for row in range(len(ids)):
            length = int(mask[row, -keep:].sum())
            yield ids[row][mask[row].bool()], length, logps[row, :length], self.values[row], self.old_values[row]


@pytest.fixture
def seen(tmp_path, monkeypatch):
    """Rows that the first step's losses saw, with copies of the actor and the critic as they were before it."""

    def seen(name, **options):
        actor = spread(BACKBONES[name]())
        critic = spread(BACKBONES[name](), seed=8) if options["use_separate_critic"] else None
        bare = copy.deepcopy(actor).eval(), copy.deepcopy(critic or actor).eval()
        trainer = IACTrainer(
            agents=[actor],
            tokenizer=tok(),
            reward_func=word_reward,
            train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
            args=team_args(IACConfig, tmp_path, num_generations=1, **options),
            critic_model=critic,
        )
        head = (trainer.critics or trainer.agents)[0].value_head.net[0].weight
        torch.nn.init.normal_(head)
        head = head[0].tolist()
        answers = {len(prompt.split()): answer for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)}
        stub_rollouts(monkeypatch, trainer, [lambda prompts: [answers[len(ids)] for ids in prompts]])
        first_step = Seen(trainer, monkeypatch)
        trainer.train()
        return first_step.rows(), *bare, head

    return seen


@pytest.mark.parametrize("level", ["turn", "token"])
@pytest.mark.parametrize("separate", [False, True], ids=["own head", "critic"])
@pytest.mark.parametrize("name", BACKBONES)
def test_what_the_losses_see_of_a_row_is_what_the_model_says_of_it_alone(seen, name, separate, level):
    rows, actor, backbone, head = seen(name, use_separate_critic=separate, advantage_level=level)
    number, spreads = 0, []
    for text, length, logps, values, old_values in rows:
        with torch.no_grad():
            logits = actor(text[None]).logits[0]
            states = backbone(text[None], output_hidden_states=True).hidden_states[-1][0]
        start = len(text) - length
        expected = [torch.log_softmax(logits[at - 1], dim=-1)[text[at]].item() for at in range(start, len(text))]
        assert logps.tolist() == pytest.approx(expected, abs=1e-5)
        places = range(start - 1, len(text) - 1) if level == "token" else [start - 1]
        expected = [sum(w * x for w, x in zip(head, states[at].tolist(), strict=True)) for at in places]
        for result in (values, old_values):
            result = result[:length] if level == "token" else result[None]
            assert result.tolist() == pytest.approx(expected, abs=1e-5)
        number, spreads = number + 1, spreads + expected
    assert number == len(PROMPTS) and max(spreads) - min(spreads) > 0.5
