# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Multi-agent actor-critic: what the central critic reads, and credit by its values, by hand and by slow loops."""

import pytest
import torch
from datasets import Dataset
from known_values import SHAPES, WORD, Rewards, Talk, credit_of_turns, first_rows, next_words, table
from peft import LoraConfig
from tiny import (
    CHAT_TEMPLATE,
    dataset,
    gpt2,
    llama,
    lm,
    logged,
    parameters,
    record_batches,
    stub_rollouts,
    team_args,
    tok,
    word_reward,
)

from trl_multiagent import MAACConfig, MAACTrainer


@pytest.fixture
def build(tmp_path):
    """A team of two actors; options of the config by name, arguments of the trainer in `kwargs`."""

    def build(reward_func=word_reward, kwargs=None, trainer_class=MAACTrainer, **options):
        kwargs = {
            "agents": [lm(0), lm(1)],
            "tokenizer": tok(),
            "critic_model": lm(5),
            "train_dataset": dataset(4),
            **(kwargs or {}),
        }
        options = {"advantage_normalization": False, "influence_steps": 0, **options}
        return trainer_class(reward_func=reward_func, args=team_args(MAACConfig, tmp_path, **options), **kwargs)

    return build


class Readable:
    """A tokenizer that keeps the texts it is called with."""

    def __init__(self, tokenizer):
        self.tokenizer, self.texts = tokenizer, []

    def __call__(self, texts, **kwargs):
        self.texts.append(list(texts))
        return self.tokenizer(texts, **kwargs)


def run(monkeypatch, trainer, talks):
    """Train on what the actors are made to say; returns the first batch, and the texts that the critic read for it."""
    spy = trainer.critic_tokenizers[0] = Readable(trainer.critic_tokenizers[0])
    stub_rollouts(monkeypatch, trainer, talks)
    batches = record_batches(trainer)
    trainer.train()
    return batches[0], spy.texts


# What the critic reads


def hears(row, earlier_completions=()):
    return f"{row['prompt']} after {len(earlier_completions)}: {' '.join(earlier_completions)}"


def answers_back(prompt, agent_completions, num_agents):
    return [f"more, {agent_completions[1 - agent]}" for agent in range(num_agents)]


QUESTIONS = "[agent 0 is asked]\nw0 w1\n[agent 1 is asked]\nw0 w1"
SAID = [[WORD + 5], [WORD + 6]]  # of both actors in every turn: w5, w6

READS = {
    "history": ({}, [[QUESTIONS] * 2]),
    "history and response": (
        {"critic_type": "q"},
        [[f"{QUESTIONS}\n[agent 0 answers]\nw{n}\n[agent 1 answers]\nw{n}" for n in (5, 6)]],
    ),
    "whose reward": (
        {"individual_rewards": True},
        [[f"{QUESTIONS}\n[reward of agent 0]"] * 2, [f"{QUESTIONS}\n[reward of agent 1]"] * 2],
    ),
    "whose reward, with the response": (
        {"individual_rewards": True, "critic_type": "q"},
        [
            [
                f"{QUESTIONS}\n[agent 0 answers]\nw{n}\n[agent 1 answers]\nw{n}\n[reward of agent {agent}]"
                for n in (5, 6)
            ]
            for agent in range(2)
        ],
    ),
    "two turns": (
        {"num_turns": 2, "rollout_mode": "chain"},
        [
            [f"[turn 1 of 2]\n{QUESTIONS}"] * 2
            + [f"[turn 2 of 2]\n[agent 0 is asked]\nmore, w{n}\n[agent 1 is asked]\nmore, w{n}" for n in (5, 6)]
        ],
    ),
    "two turns, with the response": (
        {"num_turns": 2, "rollout_mode": "chain", "critic_type": "q"},
        [
            [f"[turn 1 of 2]\n{QUESTIONS}\n[agent 0 answers]\nw{n}\n[agent 1 answers]\nw{n}" for n in (5, 6)]
            + [
                f"[turn 2 of 2]\n[agent 0 is asked]\nmore, w{n}\n[agent 1 is asked]\nmore, w{n}\n"
                f"[agent 0 answers]\nw{n}\n[agent 1 answers]\nw{n}"
                for n in (5, 6)
            ]
        ],
    ),
    "one after the other": (
        {"turn_order": "sequential"},
        [["[agent 0 is asked]\nw0 w1"] * 2],
    ),
    "one after the other, with the response": (
        {"turn_order": "sequential", "critic_type": "q"},
        [
            [
                f"[agent 0 is asked]\nw0 w1\n[agent 1 is asked]\nw0 w1 after 1: w{n}\n"
                f"[agent 0 answers]\nw{n}\n[agent 1 answers]\nw{n}"
                for n in (5, 6)
            ]
        ],
    ),
    "one after the other, whose reward": (
        {"turn_order": "sequential", "individual_rewards": True},
        [
            ["[agent 0 is asked]\nw0 w1\n[reward of agent 0]"] * 2,
            [
                f"[agent 0 is asked]\nw0 w1\n[agent 1 is asked]\nw0 w1 after 1: w{n}\n[reward of agent 1]"
                for n in (5, 6)
            ],
        ],
    ),
}


