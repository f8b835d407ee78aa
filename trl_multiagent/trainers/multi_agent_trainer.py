# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""The training loop that all team trainers share."""

import contextlib
import copy
import functools
import json
import logging
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import datasets
import numpy as np
import torch
from accelerate.utils import set_seed
from torch import nn
from transformers import PreTrainedTokenizerBase, Trainer, TrainerCallback

from .._compat import RepeatSampler, repeat_iterable_dataset, shuffle_sequence_dict, split_tensor_dict
from ..agents.grpo_agent import GRPOAgent
from ..agents.loading import (
    ModelLike,
    check_independent,
    check_vocabulary,
    clear_dense_quantization,
    either,
    open_adapter,
    resolve_models,
    resolve_num_agents,
    resolve_tokenizers,
)
from ..callbacks.sync_references import SyncReferencesCallback
from ..checkpoints.export import check_saveable, load_team, save_team, team_card
from ..models.team import MultiAgentModel
from ..placement.backends import check_backend, clip_grad_norms, clips_gradients_itself
from ..rewards import JointReward, RewardFunc
from ..rollouts.joint import (
    Formatter,
    JointRollout,
    check_formatters,
    resolve_formatters,
    sample_joint,
    score_joint,
)
from ..rollouts.sampling import JointSampler
from .completions_log import log_completions
from .entity_optimizer import DecayGuard, split_by_entity
from .multi_agent_config import MultiAgentConfig
from .team_metrics import TeamMetrics


logger = logging.getLogger(__name__)

ENTROPY_FILE = "entropy_control.json"


@dataclass
class JointBatch:
    """
    A scored generation batch. N actors, B joint samples of this process, W processes.

    Attributes:
        rollout ([`JointRollout`]): what this process sampled.
        rewards (`torch.Tensor` of shape `(N, W * B)`): weighted sum of the reward functions for each actor, NaN where
            there is none.
        rewards_per_func (`torch.Tensor` of shape `(N, W * B, F)`): what each reward function gave.
        inputs (list of `dict`, length N): inputs of each actor's TRL loss; `advantages` may be replaced.
        num_generations (`int`): group size.
        mode (`str`): `"train"` or `"eval"`.
        process_index (`int`): number of this process.
        critic_inputs (`dict`): inputs of the critics' loss, tensors with first dimension B.
    """

    rollout: JointRollout
    rewards: torch.Tensor
    rewards_per_func: torch.Tensor
    inputs: list[dict[str, Any]]
    num_generations: int
    mode: str
    process_index: int
    critic_inputs: dict[str, torch.Tensor] = field(default_factory=dict)

    def local(self, values: torch.Tensor) -> torch.Tensor:
        """This process's part of a tensor over the joint samples of all processes."""
        size = len(self.rollout.rows)
        return values[self.process_index * size : (self.process_index + 1) * size]


