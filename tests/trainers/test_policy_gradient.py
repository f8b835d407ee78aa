# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""
The actor-critic trainers follow the policy gradient: the actors' gradients, over all that they may say, weighted as
they say it, are those of the expected reward, whatever constant the critic says.

Each actor knows two words, and says the first with probability 3/4 or 1/2. A generation batch holds each joint
response as often as its probability says, so that means over the batch are expectations.
"""

import itertools
import math

import pytest
import torch
from known_values import WORD, heads
from tiny import dataset, lm, record_batches, stub_rollouts, team_args, tok
from transformers import TrainerCallback

from trl_multiagent import IACConfig, IACTrainer, MAACConfig, MAACTrainer


WORDS = (WORD + 4, WORD + 9)
PROBABILITIES = (0.75, 0.5)  # of the first word
TRAINERS = {
    "IAC, separate": (IACTrainer, IACConfig, {}),
    "IAC, separate, tokens": (IACTrainer, IACConfig, {"advantage_level": "token"}),
    "IAC, shared": (IACTrainer, IACConfig, {"use_separate_critic": False, "value_loss_coef": 0.0}),
    "IAC, shared, tokens": (
        IACTrainer,
        IACConfig,
        {"use_separate_critic": False, "value_loss_coef": 0.0, "advantage_level": "token"},
    ),
    "MAAC": (MAACTrainer, MAACConfig, {}),
    "MAAC, own rewards": (MAACTrainer, MAACConfig, {"individual_rewards": True}),
}


def bandit(probability):
    """An actor that says one of two words, with fixed chances, whatever it reads."""
    model = lm(0)
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(1.0)
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        weight = model.lm_head.weight  # the last state is 1 everywhere, in 16 coordinates
        weight.fill_(-1e3 / 16)
        weight[WORDS[0]] = math.log(probability) / 16
        weight[WORDS[1]] = math.log(1 - probability) / 16
    return model


class LogitGradients(TrainerCallback):
    """The gradient for each actor's two logits, right before the optimizer step."""

    def __init__(self):
        self.of_actors = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        # A logit is the sum of the row over the coordinates of the last state, each 1
        rows = [actor.lm_head.weight.grad for actor in model.agents]
        assert all(not row[[i for i in range(32) if i not in WORDS]].any() for row in rows)
        self.of_actors = [[row[word].mean().item() for word in WORDS] for row in rows]


def counts(length):
    """All joint responses of words by number, each as often as its probability says."""
    unit = 8**length
    for joint in itertools.product(itertools.product((0, 1), repeat=2), repeat=length):
        chance = math.prod(
            probability if number == 0 else 1 - probability
            for numbers in joint
            for probability, number in zip(PROBABILITIES, numbers, strict=True)
        )
        yield joint, round(chance * unit)


@pytest.fixture
def gradients(tmp_path, monkeypatch):
    """The gradients for the logits of both actors, and the rows of the batch."""

    def gradients(kind, reward_of, value, length, own, **options):
        trainer_class, config_class, more = TRAINERS[kind]
        rows = [joint for joint, count in counts(length) for _ in range(count)]
        assert len(rows) == 8**length
        said = [[[WORDS[numbers[agent]] for numbers in joint] for joint in rows] for agent in range(2)]

        def reward(first, second):
            values = [[reward_of(agent, joint) for joint in rows] for agent in range(2)]
            return values if own else values[0]

        critics = {"critic_model": lm(5)} if more.get("use_separate_critic", True) else {}
        recorder = LogitGradients()
        trainer = trainer_class(
            agents=[bandit(probability) for probability in PROBABILITIES],
            tokenizer=tok(),
            reward_func=reward,
            train_dataset=dataset(1),
            callbacks=[recorder],
            args=team_args(
                config_class,
                tmp_path,
                num_generations=len(rows),
                per_device_train_batch_size=len(rows),
                max_completion_length=length,
                advantage_normalization=False,
                max_grad_norm=0.0,
                influence_steps=0,
                **{**more, **options},
            ),
            **critics,
        )
        for head in heads(trainer):
            with torch.no_grad():
                head.net[0].weight.zero_()
                head.net[0].bias.fill_(value)
        stub_rollouts(monkeypatch, trainer, said)
        batches = record_batches(trainer)
        trainer.train()
        values = [v for name, part in batches[0].items() if name.endswith("/old_values") for v in part.flatten()]
        assert all(abs(read.item() - value) < 1e-6 for read in values)
        return recorder.of_actors

    return gradients


