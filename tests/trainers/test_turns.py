# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Several turns: what is credited, what is trained and what is logged, against slow references and by hand."""

import json
import logging
import math
import random
import statistics
from collections import Counter

import pandas as pd
import pytest
import torch
from datasets import Dataset
from tiny import (
    CHAT_TEMPLATE,
    RecordGradients,
    dataset,
    gradient,
    lm,
    logged,
    parameters,
    record_batches,
    stub_rollouts,
    team_args,
    tok,
)
from trl import GRPOTrainer

from trl_multiagent import MAGRPOConfig, MAGRPOTrainer
from trl_multiagent.agents.grpo_agent import GRPOAgent


NAN = float("nan")
WORD = 3  # id of the word w0


@pytest.fixture
def build(tmp_path):
    """A team of two actors; options of the config by name, arguments of the trainer in `kwargs`."""

    def build(reward_func, external_transition=None, kwargs=None, **options):
        kwargs = {"agents": [lm(0), lm(1)], "tokenizer": tok(), "train_dataset": dataset(2), **(kwargs or {})}
        return MAGRPOTrainer(
            reward_func=reward_func,
            external_transition=external_transition,
            args=team_args(MAGRPOConfig, tmp_path, **options),
            **kwargs,
        )

    return build


def number(text):
    """The sum of the words' numbers."""
    return sum(int(word[1:]) for word in text.split() if word.startswith("w"))


def shared(first, second, turn):
    return [float((turn * number(a) + 3 * number(b)) % 17) for a, b in zip(first, second, strict=True)]


def per_actor(first, second, turn):
    own = [float((number(a) * number(b) + turn) % 13) for a, b in zip(first, second, strict=True)]
    return [shared(first, second, turn), own]


def first_word(first, second):
    """The number of the first actor's first word, and how much the second actor said."""
    return [float(number(a.split()[0]) + len(b.split())) for a, b in zip(first, second, strict=True)]


def repeat_task(prompt, agent_completions, num_agents):
    return [prompt] * num_agents


class Script:
    """Different answers, the same in each run; `first` are the first ones. Keeps the ids of what it was asked."""

    def __init__(self, seed, first=(), lengths=(3, 5)):
        self.draw, self.first, self.lengths = random.Random(seed), [list(ids) for ids in first], lengths
        self.asked, self.said = [], []

    def __call__(self, prompt_ids):
        answers = []
        for _ in prompt_ids:
            drawn = [self.draw.randrange(WORD, 32) for _ in range(self.draw.randint(*self.lengths))]
            answers.append(self.first.pop(0) if self.first else drawn)
        self.asked += [list(ids) for ids in prompt_ids]
        self.said += answers
        return answers


class World:
    """Gives every actor all that was said so far; `path_of` tells by a prompt what was said before it, and by whom."""

    def __init__(self):
        self.path_of = {}

    def __call__(self, prompt, agent_completions, num_agents, response_history_per_agent, **history):
        path = (prompt, *zip(*response_history_per_agent, strict=True))
        assert path[-1] == tuple(agent_completions)
        told = " ".join([prompt, *(text for joint in path[1:] for text in joint)])
        assert self.path_of.setdefault(told, path) == path
        return [told] * num_agents


def listen(trainer):
    """Lists that will hold what each actor was asked and answered, in order."""
    heard = [[] for _ in trainer.agent_trainers]
    for agent, rows in zip(trainer.agent_trainers, heard, strict=True):

        def sample(prompts, num_kept=None, greedy=False, rows=rows, original=agent.sample):
            texts = original(prompts, num_kept=num_kept, greedy=greedy)
            rows += zip(prompts, texts, strict=False)
            return texts

        agent.sample = sample
    return heard


class Reference:
    """
    Returns and advantages of all that was said, from the words alone. A path is a task and the joint responses since;
    a context is what several samples were alternatives in.
    """

    def __init__(self, heard, world, reward, discount, crossed=False, chain=False):
        self.heard, self.world, self.reward, self.discount = heard, world, reward, discount
        self.crossed, self.chain = crossed, chain
        self.said = [self._by_path(rows) for rows in heard]

    def path(self, prompt):
        return self.world.path_of.get(prompt, (prompt,))

    def _by_path(self, rows):
        by_path = {}
        for prompt, text in rows:
            by_path.setdefault(self.path(prompt), []).append(text)
        return by_path

    def joints(self, path):
        texts = [said.get(path, []) for said in self.said]
        if self.crossed:
            return [(a, b) for a in texts[0] for b in texts[1]]
        return list(zip(*texts, strict=True))

    def own_reward(self, path, joint, agent):
        values = self.reward([joint[0]], [joint[1]], len(path))
        return (values[agent] if isinstance(values[0], list) else values)[0]

    def value(self, path, joint, agent):
        """The reward and the discounted mean of what follows."""
        further = (*path, joint)
        following = [self.value(further, child, agent) for child in self.joints(further)]
        return self.own_reward(path, joint, agent) + self.discount * (statistics.mean(following) if following else 0)

    def group(self, path):
        """The contexts whose samples are each other's baseline."""
        if not self.chain:
            return [path]
        return [other for other in self.said[0] if other[0] == path[0] and len(other) == len(path)]

    def columns(self, agent, path):
        """Returns of a group; in one column each sample meets the same teammates as the others."""
        columns = []
        samples = [(context, index) for context in self.group(path) for index in range(len(self.said[0][context]))]
        for other in range(len(self.said[1 - agent][path]) if self.crossed else 1):
            column = []
            for context, index in samples:
                mine = self.said[agent][context][index]
                theirs = self.said[1 - agent][context][other if self.crossed else index]
                column.append(self.value(context, (mine, theirs) if agent == 0 else (theirs, mine), agent))
            columns.append(column)
        return samples, columns

    def advantages(self, agent, mode, scale):
        """For each row of the actor, in the order in which it spoke."""
        result, met = [], Counter()
        for prompt, _ in self.heard[agent]:
            path, index = self.path(prompt), met[prompt]
            met[prompt] += 1
            samples, columns = self.columns(agent, path)
            own = samples.index((path, index))
            advantage = statistics.mean(estimate(mode, column, own) for column in columns)
            if scale:
                of_samples = [statistics.mean(values) for values in zip(*columns, strict=True)]
                advantage /= (statistics.stdev(of_samples) if len(of_samples) > 1 else 1.0) + 1e-4
            result.append(advantage)
        return result


def estimate(mode, values, own):
    others = [value for index, value in enumerate(values) if index != own]
    if mode == "raw":
        return values[own]
    if not others:
        return 0.0
    return values[own] - {"mean": statistics.mean(values), "rloo": statistics.mean(others), "max": max(values)}[mode]


def rows_of(batch, agent):
    """An actor's rows that count and those that fill up, of a recorded batch."""
    ids = batch[f"agent_{agent}/completion_ids"]
    loss_mask = batch[f"agent_{agent}/completion_mask"] * batch.get(f"agent_{agent}/tool_mask", torch.ones_like(ids))
    return ids, loss_mask


