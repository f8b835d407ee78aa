# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""The training loop that all team trainers share."""

import contextlib
import copy
import functools
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar

import datasets
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
from ..placement.backends import (
    check_backend,
    check_optimizer,
    clip_grad_norms,
    clips_gradients_itself,
    full_parameters,
    share_accelerator,
    start_backend,
)
from ..rewards import JointReward, RewardFunc
from ..rollouts.batch import JointBatch
from ..rollouts.joint import Formatter, resolve_formatters, sample_joint, score_joint
from ..rollouts.sampling import JointSampler
from ..rollouts.tasks import check_tasks, prepare_streaming
from .completions_log import log_completions
from .entity_optimizer import DecayGuard, split_by_entity
from .multi_agent_config import MultiAgentConfig
from .random_state import own_random_state
from .team_metrics import TeamMetrics


logger = logging.getLogger(__name__)

ENTROPY_FILE = "entropy_control.json"


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
        if args.n_gpu > 1:
            raise ValueError(
                "Several GPUs are visible to one process. Start the script with `accelerate launch` or `torchrun`, or "
                "make one GPU visible with `CUDA_VISIBLE_DEVICES`."
            )
        start_backend(args)
        sources = resolve_models("agent", agent_model, agents, resolve_num_agents(num_agents, args.num_agents))
        tokenizers = resolve_tokenizers(either(tokenizer=tokenizer, processing_class=processing_class), sources, args)
        reward_funcs = either(reward_func=reward_func, reward_funcs=reward_funcs)
        self.reward = JointReward(reward_funcs or [], len(sources), reward_processor, args.batched_rewards)
        self.formatters = resolve_formatters(formatters, len(sources))
        evaluated = list(eval_dataset.values()) if isinstance(eval_dataset, dict) else [eval_dataset]
        for dataset in [train_dataset, *evaluated]:
            if dataset is not None:
                check_tasks(dataset, self.formatters, tokenizers)
        if isinstance(train_dataset, datasets.IterableDataset):
            prepare_streaming(args)  # before the first actor makes the accelerator
        self.agent_trainers = self._build_agents(sources, tokenizers, peft_config, quantization_config)
        self.tokenizers = [trainer.processing_class for trainer in self.agent_trainers]
        team = self._build_team()

        # What TRL's trainers keep for one actor, here for the team
        self._step = 0
        self._buffered_inputs: list[dict[str, Any]] | None = None
        self._metrics = TeamMetrics(self.agent_trainers, self.reward.names)
        self._step_time = 0.0
        self._decay_guard: DecayGuard | None = None
        self._saving_checkpoint = False
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
        if args.sync_ref_model:
            self._sync_references()
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
        self._loaded_by_name = {f"agent_{i}" for i, source in enumerate(sources) if isinstance(source, str)}
        trainers: list[GRPOAgent] = []
        for index, (source, tokenizer, config) in enumerate(zip(sources, tokenizers, peft_configs, strict=True)):
            model = open_adapter(source, self.args, quantization_config)
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
        # TRL may need another kind of activation checkpointing (adapters under ZeRO-3)
        needed = trainers[0].args.gradient_checkpointing_kwargs
        self.args.gradient_checkpointing_kwargs = self.args.activation_checkpointing_kwargs = needed
        return trainers

    def _build_team(self) -> MultiAgentModel:
        """The actors with their critics as one module, checked."""
        actors = [trainer.model for trainer in self.agent_trainers]
        critics, self.critic_tokenizers = self._build_critics(actors, self.tokenizers)
        team = MultiAgentModel(actors, critics)
        for name, module in team.entities():
            clear_dense_quantization(name, getattr(module, "backbone", module))
        check_independent(dict(team.entities()))
        if not any(parameter.requires_grad for parameter in team.parameters()):
            raise ValueError("No parameter of the team is trainable. Unfreeze at least one actor.")
        rates = {self._entity_learning_rate(name) for name, _ in team.entities()}
        check_optimizer(self.agent_trainers[0].accelerator, rates)
        self._merged_in_exports = check_saveable(
            team,
            [*self.tokenizers, *self.critic_tokenizers],
            loaded_by_name=self._loaded_by_name,
            trust_remote_code=self.args.trust_remote_code,
        )
        return team

    def _sync_references(self) -> None:
        without = [index for index, agent in enumerate(self.agent_trainers) if agent.ref_model is None]
        if without:
            raise ValueError(
                f"sync_ref_model=True, but the actors {without} have no reference model of their own: set `beta` "
                f"above 0, and train them without an adapter (whose reference is the model without it)."
            )
        self.add_callback(SyncReferencesCallback(self.agent_trainers))

    def _build_critics(
        self, agents: list[nn.Module], tokenizers: list[PreTrainedTokenizerBase]
    ) -> tuple[list[nn.Module], list[PreTrainedTokenizerBase]]:
        """The critics and their tokenizers; none here."""
        return [], []

    def create_accelerator_and_postprocess(self) -> None:
        share_accelerator(self.agent_trainers[0], self)

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
        loss = model(functools.partial(self._step_loss, inputs=inputs))
        # DeepSpeed steps the optimizer inside the backward pass, so this is the last moment before every step
        if self._decay_guard is not None and self.model.training and self.accelerator.sync_gradients:
            self._decay_guard.hold()
        return loss

    def _step_loss(self, team: MultiAgentModel, inputs: dict[str, Any]) -> torch.Tensor:
        losses = []
        for index, (agent, actor) in enumerate(zip(self.agent_trainers, team.agents, strict=True)):
            part = _part(inputs, f"agent_{index}/")
            losses.append(agent.loss(actor, part))
            if self._decay_guard is not None and team.training:
                self._decay_guard.note(f"agent_{index}", agent.is_taught_by(part))
        if len(team.critics):
            accumulation = self.current_gradient_accumulation_steps if team.training else 1
            losses.append(self._critic_loss(team, _part(inputs, "critic/")) / accumulation)
        return functools.reduce(torch.add, losses)

    def _critic_loss(self, team: MultiAgentModel, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Loss of the critics on one micro-batch, a mean over its joint samples."""
        raise AssertionError("a trainer with critics defines their loss")

    def train(self, *args, **kwargs):
        """Train as `transformers.Trainer.train`; afterwards the actors use their caches as they did before."""
        self._set_caches([self.args.use_cache] * len(self.agents))
        try:
            return super().train(*args, **kwargs)
        finally:
            self._set_caches(self._loaded_caches)

    @property
    def _loaded_caches(self) -> list[bool | None]:
        return [agent.loaded_use_cache for agent in self.agent_trainers]

    def _set_caches(self, values: Sequence[bool | None]) -> None:
        """Set `use_cache` in the actors' configs; None for an architecture that has no such entry."""
        for actor, value in zip(self.agents, values, strict=True):
            if value is not None:
                actor.config.use_cache = value

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
            if self.args.weight_decay:
                names = [name for name, _ in self.model.entities()]
                self._decay_guard = DecayGuard(optimizer, self.accelerator, names)
                self.add_callback(self._decay_guard)
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
        engine = self._without_engine() if self.is_deepspeed_enabled and self.deepspeed is None else nullcontext()
        with own_random_state(self.args.seed), engine:
            output = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        for name, value in self._metrics.pop("eval").items():
            output.metrics[f"{metric_key_prefix}_{name}"] = value
        return output

    @contextlib.contextmanager
    def _without_engine(self) -> Iterator[None]:
        """
        Evaluate on the bare team: before training, DeepSpeed has no engine yet, and one that is made for inference
        could not train later.
        """
        gathers = [agent.args.ds3_gather_for_generation for agent in self.agent_trainers]
        self.is_deepspeed_enabled = False
        try:
            with full_parameters(self.model, self.accelerator):
                for agent in self.agent_trainers:
                    agent.args.ds3_gather_for_generation = False  # they are gathered here
                yield
        finally:
            self.is_deepspeed_enabled = True
            for agent, gather in zip(self.agent_trainers, gathers, strict=True):
                agent.args.ds3_gather_for_generation = gather

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
        return loss.mean().detach(), None, None

    # Metrics

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.model.training:
            logs.update(self._metrics.pop("train"))
            if "learning_rate" in logs and len(self.critics):
                rates = [group["lr"] for group in self.optimizer.param_groups if group.get("entity") == "critic"]
                logs.update({"critic/learning_rate": rates[0]} if rates else {})
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
        # A training checkpoint is loaded into the same model, so its adapters are not merged
        merged = None if self._saving_checkpoint else self._merged_in_exports
        current = [getattr(actor.config, "use_cache", None) for actor in self.agents]
        self._set_caches(self._loaded_caches)  # in an export, also in the middle of training
        try:
            save_team(self.model, tokenizers, output_dir, self.accelerator, merged)
        finally:
            self._set_caches(current)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Team save", revision=self.args.hub_revision)

    def _save_checkpoint(self, model, trial) -> None:
        self._saving_checkpoint = True
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._saving_checkpoint = False
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
        load_team(self.model, resume_from_checkpoint, self.args.trust_remote_code)

    def _load_best_model(self) -> None:
        if self.is_deepspeed_enabled:
            super()._load_best_model()
        else:
            load_team(self.model, self.state.best_model_checkpoint, self.args.trust_remote_code)


def _identity(rows: list) -> list:
    return rows


def _part(inputs: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in inputs.items() if name.startswith(prefix)}
