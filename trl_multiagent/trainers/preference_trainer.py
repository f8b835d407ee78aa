# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""What the preference trainers share: the team answers its tasks, and pairs of its answers become the data."""

import contextlib
import copy
import inspect
import logging
import math
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.utils import gather_object
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from ..agents.loading import resolve_num_agents
from ..rollouts.batch import JointBatch
from ..rollouts.centralized import CentralizedFormatter, CentralizedReward, JointResponseFormat
from ..rollouts.formatters import of_one_kind, resolve_formatters
from ..rollouts.interaction import Interaction, RolloutSettings, Turn
from ..rollouts.preferences import (
    Candidate,
    Group,
    PreferencePair,
    holds_pairs,
    pairs_of_dataset,
    select_pairs,
    write_pairs,
)
from .multi_agent_trainer import MultiAgentTrainer
from .preference_config import PreferenceConfig


logger = logging.getLogger(__name__)


class PreferenceTrainer(MultiAgentTrainer):
    """
    What the preference trainers share. A run has one or several *iterations*; each begins with its data: the team
    gives `preference_num_candidates` joint answers to every task, `reward_func` scores them, and pairs of a better
    and a worse one are written to `preference_dir`. A training set that already has pairs needs no sampling.

    Subclasses override `_prepare_iteration` (from pairs to what is trained).

    Args:
        response_format ([`~trl_multiagent.rollouts.centralized.JointResponseFormat`], *optional*):
            With `collaboration_mode="centralized"`, how the one actor is asked for the answers of all roles, and how
            they are read.
        **kwargs:
            See [`MultiAgentTrainer`]. With `collaboration_mode="centralized"`, `num_agents`, `agent_names`,
            `formatters` and the arguments of `reward_func` are those of the roles, and there is one model. The
            training set has tasks, or the columns `prompts`, `winner_completions` and `loser_completions` (a list with
            one entry for each actor; for one actor also TRL's `prompt`, `chosen`, `rejected`); then no `reward_func`
            is needed.
    """

    config_class: ClassVar[type[PreferenceConfig]] = PreferenceConfig

    def __init__(self, *args, response_format: JointResponseFormat | None = None, **kwargs):
        names = list(inspect.signature(MultiAgentTrainer.__init__).parameters)[1:]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        config = given.get("args") or self.config_class()
        self._centralized_rewards: list[CentralizedReward] = []
        if config.collaboration_mode == "centralized":
            given |= self._centralize(given, config, response_format or JointResponseFormat())
        elif response_format is not None:
            raise ValueError("`response_format` is read with collaboration_mode='centralized' only.")
        self._learns_from_dataset = has_pairs(given.get("train_dataset"))
        if self._learns_from_dataset and not given.get("reward_func") and not given.get("reward_funcs"):
            given["reward_func"] = no_reward
        # The iteration whose data is there, and what it begins with
        self._iteration = -1
        self._pairs: list[PreferencePair] = []
        self._preference_directory: Path | None = None
        super().__init__(**given)

    def _centralize(
        self, given: dict[str, Any], config: PreferenceConfig, response_format: JointResponseFormat
    ) -> dict[str, Any]:
        """Arguments of a team of one actor that answers for all roles."""
        num_roles = resolve_num_agents(given.get("num_agents"), config.num_agents)
        if num_roles is None:
            raise ValueError("collaboration_mode='centralized' needs `num_agents`, the number of roles.")
        names = config.agent_names or [f"agent_{role}" for role in range(num_roles)]
        funcs = given.pop("reward_func", None) or given.pop("reward_funcs", None) or []
        funcs = list(funcs) if isinstance(funcs, (list, tuple)) else [funcs]
        formatters = resolve_formatters(given.get("formatters"), names)
        self._centralized_rewards = [
            CentralizedReward(func, num_roles, response_format, config.unparsable_reward) for func in funcs
        ]
        config = copy.copy(config)
        config.num_agents, config.agent_names = 1, None
        return {
            "args": config,
            "num_agents": 1,
            "formatters": CentralizedFormatter(formatters, response_format),
            "reward_func": self._centralized_rewards,
        }

    def _check_dataset(self, dataset: Any, tokenizers: Sequence[PreTrainedTokenizerBase]) -> None:
        if not has_pairs(dataset):
            super()._check_dataset(dataset, tokenizers)
        else:
            pairs_of_dataset(dataset, len(tokenizers))

    # Iterations

    def _iteration_of(self, epoch: int) -> int:
        """The iteration that an epoch belongs to."""
        return 0

    def _describe(self) -> dict[str, Any]:
        return {**super()._describe(), "preference_data": "dataset" if self._learns_from_dataset else "sampled"}

    def train(self, *args, **kwargs):
        self._iteration, self._pairs, self._preference_directory = -1, [], None  # what an earlier training left
        return super().train(*args, **kwargs)

    train.__doc__ = MultiAgentTrainer.train.__doc__

    def _on_epoch_begin(self) -> None:
        super()._on_epoch_begin()
        iteration = self._iteration_of(self._position.epoch)
        if iteration > self._iteration:
            self._begin_iteration(iteration)

    def _begin_iteration(self, iteration: int) -> None:
        """Get an iteration's pairs, and prepare what is trained on them."""
        if self._learns_from_dataset:
            pairs = pairs_of_dataset(self.train_dataset, len(self.agents))
        else:
            pairs = self._collect_pairs(iteration)
            self._keep(iteration, pairs)
        self._pairs = self._choose(iteration, pairs)
        self._iteration = iteration
        self._prepare_iteration()

    def _collect_point_of_begin(self) -> None:
        """Let SIGTERM before an iteration's first step save the iteration as it begins."""
        if self._preemption is not None and self._preemption.enabled:
            self._point = self._try_to_collect()

    def _choose(self, iteration: int, pairs: list[PreferencePair]) -> list[PreferencePair]:
        """The pairs that an iteration trains on, of those that were collected."""
        return pairs

    def _prepare_iteration(self) -> None:
        """From an iteration's pairs to what is trained."""
        raise NotImplementedError  # what is trained is the subclass's own

    def _keep(self, iteration: int, pairs: list[PreferencePair]) -> None:
        """Write an iteration's pairs; a resumed run leaves what is there, and writes beside it."""
        if not self.is_world_process_zero():
            return
        if self._preference_directory is None:
            directory = Path(self.args.preference_dir or os.path.join(self.args.output_dir, "preferences"))
            if self._resumed is not None and directory.is_dir() and any(directory.iterdir()):
                number = 1 + sum(path.name.startswith("resume-") for path in directory.iterdir())
                directory = directory / f"resume-{number}"
            self._preference_directory = directory
        write_pairs(self._preference_directory / f"iteration-{iteration}.jsonl", pairs)

    # Collecting

    def _collect_pairs(self, iteration: int) -> list[PreferencePair]:
        """The pairs of all tasks, in their order, the same on every process."""
        groups: list[Group] = []
        with self._sampling():
            for tasks, num_wanted in self._shown(self._task_batches()):
                if self._preemption is not None:
                    self._end_if_preempted()
                groups += self._answer(tasks, num_wanted)
        self._metrics.pop("eval")  # what TRL's code measured while it sampled
        pairs = [pair for group in groups for pair in self._pairs_of(iteration, group)]
        pairs = sorted(gather_object(pairs), key=lambda pair: pair.task)
        rewards = gather_object([[candidate.reward for candidate in group.candidates] for group in groups])
        answers = [candidate for group in groups for candidate in (*group.candidates, *group.others)]
        self._note_unparsable("preferences/frac_unparsable", [answer.completions[0] for answer in answers])
        self._note_collection(rewards, {pair.task for pair in pairs}, len(pairs))
        return pairs

    def _shown(self, batches: Iterator[tuple[list[int], int]]) -> Iterator[tuple[list[int], int]]:
        """The batches of tasks, with a progress bar."""
        hidden = self.args.disable_tqdm or not self.is_local_process_zero()
        with tqdm(total=len(self.train_dataset), desc="Answering tasks", unit="task", disable=hidden) as bar:
            for tasks, num_wanted in batches:
                yield tasks, num_wanted
                bar.update(num_wanted)

    def _task_batches(self) -> Iterator[tuple[list[int], int]]:
        """The tasks that this process answers at once, and how many of those of all processes are wanted."""
        num_tasks, processes = len(self.train_dataset), self.accelerator.num_processes
        size = max(1, -(-(self.args.preference_batch_size or 32) // self.args.preference_num_candidates))
        size = min(size, -(-num_tasks // processes))
        for start in range(0, num_tasks, size * processes):
            first = start + self.accelerator.process_index * size
            yield [task % num_tasks for task in range(first, first + size)], min(size * processes, num_tasks - start)

    @contextlib.contextmanager
    def _sampling(self) -> Iterator[None]:
        """Inside, the team samples without being trained, before its training has begun too."""
        training = self.model.training
        before_engine = self.is_deepspeed_enabled and self.deepspeed is None
        self.model.eval()
        for agent in self.agent_trainers:
            agent.follow(self)
        try:
            with torch.no_grad(), self._without_engine() if before_engine else nullcontext():
                yield
        finally:
            self.model.train(training)

    def _answer(self, tasks: list[int], num_wanted: int) -> list[Group]:
        """
        What the team answers to some tasks of this process, scored. Every process calls it; what only fills a batch is
        left out.
        """
        width = self.args.preference_num_candidates
        turn, candidates = self._sample_candidates(self.interaction, tasks, width, num_wanted)
        prompt_ids, completion_ids = zip(*(agent.take_tokens() for agent in self.agent_trainers), strict=True)
        for sample, candidate in enumerate(candidates):
            candidate.ids = [ids[sample] for ids in completion_ids]
        groups = []
        for start, task in self._wanted(turn, tasks, width, num_wanted):
            prompts = of_one_kind([asked[start] for asked in turn.prompts])
            ids = [own[start] for own in prompt_ids]
            groups.append(Group(task, prompts, ids, candidates[start : start + width]))
        return groups

    @staticmethod
    def _wanted(turn: Turn, tasks: list[int], width: int, num_wanted: int) -> list[tuple[int, int]]:
        """This process's first sample of each task that is wanted, and the task."""
        first = turn.start // width  # number of this process's first task in the batch
        return [(place * width, task) for place, task in enumerate(tasks) if first + place < num_wanted]

    def _sample_candidates(
        self, interaction: Interaction, tasks: list[int], width: int, num_wanted: int, source: str = "current"
    ) -> tuple[Turn, list[Candidate]]:
        """`width` joint answers to each of this process's tasks, with their rewards."""
        rows = [row for task in tasks for row in [self.train_dataset[task]] * width]
        settings = RolloutSettings(num_generations=width, seed=f"{self.args.seed}/{self.env_step}")
        (turn,) = interaction.run(rows, settings, num_wanted * width)
        self.env_step += num_wanted * width
        rewards = self._weighted(turn.rewards).nanmean(dim=0)  # (J,), the mean over the actors
        own = rewards[turn.start : turn.start + len(rows)].tolist()
        said = zip(*turn.completions, strict=True)
        candidates = [Candidate(list(texts), reward, None, source) for texts, reward in zip(said, own, strict=True)]
        if self._centralized_rewards and self.args.unparsable_reward is None:
            for candidate in candidates:  # a learned reward has a number for anything
                if self._is_unparsable(candidate.completions[0]):
                    candidate.reward = math.nan
        return turn, candidates

    def _pairs_of(self, iteration: int, group: Group) -> list[PreferencePair]:
        """The pairs of one task's candidates; the same draw whichever process has the task."""
        rng = random.Random(f"{self.args.seed}/{iteration}/{group.task}")
        chosen = self._select(group, self.args.pair_selection, self.args.preference_pairs_per_sample, rng)
        return [group.pair(winner, loser) for winner, loser in chosen]

    def _select(
        self, group: Group, mode: str, limit: int | None, rng: random.Random
    ) -> list[tuple[Candidate, Candidate]]:
        """Winner and loser of each pair of one task."""
        return select_pairs(group.candidates, mode, limit, rng)

    def _note_collection(self, rewards: list[list[float]], tasks_with_pairs: set[int], num_pairs: int) -> None:
        """What an iteration's collection brought, for the next log; `rewards` of the candidates of each task."""
        values = {
            "num_pairs": num_pairs,
            "frac_tasks_without_pairs": 1 - len(tasks_with_pairs) / len(rewards),
            "reward_mean": torch.tensor(rewards, dtype=torch.float64).nanmean().item(),
        }
        for name, value in values.items():
            self._metrics.add("train", f"preferences/{name}", value)
        logger.info("Preferences: %s", values)
        if not num_pairs:
            logger.warning(
                "No preference pair was found: no two answers to a task got different rewards. Raise "
                "`preference_num_candidates` or `temperature`, or give a reward that tells answers apart."
            )

    # One actor for all roles

    def _is_unparsable(self, completion: str) -> bool:
        return self._centralized_rewards[0].parse(completion) is None

    def _note_unparsable(self, name: str, completions: Sequence[str]) -> None:
        """Log how many of all processes' completions cannot be read, if they are to be."""
        if self._centralized_rewards:
            unparsable = gather_object([self._is_unparsable(completion) for completion in completions])
            self._metrics.add("train", name, sum(unparsable) / len(unparsable))

    def _note(self, batch: JointBatch, settings: RolloutSettings) -> None:
        super()._note(batch, settings)
        if batch.mode == "train":
            self._note_unparsable("frac_unparsable", batch.turns[0].completions[0])

    # State

    def _team_state(self) -> dict[str, Any]:
        state = {"iteration": self._iteration, "pairs": [vars(pair) for pair in self._pairs]}
        return {**super()._team_state(), "preferences": state}

    def _load_preferences(self, state: dict[str, Any]) -> None:
        """Go on with the iteration of a checkpoint."""
        self._iteration = state["iteration"]
        self._pairs = [PreferencePair(**pair) for pair in state["pairs"]]

    def _load_team_state(self, state: dict[str, Any]) -> None:
        super()._load_team_state(state)
        if self._iteration < 0:  # a loader of pairs needed them before
            self._load_preferences(state["preferences"])


def no_reward(*completions, **kwargs) -> list[None]:
    """The reward of a team that learns from a dataset of pairs: none."""
    return [None] * len(completions[0])


def has_pairs(dataset: Any) -> bool:
    """Whether a dataset has preference pairs, not tasks to answer."""
    return dataset is not None and holds_pairs(next(iter(dataset), {}))
