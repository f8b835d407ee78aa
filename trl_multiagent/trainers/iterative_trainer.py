# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Iterative preference learning: the team that has learned answers again, and is compared with another policy."""

import random
import shutil
from pathlib import Path
from typing import Any

from ..agents.frozen import load_frozen_actors
from ..agents.grpo_agent import GRPOAgent
from ..agents.loading import ModelLike, load_tokenizer, resolve_models
from ..checkpoints.storage import Attempt
from ..placement.backends import describe_backend
from ..rollouts.api_actor import APIActor
from ..rollouts.interaction import Actor, Interaction
from ..rollouts.pair_tokens import encode_completion
from ..rollouts.preferences import Candidate, Group, PreferencePair, select_comparisons
from .preference_trainer import PreferenceTrainer


POLICIES = "policies"  # where earlier policies lie, in the output directory and in checkpoints


class IterativePreferenceTrainer(PreferenceTrainer):
    """
    The part of a preference trainer that goes through `num_iterations`. In each the team answers every task, a
    *comparator* answers as well, and answer i of the team forms a pair with answer i of the comparator. Then the team
    learns for `num_train_epochs` from these pairs, or by replay from those of earlier iterations too.

    `comparator_policy`: `"current"` or `"current_copy"`, the team itself once more (nothing is trained while it
    answers, so a copy would answer alike); `"model"`, other models; `"history"`, the team as it was when the iteration
    `comparator_history_k` before this one began, or the first; `"api"`, an OpenAI-compatible endpoint.
    """

    def __init__(self, *args, **kwargs):
        self._comparators: list[Actor] | None = None
        self._comparator_sources: list[ModelLike] = []
        super().__init__(*args, **kwargs)
        config = self.args
        if self._learns_from_dataset:
            raise ValueError(
                f"{type(self).__name__} samples its pairs anew in each iteration, but the training set has pairs. "
                "Give it tasks, or use the trainer without iterations."
            )
        zero_stage = describe_backend(self.accelerator)["zero_stage"]
        if config.comparator_policy in ("model", "history") and zero_stage == 3:
            raise ValueError(
                f"comparator_policy={config.comparator_policy!r} loads whole models on each process, which ZeRO-3 "
                "would partition. Use ZeRO-1 or 2, or another comparator."
            )
        self._replay = config.replay()
        if config.comparator_policy == "api":
            self._comparators = self._api_actors()
        elif config.comparator_policy == "model":
            self._comparator_sources = resolve_models(
                "comparator_agent", config.comparator_model_name, config.comparator_agents, len(self.agent_trainers)
            )

    # Iterations

    def _iteration_of(self, epoch: int) -> int:
        return epoch // int(self.args.num_train_epochs)

    def _completed(self) -> tuple[int, bool]:
        """Boundaries are the ends of iterations."""
        epochs, length = self._position.epoch, int(self.args.num_train_epochs)
        return -(-epochs // length) or 1, epochs % length == 0

    def set_initial_training_values(self, args, dataloader):
        """The epochs of all iterations."""
        epochs, updates, examples, _, batch_size, batches, _ = super().set_initial_training_values(args, dataloader)
        epochs = int(args.num_train_epochs) * args.num_iterations
        return epochs, updates, examples, examples * epochs, batch_size, batches, updates * epochs

    def train(self, *args, **kwargs):
        self._replay = self.args.replay()
        return super().train(*args, **kwargs)

    train.__doc__ = PreferenceTrainer.train.__doc__

    def _describe(self) -> dict[str, Any]:
        description = super()._describe()
        description["options"].pop("num_iterations", None)  # may be raised
        description["epochs_of_an_iteration"] = int(self.args.num_train_epochs)  # may not
        return description

    def _begin_iteration(self, iteration: int) -> None:
        self._keep_policy(iteration)
        super()._begin_iteration(iteration)

    def _choose(self, iteration: int, pairs: list[PreferencePair]) -> list[PreferencePair]:
        self._replay.add(pairs)
        chosen = self._replay.sample(iteration)
        self._metrics.add("train", "preferences/num_replayed_pairs", len(chosen))
        return chosen

    # The comparator

    def _answer(self, tasks: list[int], num_wanted: int) -> list[Group]:
        groups = super()._answer(tasks, num_wanted)
        width = self.args.comparator_num_candidates or self.args.preference_num_candidates
        actors = self._comparator_actors()
        interaction = Interaction(
            actors, self.formatters, self.interaction.reward, self._weighted, self.accelerator, self.transition
        )
        turn, others = self._sample_candidates(interaction, tasks, width, num_wanted, "comparator")
        taken = [actor.take_tokens()[1] for actor in actors if isinstance(actor, GRPOAgent)]
        for sample, candidate in enumerate(others):
            if self.args.comparator_policy in ("model", "api"):  # they have tokenizers of their own
                texts = zip(self.tokenizers, candidate.completions, strict=True)
                candidate.ids = [encode_completion(tokenizer, text) for tokenizer, text in texts]
            else:
                candidate.ids = [ids[sample] for ids in taken]
        for group, (start, _) in zip(groups, self._wanted(turn, tasks, width, num_wanted), strict=True):
            group.others = others[start : start + width]
        return groups

    def _select(
        self, group: Group, mode: str, limit: int | None, rng: random.Random
    ) -> list[tuple[Candidate, Candidate]]:
        return select_comparisons(group.candidates, group.others, mode, limit, rng)

    def _collect_pairs(self, iteration: int) -> list[PreferencePair]:
        if self.args.comparator_policy == "history":
            self._comparators = self._frozen(self._policy_sources(max(iteration - self.args.comparator_history_k, 0)))
        elif self.args.comparator_policy == "model" and self._comparators is None:
            sources = self._comparator_sources
            self._comparators = self._frozen(sources, [load_tokenizer(source, self.args) for source in sources])
        try:
            return super()._collect_pairs(iteration)
        finally:
            if self.args.comparator_policy == "history":
                self._comparators = None

    def _comparator_actors(self) -> list[Actor]:
        actors = self.agent_trainers if self._comparators is None else self._comparators
        for actor in actors:
            if isinstance(actor, GRPOAgent):
                actor.follow(self)
        return actors

    def _frozen(self, sources: list[ModelLike], tokenizers: list | None = None) -> list[GRPOAgent]:
        return load_frozen_actors(
            sources,
            self.tokenizers if tokenizers is None else tokenizers,
            self.args,
            names=[f"the comparator of {name}" for name in self.agent_names],
            reward_names=self.reward.names,
            team_trainer=self.agent_trainers[0],
        )

    def _api_actors(self) -> list[APIActor]:
        config = self.args
        return [
            APIActor(
                config.comparator_api_model,
                base_url=config.comparator_api_url,
                api_key_env=config.comparator_api_key_env,
                timeout=config.comparator_api_timeout,
                max_retries=config.comparator_api_max_retries,
                max_n=config.comparator_api_max_n_per_request,
                headers=config.comparator_api_headers,
                extra_body=config.comparator_api_extra_body,
                max_tokens=config.max_completion_length,
                temperature=config.temperature,
                top_p=config.top_p,
                name=f"the comparator of {name}",
            )
            for name in self.agent_names
        ]

    # Earlier policies

    def _policy_directory(self, iteration: int) -> Path:
        return Path(self.args.output_dir) / POLICIES / f"iteration-{iteration}"

    def _policy_sources(self, iteration: int) -> list[str]:
        return [str(self._policy_directory(iteration) / f"agent_{index}") for index in range(len(self.agents))]

    def _keep_policy(self, iteration: int) -> None:
        """Write the team as an iteration begins, and remove what neither this nor a later one compares with."""
        if self.args.comparator_policy != "history":
            return
        self._write_models(self._policy_directory(iteration), None)
        # After an iteration that trained on nothing, a checkpoint may be of one before it, and needs older policies
        if self.args.should_save and (self._pairs or iteration == 0):
            first = max(iteration - self.args.comparator_history_k, 0)
            wanted = {self._policy_directory(number) for number in range(first, iteration + 1)}
            for directory in self._policy_directory(0).parent.iterdir():
                if directory not in wanted:
                    shutil.rmtree(directory)
        self.accelerator.wait_for_everyone()

    def _write_more(self, staged: Path, attempt: Attempt) -> None:
        super()._write_more(staged, attempt)
        if self.args.comparator_policy == "history" and self.args.should_save:
            attempt(shutil.copytree, self._policy_directory(0).parent, staged / POLICIES)

    def _read_more(self, checkpoint: Path) -> None:
        super()._read_more(checkpoint)
        if self.args.comparator_policy == "history":
            if self.args.should_save:
                shutil.rmtree(self._policy_directory(0).parent, ignore_errors=True)
                shutil.copytree(checkpoint / POLICIES, self._policy_directory(0).parent)
            self.accelerator.wait_for_everyone()

    # State

    def _team_state(self) -> dict[str, Any]:
        state = super()._team_state()
        datasets = [[vars(pair) for pair in pairs] for pairs in self._replay.datasets]
        state["preferences"]["replay"] = {**self._replay.state(), "datasets": datasets}
        return state

    def _load_preferences(self, state: dict[str, Any]) -> None:
        super()._load_preferences(state)
        datasets = [[PreferencePair(**pair) for pair in pairs] for pairs in state["replay"]["datasets"]]
        self._replay.load({**state["replay"], "datasets": datasets})
