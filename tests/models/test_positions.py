# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Positions of padded rows, in architectures that count them in different ways."""

import pytest
import torch
from datasets import Dataset
from tiny import gpt2, lm, team_args, tok, word_reward
from transformers import AutoConfig, AutoModelForCausalLM, set_seed

from trl_multiagent import IACConfig, IACTrainer
from trl_multiagent.models.critic import ValueModel
from trl_multiagent.models.positions import count_positions_from_text, num_positions
from trl_multiagent.trainers.actor_critic_trainer import ActorCriticTrainer


def tiny(kind: str, **options):
    set_seed(0)
    config = AutoConfig.for_model(kind, vocab_size=32, pad_token_id=1, eos_token_id=2, bos_token_id=2, **options)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


BERT_LIKE = dict(
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=32,
    is_decoder=True,
    max_position_embeddings=40,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
ABSOLUTE = {
    "GPT-2, a learned table": gpt2,
    "OPT, a learned table with an offset": lambda: tiny(
        "opt",
        hidden_size=16,
        word_embed_proj_dim=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        ffn_dim=32,
        dropout=0.0,
    ),
    "RoBERTa, a table from behind the padding": lambda: tiny("roberta", **BERT_LIKE),
    "XGLM, a module of sines": lambda: tiny(
        "xglm", d_model=16, num_layers=1, attention_heads=2, ffn_dim=32, dropout=0.0, activation_dropout=0.0
    ),
    "CTRL, a buffer of sines": lambda: tiny(
        "ctrl", n_embd=16, n_layer=1, n_head=2, dff=32, n_positions=40, resid_pdrop=0.0, embd_pdrop=0.0
    ),
}
RELATIVE = {
    "Qwen2, rotary": lm,
    "Bloom, ALiBi": lambda: tiny("bloom", hidden_size=16, n_layer=1, n_head=2),
    "GPT-J, rotary by a buffer of sines": lambda: tiny(
        "gptj", n_embd=16, n_layer=1, n_head=2, rotary_dim=4, n_positions=40
    ),
}
architectures = pytest.mark.parametrize("model", {**ABSOLUTE, **RELATIVE}.values(), ids={**ABSOLUTE, **RELATIVE})


@architectures
def test_left_padding_changes_no_log_probability(model):
    model = model()
    count_positions_from_text(model)
    ids, pad = torch.tensor([[7, 9, 5, 11]]), 3
    padded = torch.cat([torch.ones(1, pad, dtype=torch.long), ids], dim=1)
    mask = torch.tensor([[0] * pad + [1] * 4])
    with torch.no_grad():
        alone = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        beside = model(input_ids=padded, attention_mask=mask).logits[:, pad:]
    torch.testing.assert_close(beside, alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("model", RELATIVE.values(), ids=RELATIVE)
def test_models_that_need_no_positions_are_left_alone(model):
    model = model()
    count_positions_from_text(model)
    assert not model._forward_pre_hooks


@architectures
def test_a_head_on_an_actor_reads_at_sampling_what_its_loss_reads(model, tmp_path, monkeypatch):
    """Before the first update the values in the loss are those of the sampling: same tokens, same positions."""
    distances, value_loss = [], ActorCriticTrainer._value_loss

    def measured(self, team, valuation, inputs, values, layout):
        distances.append(((values - inputs["old_values"]).abs() * inputs["valid"]).max().item())
        return value_loss(self, team, valuation, inputs, values, layout)

    monkeypatch.setattr(ActorCriticTrainer, "_value_loss", measured)
    prompts = ["w1", "w2 w3 w4 w5", "w6 w7", "w8 w9 w1 w2 w3 w4"]
    trainer = IACTrainer(
        agents=[model()],
        tokenizer=tok(),
        reward_func=word_reward,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        args=team_args(
            IACConfig,
            tmp_path,
            use_separate_critic=False,
            advantage_level="token",
            num_generations=1,
            gradient_checkpointing=False,
            shuffle_dataset=False,
        ),
    )
    torch.nn.init.normal_(trainer.agents[0].value_head.net[0].weight)  # values that tell positions apart
    trainer.train()
    assert len(distances) == 1 and distances[0] <= 1e-5


def test_the_longest_text_is_that_of_the_positions():
    roberta = tiny("roberta", **BERT_LIKE)
    assert num_positions(roberta) == 38  # 40 rows, of which those up to the padding's (1) stand for none
    critic = ValueModel(roberta)
    for length, fits in ((38, True), (39, False)):
        ids = torch.full((1, length), 5)
        if fits:
            critic(ids, torch.ones_like(ids))
        else:
            with pytest.raises((IndexError, RuntimeError), match="index"):
                critic(ids, torch.ones_like(ids))
    assert num_positions(lm()) == 128
    assert critic.max_length(16) == 16 and critic.max_length(None) == 38
    assert num_positions(tiny("xlnet", d_model=16, n_layer=1, n_head=2, d_inner=32)) is None  # its config says -1
    assert num_positions(tiny("bloom", hidden_size=16, n_layer=1, n_head=2)) is None