@pytest.mark.parametrize(("options", "expected"), READS.values(), ids=READS)
def test_the_text_that_the_critic_reads(options, expected, build, monkeypatch):
    kwargs = {"train_dataset": Dataset.from_dict({"prompt": ["w0 w1"]})}
    if "num_turns" in options:
        kwargs["external_transition"] = answers_back
    if "turn_order" in options:
        kwargs["formatters"] = [lambda row: row["prompt"], hears]
    trainer = build(kwargs=kwargs, per_device_train_batch_size=2, **options)
    _, texts = run(monkeypatch, trainer, [SAID, SAID])
    assert texts == expected


def test_messages_are_read_as_lines_without_a_template(build, monkeypatch):
    messages = [{"role": "system", "content": "w1 w2"}, {"role": "user", "content": "w3"}]
    trainer = build(
        kwargs={
            "train_dataset": Dataset.from_dict({"prompt": [messages]}),
            "tokenizer": tok(chat_template=CHAT_TEMPLATE),
        },
        critic_type="q",
        per_device_train_batch_size=2,
    )
    _, (texts,) = run(monkeypatch, trainer, [SAID, SAID])
    asked = "".join(f"[agent {agent} is asked]\nsystem: w1 w2\nuser: w3\n" for agent in range(2))
    assert texts == [f"{asked}[agent 0 answers]\nw{n}\n[agent 1 answers]\nw{n}" for n in (5, 6)]


def test_the_last_of_three_hears_all_and_only_its_own_value_reads_what_it_is_asked(build, monkeypatch):
    trainer = build(
        lambda *texts: word_reward(*texts),
        {
            "agents": [lm(0), lm(1), lm(2)],
            "formatters": [lambda row: row["prompt"], hears, hears],
            "train_dataset": Dataset.from_dict({"prompt": ["w0"]}),
        },
        turn_order="sequential",
        individual_rewards=True,
        per_device_train_batch_size=2,
    )
    _, texts = run(monkeypatch, trainer, [[[WORD + n]] for n in (5, 6, 7)])
    first = "[agent 0 is asked]\nw0\n"
    second = "[agent 1 is asked]\nw0 after 1: w5\n"
    third = "[agent 2 is asked]\nw0 after 2: w5 w6\n"
    expected = [first, first + second, first + second + third]
    assert texts == [[text + f"[reward of agent {agent}]"] * 2 for agent, text in enumerate(expected)]


def test_an_overridden_text_is_read_and_may_hold_what_was_said_before(build, monkeypatch):
    class Own(MAACTrainer):
        def render_critic_input(self, turn, sample, agent=None):
            said = [" ".join(past) or "nothing" for past in turn.branches[sample].history.responses]
            return f"turn {turn.number}: {said}"

    trainer = build(
        kwargs={"external_transition": answers_back, "train_dataset": dataset(1)},
        trainer_class=Own,
        num_turns=2,
        per_device_train_batch_size=2,
    )
    _, texts = run(monkeypatch, trainer, [SAID, SAID])
    second = ["turn 2: ['w5', 'w5']"] * 2 + ["turn 2: ['w6', 'w6']"] * 2
    assert texts == [["turn 1: ['nothing', 'nothing']"] * 2 + second]