def unpadded(ids, mask):
    return [row[keep.bool()].tolist() for row, keep in zip(ids, mask, strict=True)]


# Credit


ESTIMATORS = [
    ("raw", "none"),
    ("mean", "none"),
    ("rloo", "none"),
    ("max", "none"),
    ("mean", "group"),
    ("rloo", "group"),
    ("max", "group"),
]

# G, turns, tasks, and the samples of each actor: in a tree G times the joint responses of the turn before
SAMPLES = {
    "tree": (2, 3, 2, 2 * (2 + 4 + 8)),
    "tree of three": (3, 2, 1, 3 + 9),
    "cross": (2, 3, 1, 2 + 2 * 4 + 2 * 16),
    "cross of three": (3, 2, 1, 3 + 3 * 9),
    "chain": (2, 3, 2, 2 * (2 + 2 + 2)),
    "chain of three": (3, 3, 2, 2 * (3 + 3 + 3)),
}


class TestCredit:
    @pytest.mark.parametrize("shape", SAMPLES)
    @pytest.mark.parametrize(("mode", "scale"), ESTIMATORS)
    def test_advantages_equal_a_recursive_reference(self, shape, mode, scale, build, monkeypatch):
        world = World()
        generations, turns, tasks, samples = SAMPLES[shape]
        trainer = build(
            per_actor,
            world,
            num_turns=turns,
            discount=0.5,
            advantage_mode=mode,
            scale_rewards=scale,
            rollout_mode="chain" if "chain" in shape else "tree",
            joint_mode="cross" if "cross" in shape else "aligned",
            num_generations=generations,
            per_device_train_batch_size=generations * tasks,
            kwargs={"train_dataset": dataset(tasks)},
        )
        stub_rollouts(monkeypatch, trainer, [Script(1), Script(2)])
        heard, batches = listen(trainer), record_batches(trainer)
        trainer.train()
        reference = Reference(heard, world, per_actor, 0.5, crossed="cross" in shape, chain="chain" in shape)
        for agent in range(2):
            expected = reference.advantages(agent, mode, scale == "group")
            assert len(expected) == samples
            assert len({round(value, 4) for value in expected}) > 1
            got = batches[0][f"agent_{agent}/advantages"][:samples].tolist()
            assert got == pytest.approx(expected, abs=1e-4, rel=1e-5)

    @pytest.mark.parametrize("rollout_mode", ["tree", "chain"])
    def test_what_ended_early_has_its_own_reward_as_return(self, rollout_mode, build, monkeypatch):
        world, threshold = World(), 8.0
        trainer = build(
            shared,
            world,
            num_turns=3,
            discount=0.5,
            advantage_mode="raw",
            scale_rewards="none",
            rollout_mode=rollout_mode,
            early_termination_threshold=threshold,
            num_generations=2 if rollout_mode == "tree" else 4,
            per_device_train_batch_size=8,
            kwargs={"train_dataset": dataset(4)},
        )
        stub_rollouts(monkeypatch, trainer, [Script(5), Script(6)])
        heard, batches = listen(trainer), record_batches(trainer)
        trainer.train()
        reference = Reference(heard, world, shared, 0.5, chain=rollout_mode == "chain")
        ended, went_on = 0, 0
        for path in reference.said[0]:
            joints = reference.joints(path)
            rewards = [reference.own_reward(path, joint, 0) for joint in joints]
            for joint, reward in zip(joints, rewards, strict=True):
                judged = statistics.mean(rewards) if rollout_mode == "tree" else reward
                goes_on = len(path) < 3 and not judged > threshold
                answers = len(reference.said[0].get((*path, joint), []))
                assert answers == ((2 if rollout_mode == "tree" else 1) if goes_on else 0)
                if len(path) < 3:
                    ended, went_on = ended + (not goes_on), went_on + goes_on
                if not goes_on:
                    assert reference.value(path, joint, 0) == reward
        assert ended and went_on
        for agent in range(2):
            expected = reference.advantages(agent, "raw", scale=False)
            got = batches[0][f"agent_{agent}/advantages"][: len(expected)].tolist()
            assert got == pytest.approx(expected, abs=1e-4)

    @pytest.mark.parametrize(
        ("rollout_mode", "returns"),
        [
            # Means of the contexts: 5 ends, 3 goes on as it is not above; each joint response of it branches in two
            ("tree", [1, 9, 1 + 7, 5 + 7, 7, 7, 7, 7]),
            # 9 and 5 end, both ones go on alone
            ("chain", [1 + 7, 9, 1 + 7, 5, 7, 7]),
        ],
    )
    def test_early_termination_by_hand(self, rollout_mode, returns, build, monkeypatch):
        trainer = build(
            lambda first, second: [float(number(text)) for text in first],
            repeat_task,
            num_turns=2,
            advantage_mode="raw",
            scale_rewards="none",
            rollout_mode=rollout_mode,
            early_termination_threshold=3.0,
        )
        first = [[WORD + value] for value in (1, 9, 1, 5)]
        later = [[WORD + 7] for _ in range(4)]
        stub_rollouts(monkeypatch, trainer, [Script(0, first + later), [[WORD]]])
        batches = record_batches(trainer)
        trainer.train()
        for agent in range(2):
            assert batches[0][f"agent_{agent}/advantages"].tolist()[: len(returns)] == returns

    def test_padding_has_no_advantage_and_no_loss(self, build, monkeypatch):
        trainer = uneven(build, monkeypatch)
        batches = record_batches(trainer)
        trainer.train()
        for agent in range(2):
            ids, loss_mask = rows_of(batches[0], agent)
            assert len(ids) == 6  # five samples in two micro-batches
            assert loss_mask.sum(1)[:5].gt(0).all() and loss_mask[5].sum() == 0
            assert batches[0][f"agent_{agent}/advantages"][5] == 0

    def test_all_may_end_in_the_first_turn(self, build, monkeypatch):
        trainer = build(shared, repeat_task, num_turns=3, early_termination_threshold=-1.0)
        stub_rollouts(monkeypatch, trainer, [Script(1), Script(2)])
        heard = listen(trainer)
        trainer.train()
        assert [len(rows) for rows in heard] == [4, 4]
        assert logged(trainer, "env_step")[0] == 4

    def test_a_missing_reward_is_left_out_of_the_baseline_and_of_what_follows(self, build, monkeypatch):
        """B24: turn by turn; a joint response without a reward, or without one after it, teaches nothing."""
        table = {1: [None, 1.0, 2.0, 3.0], 2: [0.0, 4.0, 6.0, None]}
        trainer = build(
            lambda first, second, turn: table[turn],
            repeat_task,
            num_turns=2,
            rollout_mode="chain",
            num_generations=4,
            scale_rewards="none",
            kwargs={"train_dataset": dataset(1)},
        )
        stub_rollouts(monkeypatch, trainer, [Script(1), Script(2)])
        batches = record_batches(trainer)
        trainer.train()
        # Returns of turn 1: missing, 1 + 4, 2 + 6, missing; of turn 2: 0, 4, 6, missing, whose mean is 10/3
        expected = [0, -1.5, 1.5, 0, -10 / 3, 2 / 3, 8 / 3, 0]
        for agent in range(2):
            assert batches[0][f"agent_{agent}/advantages"].tolist() == pytest.approx(expected, abs=1e-5)
            assert torch.isfinite(parameters(trainer.agents[agent])).all()
        first = trainer.state.log_history[0]
        assert first["rewards/frac_missing"] == 2 / 8
        assert first["turn_1/reward_mean"] == 2.0
        assert first["turn_1/expected_return"] == 6.5
        assert first["turn_2/reward_mean"] == pytest.approx(10 / 3)
        assert first["turn_2/expected_return"] == pytest.approx(10 / 3)

    def test_a_turn_without_any_reward_leaves_no_number_in_the_weights(self, build, monkeypatch):
        """B24: all of turn 2 is missing, so nothing is learned, and no log has a NaN."""
        trainer = build(
            lambda first, second, turn: [1.0 if turn == 1 else None] * len(first), repeat_task, num_turns=2
        )
        stub_rollouts(monkeypatch, trainer, [Script(1), Script(2)])
        before = [parameters(agent) for agent in trainer.agents]
        trainer.train()
        for agent, old in zip(trainer.agents, before, strict=True):
            assert torch.equal(parameters(agent), old)
        first = trainer.state.log_history[0]
        assert first["turn_2/reward_mean"] is None and first["turn_1/expected_return"] is None
        assert not any(isinstance(value, float) and math.isnan(value) for value in first.values())

    @pytest.mark.parametrize("rollout_mode", ["tree", "chain"])
    def test_equal_rewards_teach_nothing(self, rollout_mode, build, monkeypatch):
        """B23: no turn has a spread, and no rounding of the returns becomes one."""
        trainer = build(
            lambda first, second: [0.1] * len(first), repeat_task, num_turns=3, rollout_mode=rollout_mode, discount=0.9
        )
        stub_rollouts(monkeypatch, trainer, [Script(1), Script(2)])
        before = [parameters(agent) for agent in trainer.agents]
        trainer.train()
        for agent, old in zip(trainer.agents, before, strict=True):
            assert torch.equal(parameters(agent), old)


