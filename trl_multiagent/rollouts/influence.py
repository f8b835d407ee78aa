# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""
An alarm for actors whose reward does not depend on them (lazy agents, arXiv 2511.02303 gives them a bonus; here they
are only noticed).

An actor's share of the reward's variance is its total effect: exchange its answers for others that it gave to the same
task, hold the teammates' answers, and see how much the reward varies. With crossed joint responses the rewards are
there already; otherwise a reward function is asked again.
"""

import itertools
import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import Accelerator

from ..functional.advantages import nan_std, total_effect
from ..functional.groups import group_table
from ..rewards import JointReward
from .batch import JointBatch
from .interaction import Turn


logger = logging.getLogger(__name__)

# Exchanges of different answers without any effect, before an actor is called lazy
ENOUGH_EXCHANGES = 8
# Generation batches that may be measured one after the other until it is known who acts
SETTLING_BATCHES = 16
# A share of the variance that is rounding
NO_EFFECT = 1e-6
# Joint responses of a context that are compared with each other for the variance
MOST_PAIRED = 256
# How much of what was measured before counts beside a new measurement: one batch alone is noisy
MEMORY = 0.9


class InfluenceMonitor:
    """
    Measures each actor's share of the variance of its reward within tasks, and warns once of an actor that has none.

    Args:
        names (list of `str`):
            Names of the actors.
        watched (list of `int`):
            The actors to measure.
        reward ([`JointReward`]):
            The reward functions.
        weighted (`Callable`):
            Rewards `(N, J, F)` to their weighted sum `(N, J)`.
        accelerator ([`~accelerate.Accelerator`]):
            The processes.
        every (`int`):
            Every how many generation batches to measure, after the first ones. 0: never, unless it costs nothing.
    """

    def __init__(
        self,
        names: Sequence[str],
        watched: Sequence[int],
        reward: JointReward,
        weighted: Callable[[torch.Tensor], torch.Tensor],
        accelerator: Accelerator,
        every: int,
    ):
        self.names = names
        self.watched = list(watched)
        self.reward = reward
        self.weighted = weighted
        self.accelerator = accelerator
        self.every = every
        self._batches = 0
        # For each watched actor: exchanges of different answers, and whether the reward ever changed
        self._exchanges = dict.fromkeys(self.watched, 0)
        self._acts = dict.fromkeys(self.watched, False)
        self._reward_varies = False
        # Running sums of effect and variance
        self._sums = dict.fromkeys(self.watched, (0.0, 0.0))
        self._warned: set[int] = set()

    def state(self) -> dict[str, Any]:
        """What was measured so far, as JSON."""
        return {
            "batches": self._batches,
            "reward_varies": self._reward_varies,
            "warned": sorted(self._warned),
            "actors": [
                [agent, self._exchanges[agent], self._acts[agent], *self._sums[agent]] for agent in self.watched
            ],
        }

    def load(self, state: dict[str, Any]) -> None:
        self._batches, self._reward_varies = state["batches"], state["reward_varies"]
        self._warned = set(state["warned"])
        for agent, exchanges, acts, effect, variance in state["actors"]:
            self._exchanges[agent], self._acts[agent], self._sums[agent] = exchanges, acts, (effect, variance)

    def is_due(self, crossed: bool) -> bool:
        """Whether this training batch is to be measured; ask once for each. Crossed, it costs nothing."""
        unknown = any(not self._acts[agent] and agent not in self._warned for agent in self.watched)
        settling = unknown and self._batches < SETTLING_BATCHES
        due = self.every > 0 and (settling or self._batches % self.every == 0)
        self._batches += 1
        return bool(self.watched) and (due or crossed)

    def measure(self, batch: JointBatch, crossed: bool) -> dict[int, float]:
        """
        Measure on a training batch. Call it on every process.

        Args:
            batch ([`JointBatch`]):
                The batch; its first turn is looked at.
            crossed (`bool`):
                Whether its joint responses are combinations.

        Returns:
            `dict`: each measured actor's share; 0 for one without any influence, 1 for one that decides alone. Shares
            sum to more than 1 where actors act together.
        """
        turn, returns = batch.turns[0], batch.returns[0]
        shares = {}
        for agent in self.watched:
            tables = self._crossed(turn, agent, returns) if crossed else self._exchanged(turn, agent, returns)
            shares[agent] = self._share(agent, *tables)
        self._warn()
        return {agent: share for agent, share in shares.items() if share is not None}

    def _crossed(self, turn: Turn, agent: int, returns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
        contexts = group_table(turn.contexts)
        table = returns[agent][turn.pairing.columns[agent][contexts].to(returns.device)]  # (K, G, P)
        members = turn.pairing.members
        variances = []
        for context in range(len(contexts)):
            own = [joint for joint, sample in enumerate(turn.first_members) if turn.contexts[sample] == context]
            if len(own) > MOST_PAIRED:  # neighbours share answers, so they are picked all over
                own = random.Random(0).sample(own, MOST_PAIRED)
            variances.append(_variance(members[own], returns[agent][own]))
        return table, torch.stack(variances), self._different(turn, agent) * table.size(2)

    def _different(self, turn: Turn, agent: int) -> int:
        """Pairs of neighbouring samples of one context, on this process, with different texts."""
        own = turn.contexts[turn.start : turn.start + len(turn.branches)]
        pairs = zip(itertools.pairwise(own), itertools.pairwise(turn.completions[agent]), strict=True)
        return sum(contexts[0] == contexts[1] and texts[0] != texts[1] for contexts, texts in pairs)

    def _exchanged(self, turn: Turn, agent: int, returns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
        """One task of this process again, with the actor's answers moved on by one. Empty if no task is whole here."""
        empty = returns.new_empty(0, 2, 1), returns.new_empty(0), 0
        own = turn.tasks[turn.start : turn.start + len(turn.branches)]
        samples = next((s for s in _by_value(own) if len(s) > 1 and turn.tasks.count(own[s[0]]) == len(s)), None)
        if samples is None:
            return empty
        moved = samples[1:] + samples[:1]
        texts = [[said[s] for s in (moved if a == agent else samples)] for a, said in enumerate(turn.completions)]
        again = self.reward(texts, [turn.rows[s] for s in samples], [len(samples)], turn.number)
        first = turn.start + samples[0]
        before = returns[agent][first : first + len(samples)]
        after = self.weighted(again.to(returns.device))[agent]
        said = turn.completions[agent]
        different = sum(said[a] != said[b] for a, b in zip(samples, moved, strict=True))
        variance = (nan_std(before, dim=0) ** 2).reshape(1)
        return torch.stack([before, after], dim=1).unsqueeze(-1), variance, different

    def _share(self, agent: int, table: torch.Tensor, variances: torch.Tensor, different: int) -> float | None:
        """Total effect over variance, over all processes and the latest measurements."""
        effect = total_effect(table) if len(table) else table.new_tensor(torch.nan)
        variance = variances.nanmean() if len(variances) else effect
        known = not (effect.isnan() or variance.isnan())
        numbers = [effect.item(), variance.item(), 1.0, float(different)] if known else [0.0] * 4
        totals = self.accelerator.reduce(torch.tensor(numbers, device=self.accelerator.device), reduction="sum")
        effect, variance, measured, different = totals.tolist()
        self._reward_varies = self._reward_varies or variance > 0
        self._acts[agent] = self._acts[agent] or effect > NO_EFFECT * variance
        if not measured or not variance:
            return None
        self._exchanges[agent] += int(different)
        past_effect, past_variance = self._sums[agent]
        self._sums[agent] = MEMORY * past_effect + effect, MEMORY * past_variance + variance
        return self._sums[agent][0] / self._sums[agent][1]

    def _warn(self) -> None:
        for agent in self.watched:
            lazy = not self._acts[agent] and self._exchanges[agent] >= ENOUGH_EXCHANGES
            if lazy and self._reward_varies and agent not in self._warned:
                self._warned.add(agent)
                logger.warning(
                    "The reward of %s does not depend on it: it stayed the same in all of %d exchanges of its answers "
                    "for others, while it varied with what the teammates said. It learns noise. Check `reward_func`, "
                    "or freeze the actor with `trainable_agents`.",
                    self.names[agent],
                    self._exchanges[agent],
                )


def _variance(members: torch.Tensor, returns: torch.Tensor) -> torch.Tensor:
    """
    Variance of the returns of one context's joint responses, `(J, N)` and `(J,)`: half the mean squared difference of
    two that share no actor's answer. (Those that share one are not independent.) NaN without such a pair.
    """
    apart = (members[:, None] != members[None]).all(dim=-1).to(returns.device)  # (J, J)
    return ((returns[:, None] - returns[None]) ** 2)[apart].nanmean() / 2


def _by_value(values: Sequence[int]) -> list[list[int]]:
    """Positions of equal neighbours."""
    return [list(group) for _, group in itertools.groupby(range(len(values)), key=values.__getitem__)]
