# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Multi-agent RLHF: a joint reward model is learned from preferences, and is the reward of reinforcement learning."""

import contextlib
import copy
import functools
import json
import logging
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast
from datasets import Dataset
from transformers import AutoConfig, TrainerCallback

from .._compat import find_file
from ..agents.loading import identifier, load_tokenizer, resolve_models
from ..checkpoints.random_states import own_random_state
from ..checkpoints.storage import Attempt
from ..models.joint_reward import JointRewardScorer, load_reward_model, render_joint_response
from ..placement.backends import single_process
from ..rewards import JointReward
from ..rollouts.formatters import of_one_kind
from ..rollouts.preferences import JOINT_COLUMNS, PreferencePair
from .iac_trainer import IACTrainer
from .iterative_trainer import IterativePreferenceTrainer
from .joint_reward_config import JointRewardConfig
from .joint_reward_trainer import JointRewardTrainer
from .maac_trainer import MAACTrainer
from .marlhf_config import MARLHFConfig, MARLHFIterConfig
from .multi_agent_trainer import MultiAgentTrainer
from .preference_trainer import PreferenceTrainer
from .reinforce_trainer import MAGRPOTrainer, MAREINFORCETrainer, MAReMaxTrainer, MARLOOTrainer


logger = logging.getLogger(__name__)

REWARD_MODEL = "reward_model"  # directory of the reward model in exports and checkpoints
RL_TRAINERS: dict[str, type[MultiAgentTrainer]] = {
    "magrpo": MAGRPOTrainer,
    "mareinforce": MAREINFORCETrainer,
    "marloo": MARLOOTrainer,
    "maremax": MAReMaxTrainer,
    "maac": MAACTrainer,
    "iac": IACTrainer,
}


@functools.cache
def _with_algorithm(trainer_class: type, algorithm: str) -> type:
    """A preference trainer that is the trainer of an RL algorithm too."""
    rl_trainer = RL_TRAINERS[algorithm]
    names = {"__module__": trainer_class.__module__, "__doc__": trainer_class.__doc__}
    return type(trainer_class.__name__, (trainer_class, rl_trainer), names)


def _config_among(args: tuple, kwargs: dict[str, Any]) -> MARLHFConfig | None:
    """The config among a trainer's arguments."""
    return next((value for value in [*args, kwargs.get("args")] if isinstance(value, MARLHFConfig)), None)