def uneven(build, monkeypatch, equal=False, **options):
    """
    A team of which one of four chains goes on to a second turn, so that five rows are trained; with `equal` all of
    them have two tokens.
    """
    options = {
        "num_turns": 2,
        "rollout_mode": "chain",
        "advantage_mode": "raw",
        "scale_rewards": "none",
        "early_termination_threshold": 8.0,
        **options,
    }
    trainer = build(first_word, repeat_task, **options)
    first = [[WORD + 9, 20, 2], [WORD + 1, 21, 22, 23, 2], [WORD + 10], [WORD + 9, 30]]
    trainer.scripts = [Script(1, first), Script(2, lengths=(1, 6))]
    if equal:
        first = [[WORD + 9, 20], [WORD + 1, 21], [WORD + 10, 22], [WORD + 9, 30]]
        trainer.scripts = [Script(1, first, lengths=(2, 2)), Script(2, lengths=(2, 2))]
    stub_rollouts(monkeypatch, trainer, trainer.scripts)
    return trainer


# Tokens


def record_generation(monkeypatch):
    """Lists that will hold ids of prompts and completions of each actor, as they are generated."""
    rows, generate = {}, GRPOAgent._generate_single_turn

    def recorded(self, prompt_ids, *args, **kwargs):
        completion_ids, logprobs = generate(self, prompt_ids, *args, **kwargs)
        asked = [list(ids) for ids in prompt_ids]
        rows.setdefault(id(self), []).extend(zip(asked, [list(ids) for ids in completion_ids], strict=True))
        return completion_ids, logprobs

    monkeypatch.setattr(GRPOAgent, "_generate_single_turn", recorded)
    return lambda agent: rows[id(agent)]


def trained_tokens(batch, agent):
    """Ids of prompts and completions of all rows, without padding."""
    prompts = unpadded(batch[f"agent_{agent}/prompt_ids"], batch[f"agent_{agent}/prompt_mask"])
    completions = unpadded(batch[f"agent_{agent}/completion_ids"], batch[f"agent_{agent}/completion_mask"])
    return list(zip(prompts, completions, strict=True))


class TestTokens:
    @pytest.mark.parametrize("rollout_mode", ["tree", "chain"])
    def test_the_ids_that_are_trained_are_those_that_were_sampled(self, rollout_mode, build, monkeypatch):
        world = World()
        generated = record_generation(monkeypatch)
        trainer = build(shared, world, num_turns=3, rollout_mode=rollout_mode)
        batches, heard = record_batches(trainer), listen(trainer)
        trainer.train()
        samples = 28 if rollout_mode == "tree" else 12
        encode = tok()
        for index, agent in enumerate(trainer.agent_trainers):
            rows = trained_tokens(batches[0], index)
            assert len(rows) == samples and rows == generated(agent)
            assert len({len(completion) for _, completion in rows}) > 1 or len(rows[0][1]) == 6
            # What was asked is what the environment said, and what was answered is what it was told
            assert [prompt for prompt, _ in rows] == [encode(prompt)["input_ids"] for prompt, _ in heard[index]]
            texts = [encode.decode(ids, skip_special_tokens=True) for _, ids in rows]
            assert texts == [text for _, text in heard[index]]
            assert {prompt for prompt, _ in heard[index][4:]} == set(world.path_of)

    def test_an_empty_answer_in_a_later_turn_is_heard_and_not_trained(self, build, monkeypatch):
        """B21: it has no token of its own, so its row has no loss."""
        said, seen = [], []

        def reward(first, second, turn):
            seen.extend((turn, text) for text in first)
            return [float(len(text)) for text in first]

        def transition(prompt, agent_completions, num_agents, turn):
            said.append((turn, agent_completions[0]))
            return [f"w{turn} w4"] * num_agents

        trainer = build(reward, transition, num_turns=3, rollout_mode="chain")
        answers = [[10, 2], [11], [12], [13]] + [[], [14, 15], [2], []] + [[16], [17], [18], [19]]
        stub_rollouts(monkeypatch, trainer, [Script(0, answers), [[5, 6, 2]]])
        batches = record_batches(trainer)
        trainer.train()
        assert [text for turn, text in seen if turn == 2] == ["", "w11 w12", "", ""]
        assert [text for turn, text in said if turn == 2] == ["", "w11 w12", "", ""]
        ids, loss_mask = rows_of(batches[0], 0)
        assert unpadded(ids, loss_mask) == answers
        assert all(torch.isfinite(parameters(agent)).all() for agent in trainer.agents)

    def test_messages_go_through_the_chat_template_in_every_turn(self, build, monkeypatch):
        """B20: also for a dialogue that the environment goes on with."""
        tokenizer = tok(chat_template=CHAT_TEMPLATE)
        tasks = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"w{i} w9"}] for i in range(2)]})
        heard = []

        def transition(prompt, agent_completions, num_agents):
            heard.append(agent_completions)
            return [
                [*prompt, {"role": "assistant", "content": text}, {"role": "user", "content": f"w{11 + i}"}]
                for i, text in enumerate(agent_completions)
            ]

        trainer = build(
            shared,
            transition,
            num_turns=2,
            rollout_mode="chain",
            shuffle_dataset=False,
            kwargs={"train_dataset": tasks, "tokenizer": tokenizer},
        )
        generated, batches = record_generation(monkeypatch), record_batches(trainer)
        trainer.train()
        assert all(isinstance(text, str) for texts in heard for text in texts)
        for index, agent in enumerate(trainer.agent_trainers):
            rows = trained_tokens(batches[0], index)
            assert rows == generated(agent) and len(rows) == 8
            dialogues = [f"user : w{task} w9 assistant : " for task in (0, 0, 1, 1)]
            dialogues += [
                f"{start}{texts[index]} user : w{11 + index} assistant : "
                for start, texts in zip(dialogues, heard, strict=True)
            ]
            assert [prompt for prompt, _ in rows] == [tok()(text)["input_ids"] for text in dialogues]

    def test_a_text_may_be_followed_by_messages(self, build, monkeypatch):
        tokenizer = tok(chat_template=CHAT_TEMPLATE)
        trainer = build(
            shared,
            lambda prompt, agent_completions, num_agents: [[{"role": "user", "content": "w5"}]] * num_agents,
            num_turns=2,
            rollout_mode="chain",
            kwargs={"tokenizer": tokenizer},
        )
        generated, batches = record_generation(monkeypatch), record_batches(trainer)
        trainer.train()
        for index, agent in enumerate(trainer.agent_trainers):
            rows = trained_tokens(batches[0], index)
            assert rows == generated(agent)
            assert [prompt for prompt, _ in rows[4:]] == [tok()("user : w5 assistant : ")["input_ids"]] * 4

    def test_generation_parameters_hold_in_every_turn(self, build):
        trainer = build(shared, World(), num_turns=3, max_completion_length=3)
        heard = listen(trainer)
        trainer.train()
        assert max(len(text.split()) for rows in heard for _, text in rows) <= 3


