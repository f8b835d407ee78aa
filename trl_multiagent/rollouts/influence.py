# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""
An alarm for actors whose reward does not depend on them (lazy agents, arXiv 2511.02303 gives them a bonus; here they
are only noticed).

An actor's share of the reward's variance is its total effect: exchange its answers for others that it gave to the same
task, hold the teammates' answers, and see how much the reward varies. With crossed joint responses the rewards are
there already; otherwise a reward function is asked again.
"""

import collections
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
from .pairing import runs


logger = logging.getLogger(__name__)

# Tasks in which an actor gave different answers without any effect on its reward, before it is called lazy. What an
# actor gives to one task is alike, so tasks count, and one whose share is a tenth goes unnoticed in a few of them.
ENOUGH_TASKS = 32
# Tasks of a process that are measured in a batch, where it takes reward calls
MEASURED_TASKS = 4
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
        # For each watched actor: tasks with different answers and varying rewards, and whether it ever had an effect
        self._tasks = dict.fromkeys(self.watched, 0)
        self._acts = dict.fromkeys(self.watched, False)
        # Running sums of effect and variance
        self._sums = dict.fromkeys(self.watched, (0.0, 0.0))
        self._warned: set[int] = set()

    def state(self) -> dict[str, Any]:
        """What was measured so far, as JSON."""
        return {
            "batches": self._batches,
            "warned": sorted(self._warned),
            "actors": [[agent, self._tasks[agent], self._acts[agent], *self._sums[agent]] for agent in self.watched],
        }

    def load(self, state: dict[str, Any]) -> None:
        self._batches, self._warned = state["batches"], set(state["warned"])
        for agent, tasks, acts, effect, variance in state["actors"]:
            self._tasks[agent], self._acts[agent], self._sums[agent] = tasks, acts, (effect, variance)

    def due(self, crossed: bool) -> list[int]:
        """The actors to measure in this training batch; ask once for each. Crossed joint responses cost nothing."""
        regular = self.every > 0 and self._batches % self.every == 0
        settling = self.every > 0 and self._batches < SETTLING_BATCHES
        self._batches += 1
        if regular or crossed:
            return self.watched
        unknown = [agent for agent in self.watched if not self._acts[agent] and agent not in self._warned]
        return unknown if settling else []

    def measure(self, batch: JointBatch, crossed: bool, agents: Sequence[int]) -> dict[int, float]:
        """
        Measure on a training batch of single turns. Call it on every process.

        Args:
            batch ([`JointBatch`]):
                The batch.
            crossed (`bool`):
                Whether its joint responses are combinations.
            agents (list of `int`):
                The actors, from `due`.

        Returns:
            `dict`: each measured actor's share; 0 for one without any influence, 1 for one that decides alone. Shares
            sum to more than 1 where actors act together.
        """
        turn, rewards = batch.turns[0], batch.rewards[0]
        shares = {}
        for agent in agents:
            measured = self._crossed(turn, agent, rewards) if crossed else self._exchanged(turn, agent, rewards)
            shares[agent] = self._share(agent, *measured)
        self._warn(agents)
        return {agent: share for agent, share in shares.items() if share is not None}

    def _crossed(self, turn: Turn, agent: int, rewards: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Rewards by the actor's choice, `(K, G, P)`, variances of the tasks, `(K,)`, and tasks of use here."""
        table = rewards[agent][turn.pairing.columns[agent][group_table(turn.contexts)].to(rewards.device)]
        members, first = turn.pairing.members, turn.first_members
        variances = []
        for own in runs([turn.contexts[sample] for sample in first]):
            if len(own) > MOST_PAIRED:  # neighbours share answers, so they are picked all over
                own = random.Random(0).sample(own, MOST_PAIRED)
            variances.append(_variance(members[own], rewards[agent][own]))
        local = turn.local(turn.contexts)
        texts = turn.completions[agent]
        useful = [len({texts[s] for s in own}) > 1 and variances[local[own[0]]] > 0 for own in runs(local)]
        return table, torch.stack(variances), sum(map(bool, useful))

    def _exchanged(self, turn: Turn, agent: int, rewards: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Some tasks of this process again, with the actor's answers moved on by one; as for `_crossed`."""
        own = turn.local(turn.tasks)
        sizes = collections.Counter(turn.tasks)
        whole = [s for s in runs(own) if 1 < len(s) == sizes[own[s[0]]]][:MEASURED_TASKS]
        tables, variances, useful = [rewards.new_empty(0, 2, 1)], [], 0
        for samples in whole:
            moved = samples[1:] + samples[:1]
            texts = [[said[s] for s in (moved if a == agent else samples)] for a, said in enumerate(turn.completions)]
            again = self.reward(texts, [turn.rows[s] for s in samples], [len(samples)], turn.number)
            before = rewards[agent][turn.start + samples[0] : turn.start + samples[0] + len(samples)]
            after = self.weighted(again.to(rewards.device))[agent]
            tables.append(torch.stack([before, after], dim=1).unsqueeze(-1))
            variances.append((nan_std(before, dim=0) ** 2).reshape(()))
            useful += bool(variances[-1] > 0) and len({turn.completions[agent][s] for s in samples}) > 1
        return torch.cat(tables), torch.stack(variances) if variances else rewards.new_empty(0), useful

    def _share(self, agent: int, table: torch.Tensor, variances: torch.Tensor, useful: int) -> float | None:
        """Total effect over variance, over all processes and the latest measurements."""
        effect = total_effect(table) if len(table) else table.new_tensor(torch.nan)
        variance = variances.nanmean() if len(variances) else effect
        known = not (effect.isnan() or variance.isnan())
        numbers = [effect.item(), variance.item(), 1.0, float(useful)] if known else [0.0] * 4
        totals = self.accelerator.reduce(torch.tensor(numbers, device=self.accelerator.device), reduction="sum")
        effect, variance, measured, useful = totals.tolist()
        self._acts[agent] = self._acts[agent] or effect > NO_EFFECT * variance
        if not measured or not variance:
            return None
        self._tasks[agent] += int(useful)
        past_effect, past_variance = self._sums[agent]
        self._sums[agent] = MEMORY * past_effect + effect, MEMORY * past_variance + variance
        return self._sums[agent][0] / self._sums[agent][1]

    def _warn(self, agents: Sequence[int]) -> None:
        for agent in agents:
            if self._acts[agent] or self._tasks[agent] < ENOUGH_TASKS or agent in self._warned:
                continue
            self._warned.add(agent)
            logger.warning(
                "The reward of %s seems not to depend on what it says: in %d tasks it stayed the same when the "
                "actor's answers were exchanged for others, while it varied with the teammates'. The actor then "
                "learns noise. Check `reward_func`, or freeze the actor with `trainable_agents`.",
                self.names[agent],
                self._tasks[agent],
            )


def _variance(members: torch.Tensor, returns: torch.Tensor) -> torch.Tensor:
    """
    Variance of the returns of one context's joint responses, `(J, N)` and `(J,)`: half the mean squared difference of
    two that share no actor's answer. (Those that share one are not independent.) NaN without such a pair.
    """
    apart = (members[:, None] != members[None]).all(dim=-1).to(returns.device)  # (J, J)
    return ((returns[:, None] - returns[None]) ** 2)[apart].nanmean() / 2
