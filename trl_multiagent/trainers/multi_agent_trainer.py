# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""The training loop that all team trainers share."""

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar

import datasets
import torch
from accelerate.utils import set_seed
from torch import nn
from transformers import PreTrainedTokenizerBase, Trainer, TrainerCallback

from ..agents.building import build_agents, resolve_names, resolve_peft_configs, resolve_trainable
from ..agents.loading import (
    ModelLike,
    check_independent,
    clear_dense_quantization,
    either,
    resolve_models,
    resolve_num_agents,
    resolve_tokenizers,
)
from ..callbacks.sync_references import SyncReferencesCallback
from ..callbacks.trackio_completions import TrackioCompletionsCallback
from ..callbacks.wandb_resume import install_wandb
from ..checkpoints.export import check_saveable, entity_directories
from ..checkpoints.random_states import own_random_state
from ..checkpoints.stateful import CompletionsLogger
from ..functional.returns import discounted_returns
from ..models.team import MultiAgentModel
from ..placement.backends import (
    accumulate_only,
    check_optimizer,
    clip_grad_norms,
    clips_gradients_itself,
    full_parameters,
    share_accelerator,
    start_backend,
    takes_several_backwards,
)
from ..rewards import JointReward, RewardFunc
from ..rollouts.batch import JointBatch, samples_of_processes, split_batch
from ..rollouts.formatters import Formatter, resolve_formatters
from ..rollouts.influence import InfluenceMonitor
from ..rollouts.interaction import Interaction, RolloutSettings, Turn
from ..rollouts.tasks import check_tasks, prepare_streaming
from ..rollouts.transition import Transition
from .completions_log import CompletionsLog
from .entity_optimizer import DecayGuard, is_critic, split_by_entity
from .multi_agent_config import MultiAgentConfig
from .team_checkpoints import TeamCheckpoints
from .team_metrics import TeamMetrics


logger = logging.getLogger(__name__)