class MultiAgentTrainer(Trainer):
    """
    Trains N actors, and their critics, on a joint reward. A step reads: sample every actor, score the joint responses,
    give credit, sum the actors' TRL losses and the critics' loss, log.

    Subclasses override `_credit` (from rewards to advantages) and, with critics, `_build_critics` and `_critic_loss`.

    Args:
        agent_model (`str` or [`~transformers.PreTrainedModel`], *optional*):
            One source for all actors; `num_agents` says how many.
        agents (list of `str`, [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`], *optional*):
            One source for each actor: hub ids, directories (exports of a team among them) or loaded models.
        num_agents (`int`, *optional*):
            Number of actors, here or in the config.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`] or list, *optional*):
            One for all actors or a list in actor order. Loaded by itself for identifiers and directories.
        reward_func (`Callable` or list of `Callable`):
            Joint reward, see [`~trl_multiagent.rewards.JointReward`].
        reward_processor (`Callable`, *optional*):
            Maps each reward value.
        formatters (`Callable` or list of `Callable`, *optional*):
            Dataset row to prompt (text or messages), one for all actors or one for each. Default: the column
            `prompt`.
        args ([`MultiAgentConfig`], *optional*):
            Configuration.
        train_dataset, eval_dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`], *optional*):
            The tasks. A streamed dataset needs `max_steps`; there, the last prompts that fill no batch are dropped.
        callbacks (list of [`~transformers.TrainerCallback`], *optional*):
            Callbacks of the run.
        optimizers (tuple, *optional*):
            An optimizer and a scheduler instead of the default ones, which have a parameter group for each entity.
        peft_config ([`~peft.PeftConfig`] or list, *optional*):
            Adapters for the actors, one for all or one for each (`None` for full training).
        quantization_config ([`~transformers.BitsAndBytesConfig`], *optional*):
            For actors that are loaded by identifier.
        processing_class, reward_funcs:
            Hugging Face's words for `tokenizer` and `reward_func`.

    Raises:
        ValueError, TypeError: whatever does not fit together and can be seen before training.
    """

    loss_is_scaled_for_ga = True  # TRL's losses are
    config_class: ClassVar[type[MultiAgentConfig]] = MultiAgentConfig

    def __init__(
        self,
        agent_model: ModelLike | None = None,
        agents: Sequence[ModelLike] | None = None,
        num_agents: int | None = None,
        tokenizer: PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase] | None = None,
        reward_func: RewardFunc | list[RewardFunc] | None = None,
        reward_processor: Callable[[float], float] | None = None,
        formatters: Formatter | Sequence[Formatter] | None = None,
        args: MultiAgentConfig | None = None,
        train_dataset: datasets.Dataset | datasets.IterableDataset | None = None,
        eval_dataset: datasets.Dataset | dict[str, datasets.Dataset] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple = (None, None),
        peft_config=None,
        quantization_config=None,
        processing_class: PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase] | None = None,
        reward_funcs: RewardFunc | list[RewardFunc] | None = None,
    ):
        args = self.config_class() if args is None else args
        if not isinstance(args, self.config_class):
            raise TypeError(f"`args` must be a {self.config_class.__name__}, got {type(args).__name__}.")
        self.args = args
        sources = resolve_models("agent", agent_model, agents, resolve_num_agents(num_agents, args.num_agents))
        tokenizers = resolve_tokenizers(either(tokenizer=tokenizer, processing_class=processing_class), sources, args)
        reward_funcs = either(reward_func=reward_func, reward_funcs=reward_funcs)
        self.reward = JointReward(reward_funcs or [], len(sources), reward_processor, args.batched_rewards)
        self.formatters = resolve_formatters(formatters, len(sources))
        _check_dataset(train_dataset, self.formatters, tokenizers)
        for dataset in eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]:
            _check_dataset(dataset, self.formatters, tokenizers)

        if isinstance(train_dataset, datasets.IterableDataset):
            _prepare_streaming(args)  # before the first actor makes the accelerator
        self.agent_trainers = self._build_agents(sources, tokenizers, peft_config, quantization_config)
        actors = [trainer.model for trainer in self.agent_trainers]
        self.tokenizers = [trainer.processing_class for trainer in self.agent_trainers]
        critics, self.critic_tokenizers = self._build_critics(actors, self.tokenizers)
        for index, critic in enumerate(critics):
            clear_dense_quantization(f"critic_{index}", critic.backbone)
        team = MultiAgentModel(actors, critics)
        check_independent(dict(team.entities()))
        if not any(parameter.requires_grad for parameter in team.parameters()):
            raise ValueError("No parameter of the team is trainable. Unfreeze at least one actor.")
        check_saveable(team, [*self.tokenizers, *self.critic_tokenizers])

        # What TRL's trainers keep for one actor, here for the team
        self._step = 0
        self._buffered_inputs: list[dict[str, Any]] | None = None
        self._metrics = TeamMetrics(self.agent_trainers, self.reward.names)
        self._step_time = 0.0
        self._eval_prefix = "eval"
        self._decay_guard: DecayGuard | None = None
        super().__init__(
            model=team,
            args=args,
            data_collator=_identity,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=self.tokenizers[0],
            callbacks=callbacks,
            optimizers=optimizers,
        )
        if args.n_gpu > 1:
            raise ValueError(
                "Several GPUs are visible to one process. Start the script with `accelerate launch` or `torchrun`, or "
                "make one GPU visible with `CUDA_VISIBLE_DEVICES`."
            )
        if args.sync_ref_model:
            without = [i for i, agent in enumerate(self.agent_trainers) if agent.ref_model is None]
            if without:
                raise ValueError(
                    f"sync_ref_model=True, but the actors {without} have no reference model of their own: set `beta` "
                    f"above 0, and train them without an adapter (whose reference is the model without it)."
                )
            self.add_callback(SyncReferencesCallback(self.agent_trainers))
        # Each process samples with a stream of its own, as in TRL
        set_seed(args.seed, device_specific=True)

    # Entities

    @property
    def agents(self) -> nn.ModuleList:
        """The actors' models, in actor order."""
        return self.model.agents

    @property
    def critics(self) -> nn.ModuleList:
        """The critics."""
        return self.model.critics

    def _build_agents(self, sources, tokenizers, peft_config, quantization_config) -> list[GRPOAgent]:
        peft_configs = list(peft_config) if isinstance(peft_config, (list, tuple)) else [peft_config] * len(sources)
        if len(peft_configs) != len(sources):
            raise ValueError(f"`peft_config` has {len(peft_configs)} entries, expected {len(sources)}.")
        # PEFT writes the base model's name into the config, so no two actors may share one
        peft_configs = [copy.deepcopy(config) for config in peft_configs]
        check_independent({f"agent_{i}": source for i, source in enumerate(sources) if not isinstance(source, str)})
        trainers: list[GRPOAgent] = []
        for index, (source, tokenizer, config) in enumerate(zip(sources, tokenizers, peft_configs, strict=True)):
            model = open_adapter(source, self.args)
            if not isinstance(model, str):
                check_vocabulary(f"agent_{index}", model, tokenizer)
                clear_dense_quantization(f"agent_{index}", model)
            trainer = GRPOAgent(
                model,
                self.args,
                processing_class=tokenizer,
                reward_names=self.reward.names,
                peft_config=config,
                quantization_config=quantization_config,
                team_trainer=trainers[0] if trainers else None,
            )
            check_vocabulary(f"agent_{index}", trainer.model, trainer.processing_class)
            trainers.append(trainer)
        check_backend(trainers[0].accelerator)
        return trainers

    def _build_critics(
        self, agents: list[nn.Module], tokenizers: list[PreTrainedTokenizerBase]
    ) -> tuple[list[nn.Module], list[PreTrainedTokenizerBase]]:
        """The critics and their tokenizers; none here."""
        return [], []

    def create_accelerator_and_postprocess(self) -> None:
        first = self.agent_trainers[0]
        for name in ("accelerator", "gather_function", "is_deepspeed_enabled", "is_fsdp_enabled"):
            setattr(self, name, getattr(first, name))

    # Data

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns = []

    def get_train_dataloader(self):
        """A loader of generation batches: each is visited by every micro-step that uses it, as in TRL."""
        args, dataset = self.args, self.train_dataset
        if dataset is None:
            raise ValueError("Training needs a `train_dataset`.")
        if isinstance(dataset, datasets.IterableDataset):
            dataset = dataset.shuffle(seed=args.seed) if args.shuffle_dataset else dataset
            dataset = repeat_iterable_dataset(
                dataset,
                mini_repeat_count=args.num_generations,
                batch_size=args.generation_batch_size // args.num_generations,
                repeat_count=args.num_iterations * args.steps_per_generation,
            )
        return self._get_dataloader(
            dataset=dataset,
            description="Training",
            batch_size=self._train_batch_size * args.steps_per_generation,
            sampler_fn=self._get_train_sampler,
            is_training=True,
        )

    def _get_train_sampler(self, dataset=None) -> JointSampler:
        args = self.args
        return JointSampler(
            self.train_dataset if dataset is None else dataset,
            num_generations=args.num_generations,
            num_prompts=args.generation_batch_size // args.num_generations,
            repeat_count=args.num_iterations * args.steps_per_generation,
            shuffle=args.shuffle_dataset,
            seed=args.seed if args.data_seed is None else args.data_seed,
        )

    def _get_eval_sampler(self, eval_dataset) -> RepeatSampler:
        return RepeatSampler(eval_dataset, mini_repeat_count=self._num_generations("eval"), shuffle=False)

    def get_eval_dataloader(self, eval_dataset=None):
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ValueError("Evaluation needs an `eval_dataset`.")
        if (self.args.eval_batch_size * self.accelerator.num_processes) % self._num_generations("eval"):
            raise ValueError(
                f"An evaluation step has {self.args.eval_batch_size} joint samples on each of "
                f"{self.accelerator.num_processes} processes, expected a multiple of the "
                f"{self._num_generations('eval')} generations of a prompt. Change `per_device_eval_batch_size` or "
                "`num_generations_eval`."
            )
        if isinstance(dataset, datasets.IterableDataset):
            self.accelerator.dataloader_config.dispatch_batches = False
            dataset = repeat_iterable_dataset(dataset, mini_repeat_count=self._num_generations("eval"))
        return self._get_dataloader(
            dataset=dataset,
            description="Evaluation",
            batch_size=self.args.eval_batch_size,
            sampler_fn=self._get_eval_sampler,
        )

    def _num_generations(self, mode: str) -> int:
        generations = self.args.num_generations
        return generations if mode == "train" else self.args.num_generations_eval or generations

    # A step: sample, score, credit

    def _prepare_inputs(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Inputs of one micro-batch. In training, a generation batch is sampled once and its parts are handed out."""
        if not self.model.training:
            return self._sample_and_score(rows)
        args = self.args
        if self._step % (args.steps_per_generation * args.num_iterations) == 0 or self._buffered_inputs is None:
            batch = shuffle_sequence_dict(self._sample_and_score(rows))
            self._buffered_inputs = split_tensor_dict(batch, args.steps_per_generation)
        return self._buffered_inputs[self._step % args.steps_per_generation]

    def _sample_and_score(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """A generation batch as one flat dict, `"agent_0/completion_ids"`, ..., `"critic/input_ids"`, ..."""
        mode = "train" if self.model.training else "eval"
        generations = self._num_generations(mode)
        for agent in self.agent_trainers:
            agent.follow(self)
        rank = self.accelerator.process_index
        rollout = sample_joint(self.agent_trainers, rows, self.formatters, generations, first_sample=rank * len(rows))
        wanted = self._metrics.wanted_samples(mode)
        rewards = score_joint(rollout, self.reward, generations, self.accelerator, wanted)  # (N, W * B, F)
        inputs = [
            agent.score(prompts, reward)
            for agent, prompts, reward in zip(self.agent_trainers, rollout.prompts, rewards, strict=True)
        ]
        batch = JointBatch(rollout, self._weighted(rewards), rewards, inputs, generations, mode, rank)
        self._credit(batch)
        self._metrics.note_rewards(mode, batch.rewards, rewards)
        if self.args.log_completions:
            for agent, part in zip(self.agent_trainers, inputs, strict=True):
                agent.set_logged_advantages(self.accelerator.gather(part["advantages"]).tolist())
        flat = {f"agent_{i}/{name}": value for i, part in enumerate(batch.inputs) for name, value in part.items()}
        return flat | {f"critic/{name}": value for name, value in batch.critic_inputs.items()}

    def _weighted(self, rewards: torch.Tensor) -> torch.Tensor:
        """Weighted sum over reward functions, `(N, B, F) -> (N, B)`; NaN where no function gave a reward."""
        weights = self.agent_trainers[0].reward_weights.to(rewards.device)
        return (rewards * weights).nansum(dim=-1).masked_fill(rewards.isnan().all(dim=-1), torch.nan)

    def _credit(self, batch: JointBatch) -> None:
        """Replace the actors' advantages, and set the critics' inputs; TRL's group-relative advantages are there."""

    # Loss

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if return_outputs:
            raise ValueError(f"{type(self).__name__} does not return outputs.")
        # The whole loss inside one forward of the wrapper: several forwards before one backward break DDP
        return model(functools.partial(self._step_loss, inputs=inputs))

    def _step_loss(self, team: MultiAgentModel, inputs: dict[str, Any]) -> torch.Tensor:
        losses = []
        for index, (agent, actor) in enumerate(zip(self.agent_trainers, team.agents, strict=True)):
            part = _part(inputs, f"agent_{index}/")
            losses.append(agent.loss(actor, part))
            self._note_taught(f"agent_{index}", agent.is_taught_by(part))
        if len(team.critics):
            accumulation = self.current_gradient_accumulation_steps if team.training else 1
            losses.append(self._critic_loss(team, _part(inputs, "critic/")) / accumulation)
        return functools.reduce(torch.add, losses)

    def _note_taught(self, name: str, taught: bool) -> None:
        if self._decay_guard is not None and self.model.training:
            self._decay_guard.note(name, taught)

    def _critic_loss(self, team: MultiAgentModel, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Loss of the critics on one micro-batch, a mean over its joint samples."""
        raise AssertionError("a trainer with critics defines their loss")

    def train(self, *args, **kwargs):
        """Train as `transformers.Trainer.train`; afterwards the actors use their caches as they did before."""
        for actor in self.agents:
            actor.config.use_cache = self.args.use_cache
        try:
            return super().train(*args, **kwargs)
        finally:
            for trainer in self.agent_trainers:
                trainer.model.config.use_cache = trainer.loaded_use_cache

    @contextlib.contextmanager
    def _caches_as_loaded(self) -> Iterator[None]:
        """Exports carry the `use_cache` that the actors were loaded with, also in the middle of training."""
        current = [actor.config.use_cache for actor in self.agents]
        try:
            for trainer in self.agent_trainers:
                trainer.model.config.use_cache = trainer.loaded_use_cache
            yield
        finally:
            for actor, use_cache in zip(self.agents, current, strict=True):
                actor.config.use_cache = use_cache

    def training_step(self, model, inputs, num_items_in_batch=None):
        started = time.perf_counter()
        for agent in self.agent_trainers:
            agent.follow(self)
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._step += 1
        self._step_time += time.perf_counter() - started
        if self._step % self.current_gradient_accumulation_steps == 0:
            self._metrics.add("train", "step_time", self._step_time)
            self._step_time = 0.0
        return loss

    # Optimization

    def create_optimizer(self, model=None):
        """The default optimizer, with parameter groups and a learning rate for each entity."""
        given = self.optimizer is not None
        optimizer = super().create_optimizer(model)
        if not given:
            split_by_entity(optimizer, self.model, self._entity_learning_rate)
            names = [name for name, _ in self.model.entities()]
            self._decay_guard = DecayGuard(optimizer, self.accelerator, names)
        return optimizer

    def _entity_learning_rate(self, name: str) -> float:
        return self.args.critic_learning_rate if name.startswith("critic") else self.args.learning_rate

    def _clip_grad_norm(self, model) -> torch.Tensor | float:
        """Clip each entity by its own norm, so that no entity's gradient scales another's. Returns the joint norm."""
        if clips_gradients_itself(self.accelerator):
            return super()._clip_grad_norm(model)
        entities = dict(self.model.entities())
        norms = clip_grad_norms(self.accelerator, entities.values(), self.args.max_grad_norm)
        for name, norm in zip(entities, norms, strict=True):
            self._metrics.add("train", f"{name}/grad_norm", norm.item())
        return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))

    # Evaluation

    def evaluation_loop(self, dataloader, *args, metric_key_prefix: str = "eval", **kwargs):
        """Evaluate with random numbers of its own: it neither depends on the training's position nor changes it."""
        dataset = getattr(dataloader, "dataset", None)
        sized = dataset is not None and not isinstance(dataset, torch.utils.data.IterableDataset)
        self._metrics.start_evaluation(len(dataset) * self._num_generations("eval") if sized else None)
        self._eval_prefix = metric_key_prefix
        with _own_random_state(self.args.seed):
            return super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
        return loss.mean().detach(), None, None

    # Metrics

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        mode = "train" if self.model.training else "eval"
        metrics = self._metrics.pop(mode)
        if mode == "eval":
            metrics = {f"{self._eval_prefix}_{name}": value for name, value in metrics.items()}
        elif "learning_rate" in logs and len(self.critics):
            rates = {group.get("entity"): group["lr"] for group in self.optimizer.param_groups}
            metrics["critic/learning_rate"] = rates.get("critic")
        logs.update(metrics)
        super().log(logs, start_time)
        if self.args.log_completions and self.accelerator.is_main_process:
            log_completions(self.agent_trainers, self.args, self.state.global_step)

    # Saving

    def create_model_card(self, model_name: str | None = None, dataset_name: str | None = None, **kwargs) -> None:
        """Write `README.md` of the team into `args.output_dir`: what it holds and how to load it."""
        if not self.is_world_process_zero():
            return
        os.makedirs(self.args.output_dir, exist_ok=True)
        card = team_card(self.model, type(self).__name__, model_name, dataset_name)
        with open(os.path.join(self.args.output_dir, "README.md"), "w", encoding="utf-8") as file:
            file.write(card)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """
        Export the team: `agent_i/` for each actor, `critic/` with `value_head.pt` for a central critic. Each loads by
        `from_pretrained` and is a source for a new trainer. No training state is written. Call it on every process.

        Args:
            output_dir (`str`, *optional*):
                Parent directory. Default: `args.output_dir`.
        """
        output_dir = self.args.output_dir if output_dir is None else output_dir
        tokenizers = [*self.tokenizers, *self.critic_tokenizers]
        with self._caches_as_loaded():
            save_team(self.model, tokenizers, output_dir, self.accelerator, adapters_only=_internal_call)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Team save", revision=self.args.hub_revision)

    def _save_checkpoint(self, model, trial) -> None:
        super()._save_checkpoint(model, trial)
        if self.args.use_adaptive_entropy and self.args.should_save:
            directory = os.path.join(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
            with open(os.path.join(directory, ENTROPY_FILE), "w", encoding="utf-8") as file:
                json.dump([agent.entropy_control() for agent in self.agent_trainers], file)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if self.args.use_adaptive_entropy and checkpoint is not None:
            with open(os.path.join(checkpoint, ENTROPY_FILE), encoding="utf-8") as file:
                for agent, state in zip(self.agent_trainers, json.load(file), strict=True):
                    agent.load_entropy_control(state)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        load_team(self.model, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        if self.is_deepspeed_enabled:
            super()._load_best_model()
        else:
            load_team(self.model, self.state.best_model_checkpoint)


def _identity(rows: list) -> list:
    return rows


def _part(inputs: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in inputs.items() if name.startswith(prefix)}


@contextlib.contextmanager
def _own_random_state(seed: int) -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        set_seed(seed, device_specific=True)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _check_dataset(dataset, formatters: Sequence[Formatter], tokenizers: Sequence[PreTrainedTokenizerBase]) -> None:
    if dataset is None:
        return
    if not isinstance(dataset, (datasets.Dataset, datasets.IterableDataset)):
        raise TypeError(
            f"A dataset must be a `datasets.Dataset` or `IterableDataset`, got {type(dataset).__name__}. "
            f"`Dataset.from_list(rows)` makes one."
        )
    row = next(iter(dataset), None)
    if row is None:
        raise ValueError("The dataset is empty; training needs at least one row.")
    check_formatters(row, formatters, tokenizers)


def _prepare_streaming(args: MultiAgentConfig) -> None:
    """Streamed rows must reach every process whole and in order, or groups would mix prompts."""
    if args.accelerator_config.dispatch_batches:
        raise ValueError("A streamed dataset needs `accelerator_config={'dispatch_batches': False}`.")
    if args.dataloader_num_workers:
        raise ValueError(
            f"A streamed dataset needs dataloader_num_workers=0, got {args.dataloader_num_workers}: several workers "
            f"would interleave the rows and split the groups."
        )
    args.accelerator_config.dispatch_batches = False