# Ids


def ids_of(text, words):
    """The token ids of a text in a word-level vocabulary; 0 for an unknown word."""
    return [words.get(word, 0) for word in text.split()]


def numbered(size, reverse=False):
    """The ids of the words of `tiny.tok`."""
    names = [f"w{i}" for i in range(size - WORD)]
    return {name: WORD + i for i, name in enumerate(reversed(names) if reverse else names)}


def unpadded(batch):
    rows = zip(batch["critic/input_ids"], batch["critic/attention_mask"], strict=True)
    return [ids[mask.bool()].tolist() for ids, mask in rows]


THREE = {
    "agents": lambda: [lm(0, vocab=32), llama(1, vocab=40)],
    "tokenizer": lambda: [tok(32), tok(40, reverse=True)],
    "critic_model": lambda: gpt2(5, vocab=48),
    "critic_tokenizer": lambda: tok(48, reverse=True),
}


@pytest.mark.parametrize("critic_type", ["v", "q"])
def test_actors_and_critic_with_three_tokenizers_train_together(critic_type, build):
    trainer = build(
        kwargs={name: make() for name, make in THREE.items()},
        critic_type=critic_type,
        critic_learning_rate=1e-2,
        advantage_normalization=True,
        max_steps=2,
    )
    before = {name: parameters(module) for name, module in trainer.model.entities()}
    trainer.train()
    for name, module in trainer.model.entities():
        after = parameters(module)
        assert torch.isfinite(after).all() and not torch.equal(after, before[name]), name
    assert [trainer.tokenizers[i].get_vocab()["w3"] for i in range(2)] == [6, 36]
    assert trainer.critic_tokenizers[0].get_vocab()["w3"] == 44