class MARLHFTrainer(PreferenceTrainer):
    """
    Multi-Agent RLHF: pairs of the team's answers are collected and labelled by `reward_func`; a reward model of joint
    responses is learned from them ([`JointRewardTrainer`]) and frozen; the team is trained on its rewards by
    `rl_algorithm`. An instance is a trainer of that algorithm too, with all its options. Evaluation shows the reward
    of `reward_func`.

    Args:
        reward_render (`Callable`, *optional*):
            From prompts and completions of the actors to the text that the reward model reads. Default:
            [`~trl_multiagent.models.joint_reward.render_joint_response`].
        reward_peft_config ([`~peft.PeftConfig`], *optional*):
            An adapter for the reward model; it is merged when it is learned.
        **kwargs:
            See [`PreferenceTrainer`] and the algorithm's trainer, whose critics may also be named by the config's
            `critic_model_name`.
    """

    config_class = MARLHFConfig

    def __new__(cls, *args, **kwargs):
        if any(issubclass(cls, rl_trainer) for rl_trainer in RL_TRAINERS.values()):
            return super().__new__(cls)
        algorithm = (_config_among(args, kwargs) or cls.config_class()).rl_algorithm
        return super().__new__(_with_algorithm(cls, algorithm))

    def __init__(
        self,
        *args,
        reward_render: Callable[[Sequence, Sequence[str]], str] = render_joint_response,
        reward_peft_config: Any = None,
        **kwargs,
    ):
        self._reward_render = reward_render
        self._reward_peft_config = reward_peft_config
        self._scorer: JointRewardScorer | None = None
        config = _config_among(args, kwargs)
        if config is not None and config.critic_model_name is not None and kwargs.get("critics") is None:
            kwargs.setdefault("critic_model", config.critic_model_name)
        super().__init__(*args, **kwargs)
        if self._learns_from_dataset:
            raise ValueError(
                f"{type(self).__name__} trains the team on tasks, but the training set has pairs. Give it tasks; "
                "`JointRewardTrainer` learns a reward model from pairs, which `reward_model_name` can name."
            )
        self._task_weights = self.agent_trainers[0].reward_weights
        self._learned_reward = JointReward([self._reward_model_of_rows], len(self.agent_trainers), batched=True)
        self._learned_reward.names = [REWARD_MODEL]
        self._reward_source = self.args.reward_model_name or identifier(self._sources[0])
        if not self._reward_source:
            raise ValueError(
                "The reward model needs `reward_model_name`, a hub id or a directory: the actors are loaded models "
                "that do not say where they are from."
            )
        resolve_models("reward", self._reward_source, None, 1)
        if self.args.reward_num_train_epochs == 0:
            check_has_reward_head(self._reward_source)

    def _describe(self) -> dict[str, Any]:
        adapter = None if self._reward_peft_config is None else self._reward_peft_config.to_dict()
        return {**super()._describe(), "reward_model": {"source": self._reward_source, "adapter": adapter}}

    def train(self, *args, **kwargs):
        self._scorer = None
        self._score_by(self.reward)
        try:
            return super().train(*args, **kwargs)
        finally:
            self._score_by(self.reward)

    train.__doc__ = PreferenceTrainer.train.__doc__

    # Whose reward

    def _score_by(self, reward: JointReward) -> None:
        """Let joint responses be scored by the task's reward or by the learned one."""
        weights = self._task_weights if reward is self.reward else torch.ones(1)
        self.interaction.reward = self._influence.reward = reward
        self._metrics.reward_names = self._completions.reward_names = reward.names
        for agent in self.agent_trainers:
            agent.reward_func_names = list(reward.names)
            agent.reward_weights = weights

    @contextlib.contextmanager
    def _scored_by(self, reward: JointReward):
        before = self.interaction.reward
        self._score_by(reward)
        try:
            yield
        finally:
            self._score_by(before)

    def evaluation_loop(self, *args, **kwargs):
        with self._scored_by(self.reward):
            return super().evaluation_loop(*args, **kwargs)

    def _reward_of_candidates(self) -> JointReward:
        return self.reward

    def _collect_pairs(self, iteration: int) -> list[PreferencePair]:
        with self._scored_by(self._reward_of_candidates()):
            return super()._collect_pairs(iteration)

    def _reward_model_of_rows(self, *completions, batch_items):
        prompts = [of_one_kind([asks.first_prompt(row) for asks in self.formatters]) for row in batch_items]
        return self._scorer.score(prompts, [list(texts) for texts in zip(*completions, strict=True)])

    # Learning the reward

    def _prepare_iteration(self) -> None:
        if self._pairs and self.args.reward_num_train_epochs > 0:
            self._scorer = self._learn_reward()
        elif self._scorer is None:
            if self.args.reward_num_train_epochs > 0:
                raise ValueError("There is no preference pair to learn a reward model from, see the log.")
            self._scorer = self._scorer_of(self._reward_source)
        else:
            logger.warning("Without new pairs, the reward model of the iteration before is kept.")
        self._score_by(self._learned_reward)
        self._collect_point_of_begin()
        self._save_phase()

    def _save_phase(self) -> None:
        """The first boundary: the reward model is learned, and the team is as it was."""
        if self._boundaries is not None and self._boundaries.interval == 1:
            self._write(self._boundary(1))

    def _completed(self) -> tuple[int, bool]:
        epochs, is_boundary = super()._completed()
        return epochs + 1, is_boundary

    def _learn_reward(self) -> JointRewardScorer:
        """Learn a reward model from the pairs, on every process alike."""
        args = self.args
        held_out = self._held_out_tasks()
        parts: list[list[dict]] = [[], []]
        for pair in self._pairs:
            parts[pair.task in held_out].append({name: getattr(pair, name) for name in JOINT_COLUMNS})
        with single_process(self.args), own_random_state(args.seed, device_specific=False):
            trainer = JointRewardTrainer(
                model=self._reward_source,
                args=self._reward_config(),
                train_dataset=Dataset.from_list(parts[0]),
                eval_dataset=Dataset.from_list(parts[1]) if parts[1] else None,
                tokenizer=load_tokenizer(self._reward_source, args),
                render=self._reward_render,
                peft_config=copy.deepcopy(self._reward_peft_config),
                callbacks=[_EndsWith(self)],
            )
            trainer.train()
            metrics = trainer.evaluate() if parts[1] else {}
        for name in ("accuracy", "margin", "calibration_error"):
            logged = [row[name] for row in trainer.state.log_history if name in row]
            self._metrics.add("train", f"{REWARD_MODEL}/train_{name}", logged[-1])
            if parts[1]:
                self._metrics.add("train", f"{REWARD_MODEL}/{name}", metrics[f"eval_{name}"])
        model = trainer.model.merge_and_unload() if self._reward_peft_config is not None else trainer.model
        if self.accelerator.num_processes > 1:
            with torch.no_grad():
                for parameter in model.parameters():  # devices may round otherwise
                    parameter.copy_(broadcast(parameter.data, from_process=0))
        scorer = trainer.scorer(args.per_device_train_batch_size)
        scorer.model = model.to(args.reward_device)
        return scorer

    def _held_out_tasks(self) -> set[int]:
        tasks = sorted({pair.task for pair in self._pairs})
        count = int(len(tasks) * self.args.reward_eval_fraction)
        return set(random.Random(self.args.seed).sample(tasks, count))

    def _reward_config(self) -> JointRewardConfig:
        args = self.args
        return JointRewardConfig(
            output_dir=os.path.join(args.output_dir, REWARD_MODEL),
            learning_rate=args.reward_learning_rate,
            num_train_epochs=args.reward_num_train_epochs,
            per_device_train_batch_size=args.reward_train_batch_size,
            per_device_eval_batch_size=args.reward_train_batch_size,
            max_length=args.reward_max_length,
            freeze_backbone=args.reward_freeze_backbone,
            gradient_checkpointing=args.gradient_checkpointing,
            seed=args.seed,
            bf16=args.bf16,
            fp16=args.fp16,
            use_cpu=args.reward_device.type == "cpu",
            logging_steps=0.1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=args.disable_tqdm,
        )

    def _scorer_of(self, source: str) -> JointRewardScorer:
        with single_process(self.args), own_random_state(self.args.seed, device_specific=False):
            model = load_reward_model(source)  # whole, on each process
        model.to(self.args.reward_device)
        return JointRewardScorer(
            model,
            load_tokenizer(source, self.args),
            render=self._reward_render,
            max_length=self.args.reward_max_length,
            batch_size=self.args.per_device_train_batch_size,
        )

    # Saving

    def _write_reward_model(self, directory: Path) -> None:
        self._scorer.model.save_pretrained(directory)
        self._scorer.tokenizer.save_pretrained(directory)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Export the team as `MultiAgentTrainer.save_model`, and the reward model in `reward_model/`."""
        if self._scorer is not None and self.args.should_save:
            self._write_reward_model(Path(self.args.output_dir if output_dir is None else output_dir) / REWARD_MODEL)
        super().save_model(output_dir, _internal_call)

    def _write_more(self, staged: Path, attempt: Attempt) -> None:
        super()._write_more(staged, attempt)
        if self._scorer is not None and self.args.should_save:
            attempt(self._write_reward_model, staged / REWARD_MODEL)

    def _read_more(self, checkpoint: Path) -> None:
        super()._read_more(checkpoint)
        if (checkpoint / REWARD_MODEL).is_dir():
            self._scorer = self._scorer_of(str(checkpoint / REWARD_MODEL))
            self._score_by(self._learned_reward)


class MARLHFIterTrainer(IterativePreferenceTrainer, MARLHFTrainer):
    """
    Iterative MARLHF: in each iteration the reward model is learned anew, from its source, and the team is trained on
    it for `num_train_epochs`. See [`IterativePreferenceTrainer`] and [`MARLHFTrainer`].

    `preference_scoring_reward="reward_model"` lets the reward model of the iteration before label the pairs, from the
    second iteration on.
    """

    config_class = MARLHFIterConfig

    def _save_phase(self) -> None:
        """Boundaries are the ends of iterations."""

    def _reward_of_candidates(self) -> JointReward:
        by_model = self.args.preference_scoring_reward == "reward_model" and self._scorer is not None
        return self._learned_reward if by_model else self.reward


def check_has_reward_head(source: str) -> None:
    """
    Raise a `ValueError` if a hub id or a directory is no reward model that has been trained: loaded as one, it would
    get a new, random head. Its config is read, not its weights.
    """
    adapter = find_file(source, "adapter_config.json") if find_file(source, "config.json") is None else None
    if adapter is not None:
        task = json.loads(Path(adapter).read_text(encoding="utf-8")).get("task_type")
        found, fits = f"an adapter with task_type={task!r}", task == "SEQ_CLS"
    else:
        config = AutoConfig.from_pretrained(source)
        model = ", ".join(config.architectures or ["a model without `architectures` in its config"])
        fits = model.endswith("ForSequenceClassification") and config.num_labels == 1
        found = f"{model} with num_labels={config.num_labels}" if model.endswith("Classification") else model
    if not fits:
        raise ValueError(
            f"reward_num_train_epochs=0 uses the reward model {source!r} as it is, but that is {found}, expected a "
            "sequence classification model with one label, since a new head would give random rewards. Name a "
            "trained one in `reward_model_name`, such as a `JointRewardTrainer` saves, or set "
            "`reward_num_train_epochs` above 0 to learn one."
        )


class _EndsWith(TrainerCallback):
    """Ends the learning of a reward model when the training that it is part of is to end."""

    def __init__(self, trainer: MARLHFTrainer):
        self.trainer = trainer

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if self.trainer.accelerator.num_processes == 1 and self.trainer._preemption is not None:
            self.trainer._end_if_preempted()