class MultiAgentTrainer(TeamCheckpoints, Trainer):
    """
    Trains N actors, and their critics, on a joint reward. A step reads: sample every actor, score the joint responses,
    turn by turn, give credit, sum the actors' TRL losses and the critics' loss, log.

    Subclasses override `_credit` (from returns to advantages) and, with critics, `_resolve_critics`, `_build_critics`
    and `_loss_parts`.

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
            `prompt`. With `turn_order="sequential"`, one that takes `earlier_completions` gets the texts of the actors
            before it.
        external_transition (`Callable`, *optional*):
            The environment between turns, see [`~trl_multiagent.rollouts.transition.Transition`]:
            `f(prompt=, agent_completions=, num_agents=, **history)` returns the next prompt of each actor.
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
        wandb_config (`dict`, *optional*):
            What `wandb.init` is called with (`project`, `name`, `entity`, `tags`, `dir`, `id`, `resume`, ...), and
            `config_sections`, see [`WandbResumeCallback`]; turns `report_to="wandb"` on.
        processing_class, reward_funcs:
            Hugging Face's words for `tokenizer` and `reward_func`.

    Raises:
        ValueError, TypeError: whatever does not fit together and can be seen before training.
    """

    loss_is_scaled_for_ga = True  # TRL's losses are
    config_class: ClassVar[type[MultiAgentConfig]] = MultiAgentConfig
    # Whether a critic is one for the team
    central_critic: ClassVar[bool] = False
    # Whether the KL to the references is in the reward, not in the loss
    kl_in_reward: bool = False

    def __init__(
        self,
        agent_model: ModelLike | None = None,
        agents: Sequence[ModelLike] | None = None,
        num_agents: int | None = None,
        tokenizer: PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase] | None = None,
        reward_func: RewardFunc | list[RewardFunc] | None = None,
        reward_processor: Callable[[float], float] | None = None,
        formatters: Formatter | Sequence[Formatter] | None = None,
        external_transition: Callable[..., Sequence] | None = None,
        args: MultiAgentConfig | None = None,
        train_dataset: datasets.Dataset | datasets.IterableDataset | None = None,
        eval_dataset: datasets.Dataset | dict[str, datasets.Dataset] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple = (None, None),
        peft_config=None,
        quantization_config=None,
        wandb_config: dict[str, Any] | None = None,
        processing_class: PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase] | None = None,
        reward_funcs: RewardFunc | list[RewardFunc] | None = None,
    ):
        args = self.config_class() if args is None else args
        if not isinstance(args, self.config_class):
            raise TypeError(f"`args` must be of type {self.config_class.__name__}, got {type(args).__name__}.")
        self.args = args
        if args.n_gpu > 1:
            raise ValueError(
                "Several GPUs are visible to one process. Start the script with `accelerate launch` or `torchrun`, or "
                "make one GPU visible with `CUDA_VISIBLE_DEVICES`."
            )
        start_backend(args)
        if wandb_config is not None:
            args.report_to = [*(name for name in args.report_to if name != "wandb"), "wandb"]
        sources = resolve_models("agent", agent_model, agents, resolve_num_agents(num_agents, args.num_agents))
        self.agent_names = resolve_names(args.agent_names, len(sources))
        peft_configs = resolve_peft_configs(peft_config, len(sources))
        self.trainable = resolve_trainable(args.trainable_agents, sources, peft_configs, self.agent_names)
        self._resolve_critics(len(sources))
        tokenizers = either(tokenizer=tokenizer, processing_class=processing_class)
        tokenizers = resolve_tokenizers(tokenizers, sources, self.agent_names, args)
        reward_funcs = either(reward_func=reward_func, reward_funcs=reward_funcs)
        self.reward = JointReward(reward_funcs or [], len(sources), reward_processor, args.batched_rewards)
        self.formatters = resolve_formatters(formatters, self.agent_names)
        self.transition = self._check_interaction(external_transition)
        evaluated = list(eval_dataset.values()) if isinstance(eval_dataset, dict) else [eval_dataset]
        for dataset in [train_dataset, *evaluated]:
            if dataset is not None:
                self._check_dataset(dataset, tokenizers)
        if isinstance(train_dataset, datasets.IterableDataset):
            prepare_streaming(args)  # before the first actor makes the accelerator
        self._sources = sources
        self.agent_trainers = build_agents(
            sources,
            tokenizers,
            self._actor_args(),
            names=self.agent_names,
            trainable=self.trainable,
            reward_names=self.reward.names,
            peft_configs=peft_configs,
            quantization_config=quantization_config,
            kl_in_reward=self.kl_in_reward,
        )
        for agent in self.agent_trainers:
            agent.num_iterations = args.updates_per_rollout
        # TRL may need another kind of activation checkpointing (adapters under ZeRO-3)
        needed = self.agent_trainers[0].args.gradient_checkpointing_kwargs
        args.gradient_checkpointing_kwargs = args.activation_checkpointing_kwargs = needed
        self.tokenizers = [trainer.processing_class for trainer in self.agent_trainers]
        team = self._build_team()

        # What TRL's trainers keep for one actor, here for the team
        self._step = 0
        self._buffered_inputs: list[list[dict[str, Any]]] | None = None
        self._metrics = TeamMetrics(self.agent_trainers, self.agent_names, self.reward.names)
        self._completions = CompletionsLog(self.agent_names, self.reward.names)
        self._step_time = 0.0
        # Joint responses that were scored for training, over all processes
        self.env_step = 0
        self._decay_guard: DecayGuard | None = None
        self._given_optimizers = optimizers
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
        if "wandb" in args.report_to:
            install_wandb(self.callback_handler.callbacks, wandb_config)
        if "trackio" in args.report_to:
            self.add_callback(TrackioCompletionsCallback())
        self.interaction = Interaction(
            self.agent_trainers, self.formatters, self.reward, self._weighted, self.accelerator, self.transition
        )
        self._influence = InfluenceMonitor(
            self.agent_names,
            self._watched_agents(),
            self.reward,
            self._weighted,
            self.accelerator,
            args.influence_steps,
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
        """The critics: one for the team, or one for each actor; none where actors are their own."""
        return self.model.critics

    def _check_interaction(self, external_transition: Callable | None) -> Transition | None:
        """The environment between turns, if it is given; an error where it is missing."""
        args = self.args
        if args.num_turns > 1 and external_transition is None:
            raise ValueError(
                f"num_turns={args.num_turns} needs `external_transition=`, a callable that gives each actor's prompt "
                "of the next turn, or set num_turns=1."
            )
        hears = any(formatter.takes_earlier for formatter in self.formatters[1:])
        if args.turn_order == "sequential" and not hears:
            raise ValueError(
                "turn_order='sequential', but no formatter after the first takes `earlier_completions`, so no actor "
                "would hear those before it. Pass `formatters=` with such a parameter."
            )
        if external_transition is not None and args.num_turns == 1:
            logger.warning(
                "`external_transition` is given, but num_turns=1, so it is never called. Set `num_turns` (its default "
                "in CoMLRL is 2)."
            )
        return None if external_transition is None else Transition(external_transition, self.agent_names)

    def _actor_args(self) -> MultiAgentConfig:
        """The arguments of the actors' own TRL trainers."""
        return self.args

    def _check_dataset(self, dataset: Any, tokenizers: Sequence[PreTrainedTokenizerBase]) -> None:
        """Check a dataset, before any model is loaded."""
        self._check_row(check_tasks(dataset, self.formatters, tokenizers, self.args.turn_order == "sequential"))

    def _check_row(self, row: dict[str, Any]) -> None:
        """Check a dataset's first row for what the trainer itself reads of it."""

    def _watched_agents(self) -> list[int]:
        """The actors whose influence can be measured: those that learn, and that act by the reward alone."""
        if len(self.agent_trainers) == 1:
            return []
        last_to_hear = max((i for i, formatter in enumerate(self.formatters) if formatter.takes_earlier), default=0)
        heard = last_to_hear if self.args.turn_order == "sequential" else 0
        return [index for index, learns in enumerate(self.trainable) if learns and index >= heard]

    def _build_team(self) -> MultiAgentModel:
        """The actors with their critics as one module, checked."""
        actors = [trainer.model for trainer in self.agent_trainers]
        critics, self.critic_tokenizers = self._build_critics(actors, self.tokenizers)
        team = MultiAgentModel(actors, critics, self.central_critic)
        for name, module in team.entities():
            clear_dense_quantization(name, getattr(module, "backbone", module))
        check_independent(dict(team.entities()))
        rates = {self._entity_learning_rate(name) for name, _ in team.optimized_parts()}
        check_optimizer(self.agent_trainers[0].accelerator, rates)
        self._merged_in_exports = check_saveable(
            team,
            [*self.tokenizers, *self.critic_tokenizers],
            loaded_by_name=[
                name
                for (name, _), source in zip(entity_directories(team), self._all_sources(), strict=True)
                if isinstance(source, str)
            ],
            trust_remote_code=self.args.trust_remote_code,
        )
        return team

    def _sync_references(self) -> None:
        learning = {name: a for name, a in zip(self.agent_names, self.agent_trainers, strict=True) if a.trainable}
        without = [name for name, agent in learning.items() if agent.ref_model is None]
        if without:
            raise ValueError(
                f"sync_ref_model=True, but the actors {without} have no reference model of their own: set `beta` "
                f"above 0, and train them without an adapter (whose reference is the model without it)."
            )
        self.add_callback(SyncReferencesCallback(list(learning.values())))

    def _resolve_critics(self, num_agents: int) -> None:
        """Check what the user gave for critics, before any model is loaded."""

    def _all_sources(self) -> list[ModelLike]:
        """What every entity was loaded from, in the order of `entity_directories`."""
        return self._sources

    def _build_critics(
        self, agents: list[nn.Module], tokenizers: list[PreTrainedTokenizerBase]
    ) -> tuple[list[nn.Module], list[PreTrainedTokenizerBase]]:
        """The critics and their tokenizers; none here."""
        return [], []

    def create_accelerator_and_postprocess(self) -> None:
        share_accelerator(self.agent_trainers[0], self)

    # A step: sample, score, credit

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Micro-batches are ready: see `_micro_batches`."""
        return inputs

    def _micro_batches(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """
        The micro-batches of one micro-step, each no larger than the batch size: one in a single turn, more where turns
        bring more rows. In training, a generation batch is sampled once and its parts are handed out.
        """
        if not self.model.training:
            return split_batch(self._sample_and_score(rows), 1, shuffle=False)[0]
        args = self.args
        if self._step % (args.steps_per_generation * args.updates_per_rollout) == 0 or self._buffered_inputs is None:
            batch = self._sample_and_score(rows)
            self._buffered_inputs = split_batch(batch, args.steps_per_generation, shuffle=True)
        return self._buffered_inputs[self._step % args.steps_per_generation]

    def _rollout_settings(self, mode: str) -> RolloutSettings:
        """How a batch is rolled out; evaluation follows each joint response alone."""
        args = self.args
        return RolloutSettings(
            num_generations=self._num_generations(mode),
            num_turns=args.num_turns,
            tree=mode == "train" and args.rollout_mode == "tree",
            sequential=args.turn_order == "sequential",
            early_termination_threshold=args.early_termination_threshold,
            external_prompt_passthrough=args.external_prompt_passthrough,
            seed=f"{args.seed}/{self.env_step}",
        )

    def _sample_and_score(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """A generation batch as one flat dict, `"agent_0/completion_ids"`, ..., `"critic/input_ids"`, ..."""
        mode = "train" if self.model.training else "eval"
        for agent in self.agent_trainers:
            agent.follow(self)
        settings = self._rollout_settings(mode)
        turns = self.interaction.run(rows, settings, self._metrics.wanted_samples(mode))
        num_steps = self.args.steps_per_generation if mode == "train" else 1
        num_splits, num_rows = self._rows_of_losses(turns, mode, num_steps)
        batch = JointBatch(turns, *self._returns(turns), num_rows, settings.num_generations, mode)
        per_func = [turn.rewards for turn in turns]
        for index, agent in enumerate(self.agent_trainers):
            if not agent.trainable:
                agent.discard(settings.grouped)
                batch.inputs.append(None)
                continue
            own = batch.of_samples(index, [rewards[index] for rewards in per_func])
            batch.inputs.append(
                agent.score(batch.prompts(index), batch.to_rows(own, padding=torch.nan), num_rows, settings.grouped)
            )
        self._credit(batch)
        self._note(batch, settings)
        flat = {
            f"agent_{index}/{name}": value
            for index, part in enumerate(batch.inputs)
            for name, value in (part or {}).items()
        }
        layout = batch.layout(num_splits, num_steps)
        flat |= batch.critic_inputs
        return flat | {f"batch/{name}": torch.tensor(value) for name, value in layout.items()}

    def _returns(self, turns: list[Turn]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Weighted rewards and returns of every turn, each `(N, J)`."""
        rewards = [self._weighted(turn.rewards) for turn in turns]
        parents = [turn.parents.to(reward.device) for turn, reward in zip(turns, rewards, strict=True)]
        return rewards, discounted_returns(rewards, parents, self.args.discount)

    def _rows_of_losses(self, turns: list[Turn], mode: str, num_steps: int) -> tuple[int, int]:
        """How many micro-batches a micro-step has, and how many rows a process has for all, padding included."""
        size = self.args.per_device_train_batch_size if mode == "train" else self.args.eval_batch_size
        most = max(samples_of_processes(turns))
        num_splits = -(-most // (num_steps * size))
        num_parts = num_steps * num_splits
        return num_splits, -(-most // num_parts) * num_parts

    def _note(self, batch: JointBatch, settings: RolloutSettings) -> None:
        """Count, measure and log what a batch brought."""
        mode = batch.mode
        self._metrics.note_rewards(batch, settings.num_turns, counted_by_trl=settings.grouped)
        if self.args.log_completions:
            self._completions.note(batch)
        if mode != "train":
            return
        self.env_step += batch.num_joint_responses
        if settings.num_turns > 1:
            return  # what is said in one turn acts by way of the next ones
        agents = self._influence.due(settings.cross)
        if not agents:
            return
        with own_random_state(self.args.seed):  # a reward function may draw
            shares = self._influence.measure(batch, settings.cross, agents)
        for index, share in shares.items():
            self._metrics.add(mode, f"{self.agent_names[index]}/reward_variance_share", share)

    def _weighted(self, rewards: torch.Tensor) -> torch.Tensor:
        """Weighted sum over reward functions, `(N, B, F) -> (N, B)`; NaN where no function gave a reward."""
        weights = self.agent_trainers[0].reward_weights.to(rewards.device)
        return (rewards * weights).nansum(dim=-1).masked_fill(rewards.isnan().all(dim=-1), torch.nan)

    def _credit(self, batch: JointBatch) -> None:
        """Set the actors' advantages, and the critics' inputs. In single turns, TRL's advantages are there."""

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
        layout = {name: inputs[f"batch/{name}"].item() for name in ("num_splits", "row_scale", "part_scale")}
        layout["has_rows"] = inputs.get("batch/has_rows", True)
        *first, last = self._loss_parts(team, inputs, layout)
        losses = [self._learned(functools.reduce(torch.add, found)) for part in first if (found := part())]
        return functools.reduce(torch.add, [*losses, *last()])

    def _loss_parts(
        self, team: MultiAgentModel, inputs: dict[str, Any], layout: dict[str, float]
    ) -> list[Callable[[], list[torch.Tensor]]]:
        """What computes the losses of each entity that learns on a micro-batch, or none where it is not taught yet."""
        return [
            functools.partial(self._actor_losses, team, index, inputs, layout)
            for index, agent in enumerate(self.agent_trainers)
            if agent.trainable
        ]

    def _learned(self, loss: torch.Tensor) -> torch.Tensor:
        """
        A loss whose gradients are taken already, where that may be done one by one: then the activations of one entity
        at a time are in memory. DDP and DeepSpeed need one backward pass for all.
        """
        if not (loss.requires_grad and takes_several_backwards(self.accelerator)):
            return loss
        with torch.autocast(loss.device.type, enabled=False):  # the forward pass is in it, a backward pass never is
            self.accelerator.backward(loss)
        return loss.detach()

    def _actor_losses(
        self, team: MultiAgentModel, index: int, inputs: dict[str, Any], layout: dict[str, float]
    ) -> list[torch.Tensor]:
        """The losses of one actor on a micro-batch, scaled for gradient accumulation; none where it does not learn."""
        agent, own = self.agent_trainers[index], part_of(inputs, f"agent_{index}/")
        self._note_taught(team, f"agent_{index}", agent.is_taught_by(own))
        return [agent.loss(team.agents[index], own, **layout)]

    def _note_taught(self, team: MultiAgentModel, name: str, taught: bool) -> None:
        """Say whether a micro-batch teaches an entity, for weight decay."""
        if self._decay_guard is not None and team.training:
            self._decay_guard.note(name, taught)

    def training_step(self, model, inputs, num_items_in_batch=None):
        self._end_if_preempted()
        started = time.perf_counter()
        model.train()
        for agent in self.agent_trainers:
            agent.follow(self)
        *first, last = self._micro_batches(inputs)
        losses = []
        for part in first:
            with accumulate_only(self.accelerator, model):
                losses.append(super().training_step(model, part, num_items_in_batch))
        loss = functools.reduce(torch.add, losses, super().training_step(model, last, num_items_in_batch))
        self._step += 1
        self._position.batches += 1
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
                names = [name for name, _ in self.model.optimized_parts()]
                self._decay_guard = DecayGuard(optimizer, self.accelerator, names)
                self.add_callback(self._decay_guard)
        return optimizer

    def _entity_learning_rate(self, name: str) -> float:
        return self.args.critic_learning_rate if is_critic(name) else self.args.learning_rate

    def _clip_grad_norm(self, model) -> torch.Tensor | float:
        """Clip each entity by its own norm, so that no entity's gradient scales another's. Returns the joint norm."""
        if clips_gradients_itself(self.accelerator):
            return super()._clip_grad_norm(model)
        entities = dict(self.model.entities())
        norms = clip_grad_norms(self.accelerator, entities.values(), self.args.max_grad_norm)
        for (name, module), norm in zip(entities.items(), norms, strict=True):
            if any(parameter.requires_grad for parameter in module.parameters()):
                self._metrics.add("train", f"{self._shown_name(name)}/grad_norm", norm.item())
        return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))

    def _shown_name(self, entity: str) -> str:
        """An entity's name in metrics: that of the actor, or the critic's."""
        kind, _, number = entity.partition("_")
        if not number:
            return kind
        name = self.agent_names[int(number)]
        return name if kind == "agent" else f"{name}/{kind}"

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
            with full_parameters(self.model):
                for agent in self.agent_trainers:
                    agent.args.ds3_gather_for_generation = False  # they are gathered here
                yield
        finally:
            self.is_deepspeed_enabled = True
            for agent, gather in zip(self.agent_trainers, gathers, strict=True):
                agent.args.ds3_gather_for_generation = gather

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        with torch.no_grad(), self.compute_loss_context_manager():
            losses = [self.compute_loss(model, part) for part in self._micro_batches(inputs)]
        return functools.reduce(torch.add, losses).detach(), None, None

    # Metrics

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        logs["env_step"] = self.env_step
        if self.model.training:
            logs.update(self._metrics.pop("train"))
            if "learning_rate" in logs:
                rates = [g["lr"] for g in self.optimizer.param_groups if is_critic(g.get("entity", ""))]
                logs.update({"critic/learning_rate": rates[0]} if rates else {})
        if self.args.log_completions and self.accelerator.is_main_process:
            table = self._completions.write(self.args, self.state.global_step)
            for callback in self.callback_handler.callbacks:
                if table is not None and isinstance(callback, CompletionsLogger):
                    callback.on_completions(self.args, self.state, self.control, table)
        super().log(logs, start_time)


def _identity(rows: list) -> list:
    return rows


def part_of(inputs: dict[str, Any], prefix: str) -> dict[str, Any]:
    """The entries of a flat batch that begin with a prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in inputs.items() if name.startswith(prefix)}