def test_equal_texts_have_equal_values_whichever_actor_wrote_them(build, monkeypatch):
    """The critic reads the answer of actor 0 in the first two rows, that of actor 1 in the others."""

    class One(MAACTrainer):
        def render_critic_input(self, turn, sample, agent=None):
            return turn.completions[sample // 2][sample]

    trainer = build(
        kwargs={**{name: make() for name, make in THREE.items()}, "train_dataset": dataset(1)},
        trainer_class=One,
        critic_type="q",
        num_generations=4,
    )
    with torch.no_grad():
        trainer.critics[0].value_head.net[0].weight.normal_(generator=torch.Generator().manual_seed(0))
    words = [numbered(32), numbered(40, reverse=True), numbered(48, reverse=True)]
    texts = ["w3 w4 w9", "w20 w3"]
    said = [[ids_of(text, words[agent]) for text in texts] for agent in range(2)]
    assert said[0] != said[1]
    batch, read = run(monkeypatch, trainer, said)
    assert read == [texts * 2]
    assert unpadded(batch) == [ids_of(text, words[2]) for text in texts * 2]
    values = batch["critic/old_values"].tolist()
    assert values[:2] == values[2:] and abs(values[0] - values[1]) > 0.1


def test_the_critic_gets_its_own_ids_for_what_an_actor_says(build, monkeypatch):
    """B17: the actors know 48 tokens, the critic 32; an answer with the id 40 is a word that the critic has not."""
    trainer = build(
        kwargs={
            "agents": [lm(0, vocab=48), lm(1, vocab=48)],
            "tokenizer": tok(48),
            "critic_tokenizer": tok(32),
        },
        critic_type="q",
        critic_learning_rate=1e-2,
    )
    before = parameters(trainer.critics[0])
    batch, (texts,) = run(monkeypatch, trainer, [[[40, 7], [5]], [[40], [6, 40]]])
    assert any("w37" in text for text in texts)
    assert unpadded(batch) == [ids_of(text, numbered(32)) for text in texts]
    assert batch["critic/input_ids"].max() < 32
    after = parameters(trainer.critics[0])
    assert torch.isfinite(after).all() and not torch.equal(after, before)


def test_a_longer_text_loses_its_beginning(build, monkeypatch):
    trainer = build(critic_type="q", critic_max_length=4)
    batch, (texts, _) = run(monkeypatch, trainer, [[[5, 6]], [[7, 8, 9]]])  # read again to count what is cut
    assert unpadded(batch) == [ids_of(text, numbered(32))[-4:] for text in texts]
    assert batch["critic/positions"].tolist() == [3] * 4


# Credit


def read_as_a_sum(trainer, values):
    """Let the critic's value be the sum of its tokens' numbers; it still has a gradient, which is 0."""
    critic = trainer.critics[0]
    numbers = torch.tensor(values)

    def forward(input_ids, attention_mask, positions=None):
        sums = (numbers[input_ids] * attention_mask).sum(dim=1)
        return sums + 0.0 * sum(p.sum() for p in critic.value_head.parameters())

    critic.forward = forward


@pytest.mark.parametrize("own", [False, True], ids=["team reward", "own rewards"])
@pytest.mark.parametrize("critic_type", ["v", "q"])
@pytest.mark.parametrize("shape", SHAPES)
def test_credit_of_turns_equals_a_slow_recursion(shape, critic_type, own, build, monkeypatch):
    turns, rollout_mode, threshold, generations = SHAPES[shape]
    rewards = Rewards(10, own)
    critic_tokenizer = tok()
    critic_tokenizer.add_tokens(["0]", "1]"])  # the ends of the line that says whose reward it is
    trainer = build(
        rewards,
        {
            "train_dataset": dataset(1),
            "critic_model": lm(5, vocab=34),
            "critic_tokenizer": critic_tokenizer,
            **({"external_transition": next_words} if turns > 1 else {}),
        },
        num_turns=turns,
        rollout_mode=rollout_mode,
        early_termination_threshold=threshold,
        critic_type=critic_type,
        individual_rewards=own,
        discount=0.9,
        gae_lambda=0.5,
        num_generations=generations,
        per_device_train_batch_size=generations,
    )
    numbers = [0.3 * value for value in table(3, 34)]
    numbers[0] = 0.0  # unknown words: what is not said by anyone
    read_as_a_sum(trainer, numbers)
    talks = [Talk(1), Talk(2)]
    batch, _ = run(monkeypatch, trainer, talks)
    assert len(rewards.turns) == turns
    read = [[*first, *second] for first, second in zip(talks[0].asked, talks[1].asked, strict=True)]
    if critic_type == "q":
        read = [[*row, *a, *b] for row, a, b in zip(read, talks[0].said, talks[1].said, strict=True)]
    for agent in range(2):
        name = f"critic_{agent}" if own else "critic"
        values = [sum(numbers[token] for token in row) + (numbers[32 + agent] if own else 0.0) for row in read]
        advantages, targets = credit_of_turns(shape, critic_type, rewards.turns, agent, values, discount=0.9, lam=0.5)
        count = len(targets)
        assert first_rows(batch, f"{name}/old_values", count) == pytest.approx(values, abs=1e-5)
        assert first_rows(batch, f"agent_{agent}/advantages", count) == pytest.approx(advantages, abs=1e-4)
        assert first_rows(batch, f"{name}/returns", count) == pytest.approx(targets, abs=1e-4)
        valid = batch[f"{name}/valid"]
        assert valid[:count].all() and not valid[count:].any()
        assert (len(valid) > count) == (shape == "chain that ends early")
        assert not batch[f"agent_{agent}/advantages"][count:].any()
    assert ("critic/returns" in batch) != own


def test_different_rewards_are_an_error_that_says_what_to_do(build):
    trainer = build(lambda first, second: [[1.0] * len(first), [2.0] * len(first)])
    with pytest.raises(ValueError, match="one value for each joint response, or set individual_rewards=True"):
        trainer.train()


def test_several_predictions_of_the_critic_count_as_one(build, monkeypatch):
    """With rewards 1, 2 and 3, 5 and the value 0, the errors' means are 2.5 and 17; the loss has their mean."""
    trainer = build(
        lambda first, second: [[1.0, 2.0], [3.0, 5.0]],
        {"train_dataset": dataset(1)},
        individual_rewards=True,
        value_loss_coef=0.25,
        per_device_train_batch_size=2,
        learning_rate=0.0,
    )
    read_as_a_sum(trainer, [0.0] * 32)
    batch, _ = run(monkeypatch, trainer, [[[5]], [[6]]])
    assert [batch[f"agent_{agent}/advantages"].tolist() for agent in range(2)] == [[1.0, 2.0], [3.0, 5.0]]
    assert logged(trainer, "agent_0/critic/loss") == [pytest.approx(2.5)]
    assert logged(trainer, "agent_1/critic/loss") == [pytest.approx(17.0)]
    of_actors = -1.5 - 4.0  # minus the mean advantage of one token each, at a ratio of 1
    assert logged(trainer, "loss") == [pytest.approx(of_actors + 0.25 * (2.5 + 17.0) / 2)]


@pytest.mark.parametrize("critic_type", ["v", "q"])
@pytest.mark.parametrize("rollout_mode", ["tree", "chain"])
def test_one_sample_for_each_prompt_over_several_turns(rollout_mode, critic_type, build):
    trainer = build(
        kwargs={"external_transition": next_words},
        num_turns=3,
        rollout_mode=rollout_mode,
        critic_type=critic_type,
        num_generations=1,
        critic_learning_rate=1e-2,
        max_steps=2,
        advantage_normalization=True,
    )
    before = {name: parameters(module) for name, module in trainer.model.entities()}
    batches = record_batches(trainer)
    trainer.train()
    assert len(batches[0]["agent_0/advantages"]) == 12  # four prompts, three turns
    assert batches[0]["agent_0/advantages"].unique().numel() > 6
    for name, module in trainer.model.entities():
        assert not torch.equal(parameters(module), before[name]), name


@pytest.mark.parametrize(("limit", "cut"), [(6, 4), (16, 0)])
def test_texts_that_are_cut_are_warned_of_once(limit, cut, build, monkeypatch, caplog):
    """What the actors are asked is `[agent 0 is asked]` with the words of the prompt, twice: 14 tokens."""
    trainer = build(critic_max_length=limit, max_steps=2)
    run(monkeypatch, trainer, [SAID, SAID])
    said = [record.getMessage() for record in caplog.records if "texts for the critic" in record.getMessage()]
    assert len(said) == (1 if cut else 0)
    assert all(text.startswith(f"{cut} of 4 texts for the critic have more than the {limit} tokens") for text in said)
    assert all("the longest 14: " in text for text in said)


# Critics of other kinds


@pytest.mark.parametrize("make", [lambda: lm(5, hidden=4), lambda: llama(5, hidden=64)], ids=["smaller", "larger"])
@pytest.mark.parametrize("hidden_dim", [None, 3])
def test_a_critic_of_another_size_learns(hidden_dim, make, build):
    trainer = build(
        kwargs={"critic_model": make(), "critic_tokenizer": tok()},
        critic_value_head_hidden_dim=hidden_dim,
        critic_learning_rate=1e-2,
        max_steps=2,
    )
    before = {name: parameters(module) for name, module in trainer.model.entities()}
    trainer.train()
    for name, module in trainer.model.entities():
        after = parameters(module)
        assert torch.isfinite(after).all() and not torch.equal(after, before[name]), name


def test_of_a_critic_with_an_adapter_only_the_adapter_and_the_head_move(build):
    trainer = build(
        kwargs={"critic_peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")},
        critic_learning_rate=1e-2,
        max_steps=2,
    )
    before = {name: value.detach().clone() for name, value in trainer.critics[0].named_parameters()}
    trainer.train()
    moved = {name for name, value in trainer.critics[0].named_parameters() if not torch.equal(value, before[name])}
    expected = {name for name in before if "lora_" in name or name.startswith("value_head.")}
    assert len(expected) == 6 and moved == expected
