# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Critics whose values are known by hand, worlds of several turns, and credit by a slow recursion."""

import random
import statistics
from dataclasses import dataclass, field

import torch
from tiny import lm


WORD = 3  # id of the word w0
EOS = 2

# turns, rollout mode, threshold of early termination, samples of a context; the last has rows that fill up
SHAPES = {
    "one turn": (1, "tree", None, 2),
    "tree": (3, "tree", None, 2),
    "chain": (3, "chain", None, 2),
    "tree that ends early": (3, "tree", 0.5, 2),
    "chain that ends early": (3, "chain", 0.5, 3),
}


def table(seed: int, size: int = 32) -> list[float]:
    """A number for each token."""
    draw = random.Random(seed)
    return [round(draw.uniform(-2, 2), 2) for _ in range(size)]


def table_lm(values: list[float], seed: int = 0):
    """
    A language model without a memory: its last state says which token it read last, and begins with that token's
    number. A head that reads the first coordinate gives that number.
    """
    model = lm(seed, vocab=len(values))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embeddings = model.get_input_embeddings().weight
        embeddings.zero_()
        for token, value in enumerate(values):
            embeddings[token, 0] = value
            embeddings[token, 1] = (16 - value**2) ** 0.5  # a norm of 4 in 16 coordinates is left as it is
    return model


def read_first_coordinate(head) -> None:
    """Let a linear value head give the first coordinate of a state."""
    (layer,) = head.net
    with torch.no_grad():
        layer.weight.zero_()
        layer.weight[0, 0] = 1.0
        layer.bias.zero_()


def heads(trainer) -> list:
    """All value heads of a team: of its critics, or on its actors."""
    return [module.value_head for module in trainer.critics or trainer.agents]


@dataclass
class Step:
    """
    A step of an interaction: the reward that it brings, the value of what stands before it (`None` where there is
    none), and what may follow it, each with equal chances.
    """

    reward: float
    value: float | None
    following: list["Step"] = field(default_factory=list)

    def value_before(self, discount: float) -> float:
        if self.value is not None:
            return self.value
        return self.reward + discount * _mean([step.value_before(discount) for step in self.following])

    def target(self, discount: float, gae_lambda: float) -> float:
        """The lambda-return: in place of what follows, a mix of its value and of its own lambda-return."""
        return self.reward + discount * _mean(
            [
                (1 - gae_lambda) * step.value_before(discount) + gae_lambda * step.target(discount, gae_lambda)
                for step in self.following
            ]
        )

    def advantage(self, discount: float, gae_lambda: float) -> float:
        return self.target(discount, gae_lambda) - self.value


def _mean(values: list[float]) -> float:
    return statistics.mean(values) if values else 0.0


class Talk:
    """Different answers, the same in each run; keeps the ids of what was asked and answered, in order."""

    def __init__(self, seed: int, answers=None, vocab: int = 32):
        self.draw, self.answers, self.vocab = random.Random(seed), list(answers or []), vocab
        self.asked: list[list[int]] = []
        self.said: list[list[int]] = []

    def __call__(self, prompt_ids):
        answers = [
            self.answers.pop(0) if self.answers else [self.draw.randrange(WORD, self.vocab)] for _ in prompt_ids
        ]
        self.asked += [list(ids) for ids in prompt_ids]
        self.said += answers
        return answers


class Rewards:
    """
    A reward function for two actors, to be called once a turn: random numbers, one for each joint response or, with
    `own`, one list for each actor. Keeps them, one `(2, J)` list for each turn.
    """

    def __init__(self, seed: int, own: bool = False, given=None):
        self.draw, self.own, self.given = random.Random(seed), own, list(given or [])
        self.turns: list[list[list[float]]] = []
        self.__name__ = "rewards"

    def __call__(self, first, second):
        values = [[round(self.draw.uniform(-3, 3), 2) for _ in first] for _ in range(2)]
        if self.given:
            values = self.given.pop(0)
        if not self.own:
            values = [values[0], values[0]]
        self.turns.append(values)
        return values if self.own else values[0]