# Losses


def plain_gradient(model, rows, loss_type, max_length=6, terms=lambda *args: 0.0):
    """
    Gradient of the policy loss at a ratio of 1, row by row: `rows` are ids of the prompt, ids of the completion and
    the advantage. `terms` gives a further loss of each token, from its log-probability, in the same aggregation.
    """
    model.zero_grad()
    total = sum(len(completion) for _, completion, _ in rows)
    for prompt, completion, advantage in rows:
        logps = log_probabilities(model, prompt, completion)
        loss = (-advantage * logps + terms(prompt, completion, logps)).sum()
        divisor = {
            "grpo": len(rows) * len(completion),
            "sapo": len(rows) * len(completion),
            "bnpo": total,
            "dapo": total,
            "cispo": total,
            "luspo": len(rows),
            "dr_grpo": len(rows) * max_length,
        }[loss_type]
        (loss / divisor).backward()
    return gradient(model)


def log_probabilities(model, prompt, completion):
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(completion)[:, None]).squeeze(1)


def move(model):
    """Change all parameters a little, so that a policy is no more its reference."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))


def mean_entropy(model, rows):
    """The mean over all tokens of the completions; `rows` are ids of the prompt and of the completion."""
    entropies = []
    for prompt, completion in rows:
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        logps = torch.log_softmax(logits, dim=-1)
        entropies.append(-(logps.exp() * logps).sum(-1))
    return torch.cat(entropies).mean()


def assert_close(got, expected, rtol=1e-4):
    assert (got - expected).abs().max() <= rtol * expected.abs().max()
    assert expected.abs().max() > 0


LOSS_TYPES = ["grpo", "dapo", "dr_grpo", "luspo", "sapo", "cispo", "vespo"]
# BNPO's loss is a mean over the tokens of each micro-batch, so it is compared with equally long rows only
CASES = [(loss_type, shape) for loss_type in LOSS_TYPES for shape in ("uneven chain", "tree")]
CASES += [("bnpo", "tree of equal lengths")]


def train_one_step(build, monkeypatch, shape, loss_type, batch_size, accumulation, **options):
    """One step of SGD; the trainer with its answers, what was heard, and the gradients of each actor."""
    options = {
        "loss_type": loss_type,
        "per_device_train_batch_size": batch_size,
        "gradient_accumulation_steps": accumulation,
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "epsilon_high": 5.0 if loss_type == "cispo" else 0.2,  # CISPO clips by it, not around 1
        **options,
    }
    recorder = RecordGradients()
    if "tree" in shape:
        lengths = (4, 4) if "equal" in shape else (1, 6)
        world = World()
        options = {"num_turns": 2, "advantage_mode": "mean", "scale_rewards": "none", "discount": 0.5, **options}
        trainer = build(per_actor, world, kwargs={"callbacks": [recorder]}, **options)
        trainer.scripts = [Script(3, lengths=lengths), Script(4, lengths=lengths)]
        stub_rollouts(monkeypatch, trainer, trainer.scripts)
    else:
        trainer = uneven(build, monkeypatch, "equal" in shape, kwargs={"callbacks": [recorder]}, **options)
    batches = record_batches(trainer)
    trainer.train()
    return trainer, recorder.steps[0], batches[0]


def script_rows(trainer, agent, batch):
    """Ids of prompt and completion of each sample, and its advantage."""
    script = trainer.scripts[agent]
    return list(zip(script.asked, script.said, batch[f"agent_{agent}/advantages"].tolist(), strict=False))


class TestLosses:
    @pytest.mark.parametrize("steps", [1, 2])
    def test_no_pass_of_a_model_sees_more_rows_than_a_micro_batch(self, steps, build, monkeypatch):
        """However many turns there are."""
        trainer = build(
            shared,
            repeat_task,
            num_turns=3,
            per_device_train_batch_size=4 // steps,
            gradient_accumulation_steps=steps,
            beta=0.1,
            num_iterations=2,
        )
        learned, any_pass, losses = [], [], []
        for agent in trainer.agents:
            agent.get_input_embeddings().register_forward_pre_hook(
                lambda module, args: (learned if torch.is_grad_enabled() else any_pass).append(len(args[0]))
            )
        loss = GRPOAgent.loss

        def counted(self, model, inputs, *args, **kwargs):
            losses.append(len(inputs["completion_ids"]))
            return loss(self, model, inputs, *args, **kwargs)

        monkeypatch.setattr(GRPOAgent, "loss", counted)
        trainer.train()
        assert set(losses) == {4 // steps} and sum(losses) == 2 * 28  # 28 rows of each of two actors
        assert max(learned) == 4 // steps
        assert max(any_pass) == 4  # sampling: no more than the first turn

    @pytest.mark.parametrize(("loss_type", "shape"), CASES)
    def test_gradients_do_not_depend_on_how_the_batch_is_cut(self, loss_type, shape, build, monkeypatch):
        """B27: also with rows that only fill up."""
        whole, expected, _ = train_one_step(build, monkeypatch, shape, loss_type, 4, 1)
        cut, got, _ = train_one_step(build, monkeypatch, shape, loss_type, 2, 2)
        assert whole.scripts[0].said == cut.scripts[0].said
        for name in ("agent_0", "agent_1"):
            assert_close(got[name], expected[name])
        assert logged(cut, "loss")[0] == pytest.approx(logged(whole, "loss")[0], rel=1e-4, abs=1e-4)

    @pytest.mark.parametrize(("loss_type", "shape"), [case for case in CASES if case[0] != "vespo"])
    def test_gradients_equal_those_of_single_rows(self, loss_type, shape, build, monkeypatch):
        """B27: each row, or each token, of all turns counts once; rows that only fill up count for nothing."""
        trainer, got, batch = train_one_step(build, monkeypatch, shape, loss_type, 2, 2)
        for index in range(2):
            rows = script_rows(trainer, index, batch)
            assert len(rows) == (5 if shape == "uneven chain" else 12)
            assert any(advantage for *_, advantage in rows)
            assert_close(got[f"agent_{index}"], plain_gradient(lm(index), rows, loss_type))

    def test_the_logged_loss_is_the_mean_over_the_rows_that_count(self, build, monkeypatch):
        trainer, _, batch = train_one_step(build, monkeypatch, "uneven chain", "grpo", 2, 2)
        # At a ratio of 1 a row's loss is its advantage, with the sign turned; the actors' losses are added
        expected = sum(statistics.mean(-a for *_, a in script_rows(trainer, index, batch)) for index in range(2))
        assert logged(trainer, "loss")[0] == pytest.approx(expected, rel=1e-4)

    @pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
    def test_the_kl_term_does_not_feel_the_padding(self, loss_type, build, monkeypatch):
        recorder = RecordGradients()
        trainer = uneven(
            build,
            monkeypatch,
            loss_type=loss_type,
            beta=0.5,
            use_bias_correction_kl=False,
            optim="sgd",
            max_grad_norm=0.0,
            kwargs={"callbacks": [recorder]},
        )
        # A policy that left its reference
        for agent in trainer.agents:
            move(agent)
        policies = [lm(0), lm(1)]
        for policy, agent in zip(policies, trainer.agents, strict=True):
            policy.load_state_dict(agent.state_dict())
        batches = record_batches(trainer)
        trainer.train()
        assert logged(trainer, "agent_0/kl")[0] > 0.01
        for index, policy in enumerate(policies):
            reference = lm(index)

            def kl(prompt, completion, logps, reference=reference):
                with torch.no_grad():
                    gap = log_probabilities(reference, prompt, completion)
                gap = gap - logps
                return 0.5 * (gap.exp() - gap - 1)

            rows = script_rows(trainer, index, batches[0])
            expected = plain_gradient(policy, rows, loss_type, terms=kl)
            assert_close(recorder.steps[0][f"agent_{index}"], expected)

    @pytest.mark.parametrize(
        ("batch_size", "accumulation", "sizes"), [(4, 1, [2, 3]), (2, 2, [1, 1, 1, 2]), (1, 4, [1] * 5)]
    )
    @pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
    def test_the_entropy_bonus_does_not_feel_the_padding(
        self, loss_type, batch_size, accumulation, sizes, build, monkeypatch
    ):
        """TRL's bonus is a mean over the tokens of each micro-batch, and the mean of those that have any."""
        recorder, parts = RecordGradients(), [[], []]
        trainer = uneven(
            build,
            monkeypatch,
            loss_type=loss_type,
            entropy_coef=0.3,
            optim="sgd",
            max_grad_norm=0.0,
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
            kwargs={"callbacks": [recorder]},
        )
        batches, loss = record_batches(trainer), GRPOAgent.loss

        def recorded(self, model, inputs, *args, **kwargs):
            ids, mask = inputs["prompt_ids"], inputs["prompt_mask"]
            loss_mask = inputs["completion_mask"] * inputs["tool_mask"]
            rows = zip(unpadded(ids, mask), unpadded(inputs["completion_ids"], loss_mask), strict=True)
            parts[trainer.agent_trainers.index(self)].append([row for row in rows if row[1]])
            return loss(self, model, inputs, *args, **kwargs)

        monkeypatch.setattr(GRPOAgent, "loss", recorded)
        trainer.train()
        for index in range(2):
            with_rows = [part for part in parts[index] if part]
            assert sorted(len(part) for part in with_rows) == sizes
            policy = plain_gradient(lm(index), script_rows(trainer, index, batches[0]), loss_type)
            model = lm(index)
            for part in with_rows:
                (mean_entropy(model, part) / len(with_rows)).backward()
            bonus = gradient(model)
            assert_close(recorder.steps[0][f"agent_{index}"], policy - 0.3 * bonus)
            assert_close(recorder.steps[0][f"agent_{index}"] - policy, -0.3 * bonus, rtol=1e-2)

    def test_single_rows_of_equal_lengths_are_to_bnpo_what_they_are_to_grpo(self, build, monkeypatch):
        """Five rows in eight micro-batches of one: those that only fill up are in no mean."""
        gradients = {}
        for loss_type in ("grpo", "bnpo"):
            shape = "uneven chain of equal lengths"
            trainer, gradients[loss_type], batch = train_one_step(build, monkeypatch, shape, loss_type, 1, 4)
            assert trainer.args.steps_per_generation == 4
            assert len(batch["agent_0/completion_ids"]) == 8
            for index in range(2):
                rows = script_rows(trainer, index, batch)
                assert len(rows) == 5 and {len(completion) for _, completion, _ in rows} == {2}
                assert any(advantage for *_, advantage in rows)
                assert_close(gradients[loss_type][f"agent_{index}"], plain_gradient(lm(index), rows, "grpo"))
        for name, expected in gradients["grpo"].items():
            assert_close(gradients["bnpo"][name], expected)

    @pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo"])
    def test_what_is_logged_of_single_rows_is_the_mean_of_those_that_count(self, loss_type, build, monkeypatch):
        """Micro-batches that only fill up have neither an entropy nor a divergence."""
        trainer = uneven(
            build,
            monkeypatch,
            loss_type=loss_type,
            beta=0.5,
            use_bias_correction_kl=False,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=4,
        )
        for agent in trainer.agents:
            move(agent)
        policies = [lm(0), lm(1)]
        for policy, agent in zip(policies, trainer.agents, strict=True):
            policy.load_state_dict(agent.state_dict())
        batches = record_batches(trainer)
        trainer.train()
        for index, policy in enumerate(policies):
            rows, entropies, divergences = script_rows(trainer, index, batches[0]), [], []
            assert len(rows) == 5
            with torch.no_grad():
                for prompt, completion, _ in rows:
                    entropies.append(mean_entropy(policy, [(prompt, completion)]).item())
                    gap = log_probabilities(lm(index), prompt, completion)
                    gap = gap - log_probabilities(policy, prompt, completion)
                    divergences.append((gap.exp() - gap - 1).mean().item())
            assert min(entropies) > 0.01 and min(divergences) > 1e-4
            assert logged(trainer, f"agent_{index}/entropy")[0] == pytest.approx(statistics.mean(entropies), rel=1e-4)
            assert logged(trainer, f"agent_{index}/kl")[0] == pytest.approx(statistics.mean(divergences), rel=1e-4)

    def test_what_is_logged_does_not_depend_on_how_equal_rows_are_cut(self, build, monkeypatch):
        """All prompts and answers of an actor are the same, so that any mean over rows that count is."""
        entropies = []
        for batch_size, accumulation in ((4, 1), (2, 2), (1, 4)):
            rewards = iter([[9.0, 1.0], [10.0, 9.0], [2.0]])  # one of four goes on
            trainer = build(
                lambda first, second, rewards=rewards: next(rewards),
                repeat_task,
                num_turns=2,
                rollout_mode="chain",
                early_termination_threshold=8.0,
                influence_steps=0,
                per_device_train_batch_size=batch_size,
                gradient_accumulation_steps=accumulation,
                kwargs={"train_dataset": Dataset.from_dict({"prompt": ["w5 w6"] * 2})},
            )
            stub_rollouts(monkeypatch, trainer, [[[10, 11, 2]], [[12, 13]]])
            batches = record_batches(trainer)
            trainer.train()
            loss_mask = rows_of(batches[0], 0)[1]
            assert loss_mask.any(1).sum() == 5 and len(loss_mask) > 5
            entropies.append([logged(trainer, f"agent_{index}/entropy")[0] for index in range(2)])
        assert entropies[1] == pytest.approx(entropies[0]) and entropies[2] == pytest.approx(entropies[0])

    @pytest.mark.parametrize("entropy_coef", [0.0, 0.3])
    @pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
    def test_the_loss_of_an_evaluation_is_that_of_all_its_rows(self, loss_type, entropy_coef, build, monkeypatch):
        """Two turns are two micro-batches of one evaluation step; nothing accumulates."""
        trainer = build(
            shared,
            World(),
            num_turns=2,
            advantage_mode="raw",
            scale_rewards="none",
            loss_type=loss_type,
            entropy_coef=entropy_coef,
            learning_rate=0.0,
            kwargs={"eval_dataset": dataset(2)},
        )
        trainer.train()
        scripts = [Script(3, lengths=(1, 6)), Script(4, lengths=(1, 6))]
        stub_rollouts(monkeypatch, trainer, scripts)
        batches = record_batches(trainer)
        loss = trainer.evaluate()["eval_loss"]
        expected = 0.0
        for index, script in enumerate(scripts):
            advantages = batches[0][f"agent_{index}/advantages"].tolist()
            lengths = [len(ids) for ids in script.said]
            assert len(lengths) == 8 and any(advantages)
            # At a ratio of 1 each token's loss is the advantage, with the sign turned
            weights = [1.0] * 8 if loss_type == "grpo" else lengths
            expected -= sum(a * w for a, w in zip(advantages, weights, strict=True)) / sum(weights)
            rows = list(zip(script.asked, script.said, strict=True))
            with torch.no_grad():
                entropies = [mean_entropy(lm(index), part).item() for part in (rows[:4], rows[4:])]
            expected -= entropy_coef * statistics.mean(entropies)
        assert loss == pytest.approx(expected, rel=1e-4)


