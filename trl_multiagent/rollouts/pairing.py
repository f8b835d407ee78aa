# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""
Which samples of the actors form joint responses.

N actors, S samples of each, G samples in a context (alternatives to each other), J joint responses, P joint responses
that each sample takes part in for its credit.
"""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass
class Pairing:
    """
    Attributes:
        members (`torch.Tensor` of shape `(J, N)`, dtype long): the sample of each actor in each joint response.
        columns (list of N `torch.Tensor` of shape `(S, P)`, dtype long): for each actor, the joint responses that its
            samples are credited with. In one column all samples of a context meet the same teammates (aligned: each
            meets the teammates of its own number).
    """

    members: torch.Tensor
    columns: list[torch.Tensor]


def runs(values: Sequence[int]) -> list[list[int]]:
    """Positions of equal neighbours: `[5, 5, 2]` is `[[0, 1], [2]]`."""
    return [list(group) for _, group in itertools.groupby(range(len(values)), key=values.__getitem__)]


def aligned(num_samples: int, num_agents: int) -> Pairing:
    """Sample j of every actor forms joint response j."""
    index = torch.arange(num_samples)
    return Pairing(index[:, None].expand(-1, num_agents), [index[:, None]] * num_agents)


def crossed(contexts: Sequence[Sequence[int]], num_agents: int, num_tuples: int | None, seed: str) -> Pairing:
    """
    Every sample meets several teammates: all combinations, or for each actor `num_tuples` random tuples of teammates,
    drawn without replacement, which all samples of the context meet. A sampled mean over such tuples estimates the
    mean over all of them without bias, and the teammates' share of the noise cancels in a column.

    Args:
        contexts (sequence of sequences):
            The samples of each context, the same number G in each.
        num_agents (`int`):
            Number N of actors.
        num_tuples (`int`, *optional*):
            Tuples P for each actor; `None`, or at least `G ** (N - 1)`, takes all.
        seed (`str`):
            Seed of the draw.

    Returns:
        [`Pairing`] with at most `G ** N` and at most `N * G * P` joint responses in a context.
    """
    members: list[tuple[int, ...]] = []
    columns: list[list[list[int]]] = [[] for _ in range(num_agents)]
    for number, samples in enumerate(contexts):
        rng = random.Random(f"{seed}/{number}")
        group, others = len(samples), num_agents - 1
        total = group**others
        known: dict[tuple[int, ...], int] = {}
        for agent in range(num_agents):
            if num_tuples is None or num_tuples >= total:
                tuples = list(itertools.product(range(group), repeat=others))
            else:
                tuples = [_digits(code, group, others) for code in sorted(rng.sample(range(total), num_tuples))]
            for own in range(group):
                row = []
                for teammates in tuples:
                    joint = (*teammates[:agent], own, *teammates[agent:])
                    if joint not in known:
                        known[joint] = len(members)
                        members.append(tuple(samples[choice] for choice in joint))
                    row.append(known[joint])
                columns[agent].append(row)
    order = [sample for samples in contexts for sample in samples]
    by_sample = [torch.tensor(rows)[_inverse(order)] for rows in columns]
    return Pairing(torch.tensor(members), by_sample)


def _digits(code: int, base: int, length: int) -> tuple[int, ...]:
    digits = []
    for _ in range(length):
        code, digit = divmod(code, base)
        digits.append(digit)
    return tuple(reversed(digits))


def _inverse(order: list[int]) -> torch.Tensor:
    return torch.tensor(order).argsort()