def next_words(prompt, agent_completions, num_agents, response_history_per_agent):
    """Prompts of different lengths that differ by what was said so far."""
    prompts = []
    for responses in response_history_per_agent:
        numbers = [int(word[1:]) for text in responses for word in text.split() if word[:1] == "w"]
        prompts.append(" ".join([f"w{sum(numbers) % 9}"] * (1 + len(numbers) % 3) + [f"w{sum(numbers) % 29}"]))
    return prompts


def followers(rewards, generations: int, tree: bool, threshold: float | None = None) -> list[list[list[int]]]:
    """
    For each turn and each joint response the numbers of those that continue it in the next turn, one task. In a tree
    the samples of a context end or go on together.
    """
    result = []
    for number, turn in enumerate(rewards):
        means = [statistics.mean(values) for values in zip(*turn, strict=True)]  # over the actors
        if tree:
            contexts = [means[start : start + generations] for start in range(0, len(means), generations)]
            means = [statistics.mean(context) for context in contexts for _ in context]
        going = [threshold is None or not mean > threshold for mean in means]
        if number == len(rewards) - 1:
            result.append([[] for _ in means])
            continue
        width, start, of_turn = generations if tree else 1, 0, []
        for goes_on in going:
            of_turn.append(list(range(start, start + width)) if goes_on else [])
            start += width if goes_on else 0
        assert start == len(rewards[number + 1][0])
        result.append(of_turn)
    return result


def turn_steps(rewards, values, following) -> list[list[Step]]:
    """Steps of an actor's turns, from lists for each turn over its joint responses."""
    turns = [
        [Step(reward, value) for reward, value in zip(*turn, strict=True)]
        for turn in zip(rewards, values, strict=True)
    ]
    link(turns, turns, following)
    return turns


def link(last_steps, first_steps, following) -> None:
    """Let the first steps of a turn follow the last ones of the turn before."""
    for number, of_turn in enumerate(following):
        for last, later in zip(last_steps[number], of_turn, strict=True):
            last.following += [first_steps[number + 1][index] for index in later]


def credit_of_turns(
    shape: str, critic_type: str, rewards, agent: int, flat_values, discount: float, lam: float
) -> tuple[list[float], list[float]]:
    """An actor's advantages and targets over the rows of all turns, one task."""
    _, rollout_mode, threshold, generations = SHAPES[shape]
    tree = rollout_mode == "tree"
    following = followers(rewards, generations, tree, threshold)
    continued = [bool(later) for of_turn in following[:-1] for later in of_turn]
    assert set(continued) == ({True, False} if threshold is not None else {True} if continued else set())
    values = by_turn(flat_values, rewards)
    steps = turn_steps([turn[agent] for turn in rewards], values, following)
    targets = [step.target(discount, lam) for turn in steps for step in turn]
    if critic_type == "v":
        return [step.advantage(discount, lam) for turn in steps for step in turn], targets
    widths = [generations] + [generations if tree else 1] * (len(steps) - 1)
    baselines = [value for turn in mean_of_others(values, widths) for value in turn]
    return [target - baseline for target, baseline in zip(targets, baselines, strict=True)], targets


def by_turn(values, rewards) -> list[list]:
    """A flat list over the rows of an actor as one list for each turn."""
    turns, start = [], 0
    for turn in rewards:
        turns.append(list(values[start : start + len(turn[0])]))
        start += len(turn[0])
    assert start == len(values)
    return turns


def mean_of_others(values: list[list[float]], width_of_turn: list[int]) -> list[list[float]]:
    """For each sample the mean over the others of its context; alone there, over the turn's other contexts."""
    result = []
    for turn, width in zip(values, width_of_turn, strict=True):
        means = []
        for index in range(len(turn)):
            others = [v for j, v in enumerate(turn) if j != index and (width == 1 or j // width == index // width)]
            means.append(_mean(others))
        result.append(means)
    return result


def first_rows(batch, name: str, count: int) -> list:
    """The first rows of an entry of a recorded batch."""
    return batch[name][:count].tolist()