# Logs


def by_turn(table):
    """A reward of fixed values: `table[turn]` for each task."""
    return lambda first, second, turn: table[turn]


class TestLogs:
    def test_turns_are_logged_by_reward_and_return(self, build, monkeypatch):
        trainer = build(
            by_turn({1: [1.0, 3.0], 2: [5.0, 7.0]}),
            repeat_task,
            num_turns=2,
            rollout_mode="chain",
            discount=0.5,
            max_steps=2,
            kwargs={"train_dataset": dataset(2)},
        )
        stub_rollouts(monkeypatch, trainer, [Script(1), Script(2)])
        trainer.train()
        for step, entry in enumerate(trainer.state.log_history[:2], start=1):
            assert entry["turn_1/reward_mean"] == 2.0
            assert entry["turn_1/expected_return"] == 5.0  # 1 + 2.5 and 3 + 3.5
            assert entry["turn_2/reward_mean"] == 6.0
            assert entry["turn_2/expected_return"] == 6.0
            assert entry["reward"] == 4.0
            assert entry["reward_std"] == pytest.approx(statistics.stdev([1, 3, 5, 7] * 2))
            assert entry["rewards/reward_func/mean"] == 4.0
            assert entry["env_step"] == 8 * step  # two tasks, two chains, two turns
            assert not any(name.startswith("agent_0/turn_") for name in entry)

    def test_the_share_of_groups_without_spread_is_logged_once_where_rewards_are_shared(self, build, monkeypatch):
        # Returns 1 + 5 and 3 + 5 differ, those of the second turn do not
        trainer = build(by_turn({1: [1.0, 3.0], 2: [5.0, 5.0]}), repeat_task, num_turns=2, rollout_mode="chain")
        stub_rollouts(monkeypatch, trainer, [Script(1), Script(2)])
        trainer.train()
        entry = trainer.state.log_history[0]
        assert [name for name in entry if "frac_reward_zero_std" in name] == ["frac_reward_zero_std"]
        assert entry["frac_reward_zero_std"] == 0.5

    def test_the_share_of_groups_without_spread_is_each_actors_own_where_rewards_are(self, build, monkeypatch):
        def reward(first, second, turn):
            return [[1.0, 3.0], [4.0, 4.0] if turn == 1 else [5.0, 7.0 if first[0] == "w0" else 5.0]]

        trainer = build(
            reward,
            repeat_task,
            num_turns=2,
            rollout_mode="chain",
            discount=0.0,
            agent_names=["left", "right"],
        )
        stub_rollouts(monkeypatch, trainer, [[[WORD], [WORD], [WORD + 1], [WORD + 1]], Script(2)])
        trainer.train()
        entry = trainer.state.log_history[0]
        # The right actor's: no spread in two tasks of the first turn and in one of the second
        assert entry["left/frac_reward_zero_std"] == 0.0 and entry["right/frac_reward_zero_std"] == 0.75
        assert "frac_reward_zero_std" not in entry

    def test_a_tree_counts_every_joint_response(self, build, monkeypatch):
        rewards = {1: [1.0, 3.0], 2: [0.0, 2.0, 4.0, 10.0]}
        trainer = build(by_turn(rewards), repeat_task, num_turns=2)
        stub_rollouts(monkeypatch, trainer, [Script(1), Script(2)])
        trainer.train()
        entry = trainer.state.log_history[0]
        assert entry["turn_1/expected_return"] == 6.0  # 1 + 1 and 3 + 7
        assert entry["turn_2/reward_mean"] == 4.0
        assert entry["env_step"] == 2 * (2 + 4)

    def test_crossed_joint_responses_are_all_counted(self, build, monkeypatch):
        trainer = build(shared, World(), num_turns=2, joint_mode="cross", scale_rewards="none")
        stub_rollouts(monkeypatch, trainer, [Script(1), Script(2)])
        trainer.train()
        # Two tasks with 2 x 2 joint responses, each of which has 2 x 2 again
        assert logged(trainer, "env_step")[0] == 2 * (4 + 16)

    def test_rows_that_only_fill_up_are_not_in_the_mean_square_of_the_advantages(self, build, monkeypatch):
        trainer = uneven(build, monkeypatch)
        batches = record_batches(trainer)
        trainer.train()
        for index in range(2):
            advantages = [advantage for *_, advantage in script_rows(trainer, index, batches[0])]
            assert len(advantages) == 5
            expected = statistics.mean(advantage**2 for advantage in advantages)
            assert logged(trainer, f"agent_{index}/advantage_second_moment")[0] == pytest.approx(expected)

    def test_different_rewards_are_logged_for_each_actor(self, build, monkeypatch):
        def reward(first, second, turn):
            own = {1: [1.0, 3.0], 2: [5.0, 7.0]}[turn]
            return [own, [10 * value for value in own]]

        trainer = build(
            reward,
            repeat_task,
            num_turns=2,
            rollout_mode="chain",
            agent_names=["left", "right"],
        )
        stub_rollouts(monkeypatch, trainer, [Script(1), Script(2)])
        trainer.train()
        entry = trainer.state.log_history[0]
        for name, factor in (("left", 1), ("right", 10)):
            assert entry[f"{name}/turn_1/reward_mean"] == 2.0 * factor
            assert entry[f"{name}/turn_1/expected_return"] == 8.0 * factor
            assert entry[f"{name}/turn_2/reward_mean"] == 6.0 * factor
            assert entry[f"{name}/turn_2/expected_return"] == 6.0 * factor
            assert entry[f"{name}/reward"] == 4.0 * factor
        assert entry["reward"] == 22.0
        assert "turn_1/reward_mean" not in entry

    @pytest.mark.parametrize(("batch_size", "generations"), [(4, 2), (8, 2), (4, 1)])
    def test_evaluation_follows_chains(self, batch_size, generations, build, monkeypatch):
        """B36: three tasks, whole batches or not; each is counted once, and no turn branches."""
        seen = []

        def reward(first, second, turn, batch_items):
            # In turn 1 the task's number, in turn 2 ten times that
            values = [float(item["gold"][1:]) * (1 if turn == 1 else 10) for item in batch_items]
            if not trainer.model.training:
                seen.extend([turn] * len(values))
            return values

        trainer = build(
            reward,
            repeat_task,
            num_turns=2,
            discount=0.5,
            num_generations_eval=generations,
            per_device_eval_batch_size=batch_size,
            kwargs={"eval_dataset": dataset(3)},
        )
        stub_rollouts(monkeypatch, trainer, [Script(1), Script(2)])
        trainer.train()
        metrics = trainer.evaluate()
        assert Counter(seen) == {1: 3 * generations, 2: 3 * generations}
        assert metrics["eval_turn_1/reward_mean"] == pytest.approx(1.0)  # tasks 0, 1 and 2
        assert metrics["eval_turn_2/reward_mean"] == pytest.approx(10.0)
        assert metrics["eval_turn_1/expected_return"] == pytest.approx(6.0)
        assert metrics["eval_turn_2/expected_return"] == pytest.approx(10.0)
        assert metrics["eval_reward"] == pytest.approx(5.5)
        assert trainer.env_step == 2 * (2 + 4)  # what was scored for training
        assert math.isfinite(metrics["eval_loss"])

    def test_a_team_can_be_evaluated_before_training(self, build):
        trainer = build(shared, repeat_task, num_turns=2, kwargs={"eval_dataset": dataset(3)})
        assert math.isfinite(trainer.evaluate()["eval_loss"])

    def test_evaluation_ends_early_by_the_own_reward(self, build, monkeypatch):
        def reward(first, second, turn, batch_items):
            return [float(item["gold"][1:]) + 10 * (turn - 1) for item in batch_items]

        trainer = build(
            reward,
            repeat_task,
            num_turns=2,
            early_termination_threshold=0.5,
            num_generations_eval=2,
            kwargs={"eval_dataset": dataset(3)},
        )
        stub_rollouts(monkeypatch, trainer, [Script(1), Script(2)])
        trainer.train()
        metrics = trainer.evaluate()
        # Task 0 alone goes on, to 10; tasks 1 and 2 have ended
        assert metrics["eval_turn_1/reward_mean"] == pytest.approx(1.0)
        assert metrics["eval_turn_2/reward_mean"] == pytest.approx(10.0)
        assert metrics["eval_turn_1/expected_return"] == pytest.approx((10 + 1 + 2) / 3)


