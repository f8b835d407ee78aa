# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""
Joint rollouts over one or several turns.

N actors, S samples of each actor in a turn over all processes, J joint responses of a turn, F reward functions, G
samples for each context. A context is what samples are alternatives to: a task in the first turn, later a joint
response that the environment replied to. Everything is ordered by process, and within one by task, so that the order,
and with it every baseline, is the same for any number of processes. The structure (who continues whom) follows from
the rewards, which every process has; texts stay where they were sampled.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from ..rewards import JointReward
from .formatters import ActorFormatter, Prompt, check_one_kind
from .pairing import Pairing, aligned, crossed, runs
from .transition import History, Transition


class Actor(Protocol):
    """What a rollout needs of an actor: texts for the first `num_kept` prompts, of which all must be sampled."""

    def sample(self, prompts: list[Prompt], num_kept: int | None = None, greedy: bool = False) -> list[str]: ...


@dataclass(frozen=True)
class RolloutSettings:
    """
    Attributes:
        num_generations (`int`): samples G for each task.
        num_turns (`int`): most turns of an interaction.
        tree (`bool`): whether each joint response branches into G; otherwise it goes on alone.
        sequential (`bool`): whether the actors of a turn speak one after the other, each with what was said before.
        cross (`bool`): whether samples form joint responses in all combinations, instead of number by number.
        cross_samples (`int`, *optional*): with `cross`, teammate tuples for each actor; `None` for all.
        early_termination_threshold (`float`, *optional*): a context (tree) or a joint response (chain) whose reward,
            a mean over its joint responses and over the actors, is above it is not continued.
        external_prompt_passthrough (`bool`): whether the environment's prompts are used as they are.
        seed (`str`): seed of the draw of teammates.
        greedy (`bool`): whether the actors take their most probable tokens, and keep nothing for training.
    """

    num_generations: int
    num_turns: int = 1
    tree: bool = True
    sequential: bool = False
    cross: bool = False
    cross_samples: int | None = None
    early_termination_threshold: float | None = None
    external_prompt_passthrough: bool = False
    seed: str = ""
    greedy: bool = False

    @property
    def grouped(self) -> bool:
        """Whether neighbouring samples are one group of joint responses, so that TRL can compare their rewards."""
        return self.num_turns == 1 and not self.cross


@dataclass
class Branch:
    """Where samples of one context stand: the task, what was said so far, and the environment's last words."""

    row: dict[str, Any]
    history: History
    external: list[Prompt] | None = None


@dataclass
class Turn:
    """
    One turn of the joint rollouts.

    Attributes:
        number (`int`): from 1.
        tasks (list of `int`, length S): number of each sample's task in the batch.
        contexts (list of `int`, length S): number of each sample's context.
        counts (list of `int`): samples of each process.
        process_index (`int`): number of this process.
        pairing ([`Pairing`]): which samples form joint responses.
        parents (`torch.Tensor` of shape `(J,)`): the joint response of the turn before that each one continues.
        rewards (`torch.Tensor` of shape `(N, J, F)`): what each reward function gave, NaN where there is none.
        branches (list of [`Branch`]): for each sample of this process.
        prompts, completions (`N x samples of this process`): what each actor was asked and answered.
    """

    number: int
    tasks: list[int]
    contexts: list[int]
    counts: list[int]
    process_index: int
    pairing: Pairing
    parents: torch.Tensor
    branches: list[Branch]
    prompts: list[list[Prompt]]
    completions: list[list[str]]
    rewards: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The dataset row of each sample of this process."""
        return [branch.row for branch in self.branches]

    @property
    def start(self) -> int:
        """Number of this process's first sample."""
        return sum(self.counts[: self.process_index])

    def local(self, values: list[int]) -> list[int]:
        """This process's part of a list over the samples of all processes."""
        return values[self.start : self.start + len(self.branches)]

    @property
    def first_members(self) -> list[int]:
        """For each joint response, the first actor's sample in it."""
        return self.pairing.members[:, 0].tolist()