REWARDS = {(0, 0): 2.0, (0, 1): -1.0, (1, 0): 0.5, (1, 1): 3.0}
OWN = {(0, 0): 1.0, (0, 1): 4.0, (1, 0): -2.0, (1, 1): 0.0}


@pytest.mark.parametrize("value", [0.0, 1.5, -7.0])
@pytest.mark.parametrize("kind", TRAINERS)
def test_two_actors_with_two_words_each(kind, value, gradients):
    """
    With p the chance of the first word and r_k the mean reward of word k over what the other actor says, the gradient
    of the expected reward is p (1 - p) (r_0 - r_1) for the first logit, and minus that for the second.
    """
    own = kind == "MAAC, own rewards" or kind.startswith("IAC, separate")
    got = gradients(kind, lambda agent, joint: (OWN if own and agent else REWARDS)[joint[0]], value, 1, own)
    p, q = PROBABILITIES
    r = REWARDS
    first = p * (1 - p) * ((q * r[0, 0] + (1 - q) * r[0, 1]) - (q * r[1, 0] + (1 - q) * r[1, 1]))
    r = OWN if own else REWARDS
    second = q * (1 - q) * ((p * r[0, 0] + (1 - p) * r[1, 0]) - (p * r[0, 1] + (1 - p) * r[1, 1]))
    assert got[0] == pytest.approx([-first, first], abs=1e-5)  # of a loss
    assert got[1] == pytest.approx([-second, second], abs=1e-5)


@pytest.mark.parametrize("value", [0.0, -2.0])
@pytest.mark.parametrize("gae_lambda", [1.0, 0.5])
@pytest.mark.parametrize("kind", [kind for kind in TRAINERS if kind != "MAAC, own rewards"])
def test_two_words_one_after_the_other(kind, gae_lambda, value, gradients):
    """
    The loss is a mean over the tokens, so half of the gradient of the expected reward R. With values of tokens, the
    advantage of the first token is lambda (R - V), that of the second R - V.
    """

    def reward_of(agent, joint):
        (a, b), (c, d) = joint
        return 1.0 * a + 2.0 * b * c - 3.0 * d * (1 - a) + 0.5 * c

    got = gradients(kind, reward_of, value, 2, False, gae_lambda=gae_lambda)
    first_weight = gae_lambda if kind.endswith("tokens") else 1.0
    for agent in range(2):
        theta = torch.tensor([math.log(PROBABILITIES[agent]), math.log(1 - PROBABILITIES[agent])], requires_grad=True)
        other = torch.tensor([PROBABILITIES[1 - agent], 1 - PROBABILITIES[1 - agent]])
        own = theta.softmax(0)
        # The derivative of E[R] by the chances of the first word, and by those of the second
        objective = 0.0
        for joint, _ in counts(2):
            chances = [own[numbers[agent]] for numbers in joint]
            others = other[joint[0][1 - agent]] * other[joint[1][1 - agent]]
            by_first, by_second = chances[0] * chances[1].detach(), chances[0].detach() * chances[1]
            objective = objective + others * reward_of(agent, joint) * (first_weight * by_first + by_second)
        objective.backward()
        assert theta.grad.abs().max() > 0.01
        assert got[agent] == pytest.approx((-theta.grad / 2).tolist(), abs=1e-5)