# Runs


class TestRuns:
    def test_several_turns_need_an_environment(self, build):
        with pytest.raises(ValueError, match=r"num_turns=2 needs `external_transition=`"):
            build(shared, num_turns=2)

    @pytest.mark.parametrize("rollout_mode", ["tree", "chain"])
    def test_a_rollout_serves_several_steps_and_iterations(self, rollout_mode, build):
        trainer = build(
            shared,
            World(),
            num_turns=3,
            rollout_mode=rollout_mode,
            per_device_train_batch_size=2,
            steps_per_generation=4,
            gradient_accumulation_steps=2,
            num_iterations=2,
            beta=0.1,
            early_termination_threshold=12.0,
            max_steps=5,
            kwargs={"train_dataset": dataset(8)},
        )
        batches, before = record_batches(trainer), [parameters(agent) for agent in trainer.agents]
        trainer.train()
        # Four micro-steps, twice, are four steps; the fifth samples anew
        assert len(batches) == 2
        assert trainer.state.global_step == 5
        for agent, old in zip(trainer.agents, before, strict=True):
            assert torch.isfinite(parameters(agent)).all() and not torch.equal(parameters(agent), old)
        for batch in batches:
            assert all(f"agent_{index}/old_per_token_logps" in batch for index in range(2))

    def test_every_row_is_learned_from_once_in_an_iteration(self, build, monkeypatch):
        """Rows of all turns, over all steps that share a rollout."""
        trainer = build(
            shared,
            World(),
            num_turns=2,
            per_device_train_batch_size=2,
            steps_per_generation=2,
            gradient_accumulation_steps=1,
            max_steps=2,
        )
        generated = record_generation(monkeypatch)
        seen, loss = {}, GRPOAgent.loss

        def recorded(self, model, inputs, *args, **kwargs):
            part = {f"agent_0/{name}": value for name, value in inputs.items()}
            seen.setdefault(id(self), []).extend(trained_tokens(part, 0))
            return loss(self, model, inputs, *args, **kwargs)

        monkeypatch.setattr(GRPOAgent, "loss", recorded)
        trainer.train()
        for agent in trainer.agent_trainers:
            assert len(seen[id(agent)]) == 12
            assert sorted(seen[id(agent)]) == sorted(generated(agent))

    def test_one_turn_with_an_environment_is_a_single_turn(self, build, monkeypatch, caplog):
        """The environment is not asked, which a warning says, and the weights are those without it."""
        caplog.set_level(logging.WARNING)
        asked = []

        def transition(prompt, agent_completions, num_agents):
            asked.append(prompt)
            return [prompt] * num_agents

        weights = []
        for environment in (None, transition):
            caplog.clear()
            trainer = build(shared, environment)
            warnings = [r.getMessage() for r in caplog.records if "external_transition" in r.getMessage()]
            assert len(warnings) == (1 if environment else 0)
            assert all("num_turns=1, so it is never called" in message for message in warnings)
            trainer.train()
            weights.append([parameters(agent) for agent in trainer.agents])
        assert not asked
        assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))

    def test_completions_of_every_turn_are_in_the_table(self, build, monkeypatch, tmp_path):
        trainer = build(
            by_turn({1: [1.0, 3.0], 2: [5.0, 7.0]}),
            repeat_task,
            num_turns=2,
            rollout_mode="chain",
            log_completions=True,
        )
        stub_rollouts(monkeypatch, trainer, [Script(1), Script(2)])
        heard = listen(trainer)
        trainer.train()
        frame = pd.read_parquet(next(tmp_path.rglob("completions_00001.parquet")))
        assert frame["turn"].tolist() == [1] * 4 + [2] * 4
        assert frame["rewards/reward_func"].tolist() == [1.0, 3.0] * 2 + [5.0, 7.0] * 2
        for index in range(2):
            pairs = zip(frame[f"agent_{index}/prompt"], frame[f"agent_{index}/completion"], strict=True)
            assert list(pairs) == heard[index]

    def test_texts_and_messages_are_in_one_table(self, build, monkeypatch, tmp_path):
        """A task is a text, and the environment goes on with a dialogue, which the table has as JSON."""
        dialogue = [{"role": "user", "content": "w5"}]
        trainer = build(
            shared,
            lambda prompt, agent_completions, num_agents: [dialogue] * num_agents,
            num_turns=2,
            rollout_mode="chain",
            log_completions=True,
            kwargs={"tokenizer": tok(chat_template=CHAT_TEMPLATE)},
        )
        stub_rollouts(monkeypatch, trainer, [Script(1), Script(2)])
        trainer.train()
        frame = pd.read_parquet(next(tmp_path.rglob("completions_00001.parquet")))
        tasks = {row["prompt"] for row in dataset(2)}
        for index in range(2):
            prompts = frame[f"agent_{index}/prompt"].tolist()
            assert set(prompts[:4]) == tasks
            assert [json.loads(prompt) for prompt in prompts[4:]] == [dialogue] * 4

    @pytest.mark.parametrize("rollout_mode", ["tree", "chain"])
    def test_an_environment_may_build_the_next_prompt_in_place(self, rollout_mode, build):
        """What one branch appends to the history is in no other's, nor in the dataset's row."""
        seen = []

        def transition(prompt, agent_completions, num_agents, prompt_history_per_agent, batch_item):
            seen.append((len(prompt), len(batch_item["prompt"])))
            following = []
            for past, text in zip(prompt_history_per_agent, agent_completions, strict=True):
                past[-1].append({"role": "assistant", "content": text})
                past[-1].append({"role": "user", "content": "w7"})
                following.append(past[-1])
            prompt.append({"role": "user", "content": "w8"})
            batch_item["prompt"].append({"role": "user", "content": "w9"})
            return following

        tasks = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"w{i} w9"}] for i in range(2)]})
        trainer = build(
            shared,
            transition,
            num_turns=3,
            rollout_mode=rollout_mode,
            kwargs={"train_dataset": tasks, "tokenizer": tok(chat_template=CHAT_TEMPLATE)},
        )
        heard = listen(trainer)
        trainer.train()
        assert set(seen) == {(1, 1)}
        second, third = (8, 16) if rollout_mode == "tree" else (4, 4)
        for rows in heard:
            assert [len(prompt) for prompt, _ in rows] == [1] * 4 + [3] * second + [5] * third
            assert {tuple(m["content"] for m in prompt) for prompt, _ in rows[:4]} == {("w0 w9",), ("w1 w9",)}
            told = Counter(prompt[1]["content"] for prompt, _ in rows[4 : 4 + second])
            assert set(told) == {text for _, text in rows[:4]}

    @pytest.mark.parametrize("where", ["formatter", "environment"])
    def test_a_prompt_without_tokens_is_an_error_that_names_the_actor(self, where, build):
        trainer = build(
            shared,
            lambda prompt, agent_completions, num_agents: ["w1", "" if where == "environment" else "w2"],
            num_turns=2,
            external_prompt_passthrough=True,
            agent_names=["left", "right"],
            kwargs={"formatters": [lambda row: "w3", lambda row: "" if where == "formatter" else "w4"]},
        )
        with pytest.raises(ValueError, match=r"right gets a prompt without any token: ''.*`external_transition`"):
            trainer.train()

    def test_messages_for_an_actor_without_a_chat_template_are_an_error_that_names_it(self, build):
        """The dataset's prompts are texts, so that this turns out in the second turn."""
        dialogue = [{"role": "user", "content": "w5"}]
        trainer = build(
            shared,
            lambda prompt, agent_completions, num_agents: ["w1", dialogue],
            num_turns=2,
            agent_names=["left", "right"],
        )
        with pytest.raises(ValueError, match=r"right gets a conversational prompt .*no chat template"):
            trainer.train()

    def test_a_second_training_samples_anew(self, build):
        """What the first one sampled would have served another iteration."""
        trainer = build(shared, max_steps=1, num_iterations=2)
        batches = record_batches(trainer)
        trainer.train()
        assert len(batches) == 1 and trainer.env_step == 4
        trainer.train()
        assert len(batches) == 2 and trainer.env_step == 8

    def test_sampling_is_batched_over_all_branches(self, build, monkeypatch):
        """A turn of a tree has as many calls as it has first turns in it, whatever the number of contexts."""
        calls, generate = [], GRPOTrainer._generate_single_turn

        def counted(self, prompt_ids, *args, **kwargs):
            calls.append(len(prompt_ids))
            return generate(self, prompt_ids, *args, **kwargs)

        trainer = build(shared, World(), num_turns=3)
        monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", counted)
        trainer.train()
        assert calls == [4] * (2 * (1 + 2 + 4))