class Interaction:
    """
    Lets a team answer, scores it, and lets the environment reply, turn by turn. All contexts of a turn are sampled in
    one batch for each actor, cut into parts no larger than the first turn's.

    Args:
        actors (sequence of [`Actor`]):
            The actors, in actor order.
        formatters (sequence of [`ActorFormatter`]):
            One for each actor.
        reward ([`JointReward`]):
            The reward functions.
        weighted (`Callable`):
            Rewards `(N, J, F)` to their weighted sum `(N, J)`.
        accelerator ([`~accelerate.Accelerator`]):
            The processes.
        transition ([`Transition`], *optional*):
            The environment. Needed for more than one turn.
    """

    def __init__(
        self,
        actors: Sequence[Actor],
        formatters: Sequence[ActorFormatter],
        reward: JointReward,
        weighted: Callable[[torch.Tensor], torch.Tensor],
        accelerator: Accelerator,
        transition: Transition | None = None,
    ):
        self.actors = actors
        self.formatters = formatters
        self.reward = reward
        self.weighted = weighted
        self.accelerator = accelerator
        self.transition = transition

    def run(self, rows: list[dict[str, Any]], settings: RolloutSettings, num_wanted: int | None = None) -> list[Turn]:
        """
        Roll out all turns. Call it on every process, with equally many rows.

        Args:
            rows (list of `dict`, length B):
                Dataset rows of this process, each repeated for its group. A group may span processes.
            settings ([`RolloutSettings`]):
                How.
            num_wanted (`int`, *optional*):
                How many of the rows of all processes are to be scored and continued; the rest only fills the last
                batch of an evaluation.

        Returns:
            list of [`Turn`], at most `num_turns`.
        """
        world, rank, group = self.accelerator.num_processes, self.accelerator.process_index, settings.num_generations
        tasks = [sample // group for sample in range(world * len(rows))]
        wanted = range(len(tasks) if num_wanted is None else num_wanted)
        own_tasks = tasks[rank * len(rows) : (rank + 1) * len(rows)]
        branches: list[Branch] = []
        for number, row in enumerate(rows):
            same = number > 0 and own_tasks[number] == own_tasks[number - 1]
            branches.append(branches[-1] if same else Branch(row, History.empty(len(self.actors))))
        spans = world > 1 and len(rows) % group > 0
        fillers: list[Prompt | None] = [None] * len(self.actors)
        counts, contexts, context_parents = [len(rows)] * world, tasks, [-1] * (tasks[-1] + 1 if tasks else 0)
        turns: list[Turn] = []
        for number in range(1, settings.num_turns + 1):
            prompts, completions = self._sample(branches, max(counts), len(rows), settings, fillers)
            pairing = self._pair(contexts, settings, number)
            parents = torch.tensor([context_parents[contexts[sample]] for sample in pairing.members[:, 0].tolist()])
            turn = Turn(number, tasks, contexts, counts, rank, pairing, parents, branches, prompts, completions)
            turn.rewards = self._score(turn, spans, wanted)
            turns.append(turn)
            continued = self._continued(turn, settings, wanted) if number < settings.num_turns else []
            if not continued:
                break
            width = group if settings.tree else 1
            first = turn.first_members
            owners = _owners(counts)
            tasks = [turn.tasks[first[joint]] for joint in continued for _ in range(width)]
            wanted = range(len(tasks))  # what is not wanted was not continued
            contexts = [context for context in range(len(continued)) for _ in range(width)]
            context_parents = continued
            counts = [width * sum(owners[first[joint]] == process for joint in continued) for process in range(world)]
            own = [joint for joint in continued if owners[first[joint]] == rank]
            branches = [branch for branch in self._reply(turn, own) for _ in range(width)]
        return turns

    # Sampling

    def _sample(
        self,
        branches: list[Branch],
        size: int,
        limit: int,
        settings: RolloutSettings,
        fillers: list[Prompt | None],
    ) -> tuple[list[list[Prompt]], list[list[str]]]:
        """
        What every actor is asked and answers, `N x samples of this process`. Each process samples `size` prompts in
        parts of `limit`, so that all make the same calls; where it has fewer, a prompt of before fills up.
        """
        prompts: list[list[Prompt]] = []
        completions: list[list[str]] = []
        for index, (actor, formatter) in enumerate(zip(self.actors, self.formatters, strict=True)):
            asked = self._ask(index, formatter, branches, completions, settings)
            check_one_kind(formatter.name, asked)
            fillers[index] = asked[0] if asked else fillers[index]
            said: list[str] = []
            padded = asked + [fillers[index]] * (size - len(asked))
            for start in range(0, size, max(limit, 1)):
                part = padded[start : start + limit]
                kept = min(max(len(asked) - start, 0), len(part))
                said += actor.sample(part, num_kept=kept, greedy=settings.greedy)
            prompts.append(asked)
            completions.append(said)
        return prompts, completions

    def _ask(
        self,
        index: int,
        formatter: ActorFormatter,
        branches: list[Branch],
        completions: list[list[str]],
        settings: RolloutSettings,
    ) -> list[Prompt]:
        """One actor's prompts. Samples of one context share one, unless the actor hears what others just said."""
        hears = settings.sequential and formatter.takes_earlier and index > 0
        prompts: list[Prompt] = []
        for sample, branch in enumerate(branches):
            if sample and branch is branches[sample - 1] and not hears:
                prompts.append(prompts[-1])
                continue
            earlier = [said[sample] for said in completions] if settings.sequential else None
            if branch.external is None:
                prompts.append(formatter.first_prompt(branch.row, earlier))
            elif settings.external_prompt_passthrough:
                prompts.append(branch.external[index])
            else:
                prompts.append(formatter.next_prompt(branch.row, branch.external[index], earlier))
        return prompts

    def _pair(self, contexts: list[int], settings: RolloutSettings, number: int) -> Pairing:
        if not settings.cross:
            return aligned(len(contexts), len(self.actors))
        return crossed(runs(contexts), len(self.actors), settings.cross_samples, f"{settings.seed}/{number}")

    # Scoring

    def _score(self, turn: Turn, spans: bool, wanted: range) -> torch.Tensor:
        """
        Rewards of all joint responses, `(N, J, F)`. A reward function sees all of a task that a turn has at once:
        where tasks span processes, texts are gathered and the tasks are shared out.
        """
        accelerator, rank = self.accelerator, turn.process_index
        rows, completions, start = turn.rows, turn.completions, turn.start
        if spans:
            rows, completions, start = gather_object(rows), [gather_object(texts) for texts in completions], 0
        first, owners = turn.first_members, _owners(turn.counts)
        members = turn.pairing.members.tolist()
        scored = [joint for joint, sample in enumerate(first) if sample in wanted]
        own = [
            joint
            for joint in scored
            if rank == (turn.tasks[first[joint]] % accelerator.num_processes if spans else owners[first[joint]])
        ]
        rewards = torch.zeros(len(self.actors), len(first), len(self.reward.funcs))
        if own:
            texts = [[said[members[joint][agent] - start] for joint in own] for agent, said in enumerate(completions)]
            sizes = [len(run) for run in runs([turn.tasks[first[joint]] for joint in own])]
            rewards[:, own] = self.reward(texts, [rows[first[joint] - start] for joint in own], sizes, turn.number)
        rewards = rewards.to(accelerator.device)
        if accelerator.num_processes > 1:
            rewards = accelerator.reduce(rewards, reduction="sum")  # each value and zeros
        unscored = sorted(set(range(len(first))) - set(scored))
        rewards[:, unscored] = torch.nan
        return rewards

    # From one turn to the next

    def _continued(self, turn: Turn, settings: RolloutSettings, wanted: range) -> list[int]:
        """The joint responses that go on."""
        first = turn.first_members
        going = [joint for joint, sample in enumerate(first) if sample in wanted]
        threshold = settings.early_termination_threshold
        if threshold is None:
            return going
        values = self.weighted(turn.rewards).nanmean(dim=0).tolist()  # (J,), NaN where there is no reward
        if settings.tree:
            by_context: dict[int, list[float]] = {}
            for sample, value in zip(first, values, strict=True):
                by_context.setdefault(turn.contexts[sample], []).append(value)
            means = {c: torch.tensor(v, dtype=torch.float64).nanmean().item() for c, v in by_context.items()}
            values = [means[turn.contexts[sample]] for sample in first]
        return [joint for joint in going if not values[joint] > threshold]  # a missing reward ends nothing

    def _reply(self, turn: Turn, joints: list[int]) -> list[Branch]:
        """The environment's replies to joint responses of this process."""
        assert self.transition is not None, "several turns need an environment: it was checked"
        members, start = turn.pairing.members.tolist(), turn.start
        branches = [turn.branches[members[joint][0] - start] for joint in joints]
        histories = [
            branch.history.then(
                [asked[sample - start] for asked, sample in zip(turn.prompts, members[joint], strict=True)],
                [said[sample - start] for said, sample in zip(turn.completions, members[joint], strict=True)],
            )
            for branch, joint in zip(branches, joints, strict=True)
        ]
        rows = [branch.row for branch in branches]
        externals = self.transition(rows, histories, turn.number)
        return [Branch(*parts) for parts in zip(rows, histories, externals, strict=True)]


def _owners(counts: list[int]) -> list[int]:
    """The process of each sample."""
    return [process for process, count in enumerate(counts) for _ in range(count)]
