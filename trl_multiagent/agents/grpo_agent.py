# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""One actor as one stock TRL trainer."""

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from torch import nn
from transformers import PreTrainedTokenizerBase
from trl import GRPOConfig, GRPOTrainer

from .._compat import keep_outputs_in_float32, reference_is_a_copy_of, use_adapter
from ..models.dropout import disable_dropout
from ..models.log_probabilities import completion_logps
from ..models.positions import count_positions_from_text
from ..placement.backends import share_accelerator
from ..rollouts.formatters import check_chat_template


@dataclass
class Sampled:
    """
    What became of the rollouts that an actor last turned into inputs of its loss.

    Attributes:
        num_calls (`int`): calls of `sample`.
        lengths (list of `int`): tokens of each completion that were sampled.
        ended (list of `bool`): whether each completion ended by itself, not by the length limit.
    """

    num_calls: int
    lengths: list[int]
    ended: list[bool]


def _team_scores(*args, **kwargs):
    raise RuntimeError("The team scores its joint responses; an actor's reward functions are names only.")


class GRPOAgent(GRPOTrainer):
    """
    A `GRPOTrainer` that is one actor of a team and is never trained by itself.

    It loads model, tokenizer, adapter, reference model and generation back end as TRL does, and gives the actor's loss
    by TRL's own code. It overrides where rollouts, rewards and the accelerator come from: the team.

    Args:
        model (`str`, [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The actor, as for `GRPOTrainer`.
        args ([`~trl.GRPOConfig`]):
            The team's arguments; the agent works on a copy.
        processing_class ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            The actor's own tokenizer: TRL may set its pad token. Loaded with the model if it is an identifier.
        reward_names (list of `str`):
            Names of the team's reward functions, for the metrics.
        peft_config ([`~peft.PeftConfig`], *optional*):
            Adapter to train instead of the full model.
        quantization_config ([`~transformers.BitsAndBytesConfig`], *optional*):
            As for `GRPOTrainer`.
        team_trainer ([`~transformers.Trainer`], *optional*):
            A trainer whose accelerator is shared. The first actor of a team has none and makes it.
        trainable (`bool`, *optional*, defaults to `True`):
            Whether the actor learns. A frozen one only samples, and has no reference model.
        name (`str`, *optional*):
            The actor's name, for errors.
        kl_in_reward (`bool`, *optional*, defaults to `False`):
            Whether the team puts the KL to the reference into the reward; the loss has no such term then.
    """

    # Losses that are means over rows, and those that are sums over tokens divided by the tokens of all micro-batches
    ROW_MEANS = ("grpo", "sapo", "dr_grpo", "luspo")
    TOKEN_TOTALS = ("cispo", "dapo", "vespo")

    def __init__(
        self,
        model: str | nn.Module,
        args: GRPOConfig,
        processing_class: PreTrainedTokenizerBase | None = None,
        reward_names: list[str] = ("reward",),
        peft_config=None,
        quantization_config=None,
        team_trainer=None,
        trainable: bool = True,
        name: str = "the actor",
        kl_in_reward: bool = False,
    ):
        self._team_trainer = team_trainer
        self.name = name
        self.trainable = trainable
        self.kl_in_reward = kl_in_reward
        # Rollouts that the team sampled and that were not consumed yet, and the rewards that belong to them
        self._rollouts: list[tuple] = []
        self._rewards: torch.Tensor | None = None
        self._empty_rows: set[int] = set()
        self.sampled = Sampled(0, [], [])
        # Tokens of prompts and completions that were sampled to fill up a batch
        self._num_filler_tokens = 0
        reference = contextlib.nullcontext() if isinstance(model, str) else _reference_of(model)
        with reference:
            super().__init__(
                model=model,
                reward_funcs=[_team_scores] * len(reward_names),
                args=_agent_args(args, loads=isinstance(model, str), trainable=trainable),
                train_dataset=Dataset.from_dict({"prompt": ["The team has the data."]}),
                processing_class=processing_class,
                peft_config=peft_config,
                quantization_config=quantization_config,
            )
        self.reward_func_names = list(reward_names)
        if not trainable:
            self.model.requires_grad_(False)
        for module in filter(None, (self.model, self.ref_model)):
            count_positions_from_text(module)
            if args.disable_dropout:
                disable_dropout(module)
        keep_outputs_in_float32(self)
        # `max_time` ends a row without an EOS token; what follows in the row is padding
        self._strips_padding = (self.args.generation_kwargs or {}).get("max_time") is not None

    # What the team gives

    def create_accelerator_and_postprocess(self) -> None:
        # The model is loaded, and `Trainer` is about to turn its cache off for training
        self.loaded_use_cache = getattr(self.model.config, "use_cache", None)
        if self._team_trainer is None:
            super().create_accelerator_and_postprocess()
            return
        share_accelerator(self._team_trainer, self)

    def follow(self, team) -> None:
        """Take over what TRL's code reads from a running trainer: the whole of what must be kept in step."""
        self.state = team.state
        if team.model.training:
            self.current_gradient_accumulation_steps = team.current_gradient_accumulation_steps

    def sample(self, prompts: list, num_kept: int | None = None, greedy: bool = False) -> list[str]:
        """
        Sample one completion for each prompt and keep the rollout for `score`.

        Args:
            prompts (list of `str` or of message lists, length B):
                Prompts, one for each completion wanted.
            num_kept (`int`, *optional*):
                How many of them count; the others fill up the batch, so that all processes have the same size.
            greedy (`bool`, *optional*, defaults to `False`):
                Whether to take the most probable tokens and keep nothing for `score`.

        Returns:
            list of `str`: the completions' texts of the prompts that count.
        """
        kept = len(prompts) if num_kept is None else num_kept
        # A wrapped model brings its own autocast; the bare actor does not
        with self.accelerator.autocast(), self._greedy() if greedy else contextlib.nullcontext():
            rollout = super()._generate(prompts)
        if not greedy:
            if self._empty_rows:
                # The EOS that stands for an empty completion was not sampled, so it is kept out of the loss
                mask = [[int(row not in self._empty_rows)] * len(ids) for row, ids in enumerate(rollout[1])]
                rollout = (*rollout[:2], mask, *rollout[3:])
            self._num_filler_tokens += sum(len(ids) for part in rollout[:2] for ids in part[kept:])
            self._rollouts.append(tuple(part[:kept] if isinstance(part, list) else part for part in rollout))
        return [_text(completion) for completion in rollout[3][:kept]]

    @contextlib.contextmanager
    def _greedy(self) -> Iterator[None]:
        """Decode without sampling, and leave the metrics and the token count to what is trained."""
        config, num_tokens = self.generation_config, self.state.num_input_tokens_seen
        self.generation_config = copy.deepcopy(config)
        self.generation_config.update(do_sample=False, temperature=None, top_p=None, top_k=None, min_p=None)
        try:
            with self._unmeasured():
                yield
        finally:
            self.generation_config = config
            self.state.num_input_tokens_seen = num_tokens

    def take_tokens(self) -> tuple[list[list[int]], list[list[int]]]:
        """
        The token ids of the prompts and of the completions that were sampled since the last call or `score`; they will
        not be scored. An EOS that stands for an empty completion is left out.
        """
        prompt_ids, completion_ids, masks = self._take_rollouts()[:3]
        if masks is not None:
            completion_ids = [
                [token for token, kept in zip(ids, mask, strict=True) if kept]
                for ids, mask in zip(completion_ids, masks, strict=True)
            ]
        return prompt_ids, completion_ids

    def reference_logps(
        self, model: nn.Module, inputs: dict[str, torch.Tensor], average: bool = False
    ) -> torch.Tensor:
        """
        `completion_logps` of the actor's reference, without gradient: its reference model, or for an adapter the model
        as it was before this run.

        Args:
            model ([`~torch.nn.Module`]):
                The bare actor.
            inputs (`dict`):
                `input_ids`, `attention_mask` and `completion_mask` of `completion_logps`.
            average (`bool`, *optional*, defaults to `False`):
                As there.
        """
        with torch.no_grad(), self.accelerator.autocast():
            if self.ref_model is not None:
                return completion_logps(self.ref_model, **inputs, average=average)
            with use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None):
                return completion_logps(model, **inputs, average=average)

    def discard(self, grouped: bool = True) -> None:
        """Forget the sampled rollouts, not their metrics: nothing is learned from them. `grouped` as in `score`."""
        self._take_rollouts()
        if not grouped:
            self._restate_lengths()

    def score(self, prompts: list, rewards: torch.Tensor, num_rows: int, grouped: bool = True) -> dict[str, Any]:
        """
        Turn the sampled rollouts and their rewards into the inputs of the actor's loss.

        Args:
            prompts (list, length B):
                The prompts that counted in `sample`, of all its calls.
            rewards (`torch.Tensor` of shape `(R over all processes, F)`):
                Rewards of this actor, NaN where there is none.
            num_rows (`int`):
                Number R of rows wanted, at least B; the others are padding, which no loss sees.
            grouped (`bool`, *optional*, defaults to `True`):
                Whether each `num_generations` neighbours are one group, so that TRL's advantages are those of the
                actor. Otherwise its advantages are 0, to be replaced.

        Returns:
            `dict`: TRL's loss inputs, tensors with first dimension R and `num_items_in_batch`.
        """
        self._rewards = rewards.to(self.accelerator.device)
        padded = prompts + prompts[:1] * (num_rows - len(prompts))
        generations = self.num_generations, self.num_generations_eval
        if not grouped:
            self.num_generations = self.num_generations_eval = 1
        try:
            with self.accelerator.autocast():
                inputs = self._generate_and_score_completions([{"prompt": prompt} for prompt in padded])
        finally:
            self.num_generations, self.num_generations_eval = generations
        if not grouped or self.num_generations == 1:  # a group of one has no deviation
            self._metrics[self._mode].pop("frac_reward_zero_std")
        if not grouped:
            self._restate_lengths()
        return inputs

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    def _restate_lengths(self) -> None:
        """
        Describe the completions of all `sample` calls at once, without those that only filled up a batch: TRL's code
        described, and counted, each call by itself.
        """
        metrics, sampled = self._metrics[self._mode], self.sampled
        for name in [name for name in metrics if name.startswith("completions/")]:
            del metrics[name][-sampled.num_calls :]
        lengths, ended = gather_object(sampled.lengths), gather_object(sampled.ended)
        terminated = [length for length, end in zip(lengths, ended, strict=True) if end] or [0]
        for kind, values in (("", lengths), ("terminated_", terminated)):
            metrics[f"completions/mean_{kind}length"].append(sum(values) / len(values))
            metrics[f"completions/min_{kind}length"].append(float(min(values)))
            metrics[f"completions/max_{kind}length"].append(float(max(values)))
        metrics["completions/clipped_ratio"].append(1 - sum(ended) / len(ended))
        filler_tokens = sum(gather_object([self._num_filler_tokens]))
        self._num_filler_tokens = 0
        if self._mode == "train":
            self.state.num_input_tokens_seen -= filler_tokens
            metrics["num_tokens"] = [self.state.num_input_tokens_seen]

    def loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_splits: int = 1,
        row_scale: float = 1.0,
        part_scale: float = 1.0,
        has_rows: bool = True,
    ) -> torch.Tensor:
        """
        TRL's loss of one micro-batch on the bare actor, scaled for gradient accumulation as TRL scales it.

        Args:
            model ([`~torch.nn.Module`]):
                The bare actor.
            inputs (`dict`):
                Inputs of the micro-batch.
            num_splits (`int`, *optional*, defaults to `1`):
                Parts of a micro-step, each with a backward pass of its own: as if accumulation were that much finer.
            row_scale, part_scale (`float`, *optional*, defaults to `1.0`):
                Rows, and micro-batches, of the whole batch for each one that is not all padding; undoes the padding in
                losses that are means over rows, and in terms that are means over micro-batches.
            has_rows (`bool`, *optional*, defaults to `True`):
                Whether the micro-batch has a row that is no padding, on any process. Otherwise it leaves no metrics.
        """
        changed: dict[str, float] = {}
        if self.kl_in_reward:
            changed["beta"] = 0.0
        if num_splits == 1 and row_scale == 1.0:
            with self._changed(**changed):
                return self._compute_loss(model, inputs)
        scale = row_scale if self.loss_type in self.ROW_MEANS else part_scale if self.loss_type == "bnpo" else 1.0
        if scale != 1.0:
            # Scaled before the loss, not after it: its entropy and router terms are means over micro-batches
            inputs = {**inputs, "advantages": inputs["advantages"] * scale}
            changed["beta"] = changed.get("beta", self.beta) * scale
        of_parts = part_scale
        if self.model.training:
            changed["current_gradient_accumulation_steps"] = self.current_gradient_accumulation_steps * num_splits
        elif self.loss_type in self.TOKEN_TOTALS:
            of_parts = part_scale / num_splits  # TRL does not accumulate in evaluation
        if of_parts != 1.0 and not self.use_adaptive_entropy:  # an adaptive coefficient is changed by the loss itself
            changed["entropy_coef"] = self.entropy_coef * of_parts
        if of_parts != 1.0 and self.aux_loss_enabled:
            changed["router_aux_loss_coef"] = self.router_aux_loss_coef * of_parts
        steps, metrics = self.args.steps_per_generation, self._metrics[self._mode]
        counts = {name: len(metrics[name]) for name in ("policy_loss", "entropy_coef") if name in metrics}
        self.args.steps_per_generation = steps * num_splits
        try:
            with self._changed(**changed), contextlib.nullcontext() if has_rows else self._unmeasured():
                loss = self._compute_loss(model, inputs)
        finally:
            self.args.steps_per_generation = steps
        # What TRL logs of the scaled numbers; empty micro-batches leave no metrics
        for name, is_scaled, factor in (
            ("policy_loss", scale != 1.0, part_scale),
            ("entropy_coef", "entropy_coef" in changed, of_parts),
        ):
            if is_scaled and len(metrics.get(name, ())) > counts.get(name, 0):
                metrics[name][-1] /= factor
        averaged = not self.model.training and self.loss_type not in self.TOKEN_TOTALS
        return loss / num_splits if averaged else loss

    @contextlib.contextmanager
    def _changed(self, **values: float) -> Iterator[None]:
        """Inside, attributes that TRL's loss reads have other values."""
        before = {name: getattr(self, name) for name in values}
        vars(self).update(values)
        try:
            yield
        finally:
            vars(self).update(before)

    @contextlib.contextmanager
    def _unmeasured(self) -> Iterator[None]:
        """Inside, what TRL's code measures is not kept."""
        metrics = {name: list(values) for name, values in self._metrics[self._mode].items()}
        try:
            yield
        finally:
            self._metrics[self._mode].clear()
            self._metrics[self._mode].update(metrics)

    def is_taught_by(self, inputs: dict[str, Any]) -> bool:
        """Whether a micro-batch has something to learn for this actor: advantages, or a loss term without them."""
        has_kl = self.beta != 0.0 and not self.kl_in_reward
        other_terms = has_kl or self._entropy_bonus_enabled or self.aux_loss_enabled
        return other_terms or bool(inputs["advantages"].any())

    def log_ratios(self, inputs: dict[str, Any]) -> torch.Tensor:
        """
        `log pi(token) - log pi_ref(token)` under the policy that sampled, of every token of a batch.

        Args:
            inputs (`dict`):
                What `score` returned, of an actor with a reference (`beta` is not 0). The log-probabilities at
                sampling time are added where they are missing.

        Returns:
            `torch.Tensor` of shape `(R, T)`, 0 at tokens that are not trained.
        """
        if "old_per_token_logps" not in inputs:
            # As TRL does where a batch serves several updates; otherwise the first loss would find them
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
            mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
            size = self.args.per_device_train_batch_size
            with torch.no_grad(), self.accelerator.autocast():
                inputs["old_per_token_logps"] = self._get_per_token_logps_and_entropies(
                    self.model, ids, mask, inputs["completion_ids"].size(1), batch_size=size
                )[0]
        ratios = inputs["old_per_token_logps"] - inputs["ref_per_token_logps"]
        return ratios.masked_fill(~trained_tokens(inputs), 0.0)

    def pop_metrics(self, mode: str) -> dict[str, list[float]]:
        """The metrics that TRL's code collected since the last call, one list for each name."""
        metrics = dict(self._metrics[mode])
        self._metrics[mode].clear()
        return metrics

    def training_metrics(self) -> dict[str, list[float]]:
        """A copy of what TRL's code collected for the next training log."""
        return {name: list(values) for name, values in self._metrics["train"].items()}

    def load_training_metrics(self, metrics: dict[str, list[float]]) -> None:
        self._metrics["train"].clear()
        for name, values in metrics.items():
            self._metrics["train"][name] = list(values)

    def entropy_control(self) -> dict[str, float]:
        """State of TRL's adaptive entropy control, for a checkpoint."""
        return {"entropy_coef": self.entropy_coef, "last_world_entropy": self._last_world_entropy}

    def load_entropy_control(self, state: dict[str, float]) -> None:
        self.entropy_coef, self._last_world_entropy = state["entropy_coef"], state["last_world_entropy"]

    # TRL's hooks

    def _generate(self, prompts: list) -> tuple:
        merged = self._take_rollouts()
        missing = len(prompts) - len(merged[0])
        return _pad(merged, missing, self._tokenizer.eos_token_id) if missing else merged

    def _take_rollouts(self) -> tuple:
        """The sampled rollouts as one; noted in `sampled`."""
        rollouts, self._rollouts = self._rollouts, []
        assert rollouts, "an actor's rollout is sampled by the team before it is scored"
        merged = _merge(rollouts)
        ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
        masks = merged[2] or [[1] * len(ids) for ids in merged[1]]
        lengths = [sum(mask) for mask in masks]
        self.sampled = Sampled(len(rollouts), lengths, [ids[-1] in ends for ids in merged[1]])
        return merged

    def _tokenize_prompts(self, prompts: list):
        check_chat_template(self.name, prompts[0], self._tokenizer)
        prompt_ids, images, fields = super()._tokenize_prompts(prompts)
        bos = self._tokenizer.bos_token
        if bos is not None and isinstance(prompts[0], str):
            # A text that a formatter rendered by the chat template brings a BOS of its own
            bos_id = self._tokenizer.bos_token_id
            prompt_ids = [
                ids[1:] if text.startswith(bos) and ids[:2] == [bos_id, bos_id] else ids
                for text, ids in zip(prompts, prompt_ids, strict=True)
            ]
        empty = next((prompt for prompt, ids in zip(prompts, prompt_ids, strict=True) if not ids), None)
        if empty is not None:
            raise ValueError(
                f"{self.name} gets a prompt without any token: {empty!r}. Its formatter, or `external_transition`, "
                f"must return a text that is not empty."
            )
        return prompt_ids, images, fields

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        completion_ids, logprobs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        if self._strips_padding and logprobs is None:
            pad = self._tokenizer.pad_token_id
            completion_ids = [_without_trailing(ids, pad, self.eos_token_ids) for ids in completion_ids]
        # TRL's code reads the last token of every completion, so none may be empty
        self._empty_rows = {row for row, ids in enumerate(completion_ids) if not ids}
        completion_ids = [ids or [self._tokenizer.eos_token_id] for ids in completion_ids]
        if logprobs is not None:
            logprobs = [row or [0.0] for row in logprobs]
        return completion_ids, logprobs

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list) -> torch.Tensor:
        rewards, self._rewards = self._rewards, None
        return rewards

    def _send_telemetry(self) -> None:
        """The team is one trainer; its parts report nothing."""


def trained_tokens(inputs: dict[str, Any]) -> torch.Tensor:
    """Which completion tokens the losses see, `(R, T)`, bool."""
    mask = inputs["completion_mask"]
    return (mask * inputs["tool_mask"] if "tool_mask" in inputs else mask).bool()


def _agent_args(args: GRPOConfig, loads: bool, trainable: bool) -> GRPOConfig:
    """The team's arguments without what the team does itself: reporting, saving, evaluating, publishing."""
    args = copy.copy(args)
    if loads:
        # TRL's default, "auto", gives the first actor all the room it likes and the last one what is left
        args.model_init_kwargs = {"device_map": None, **(args.model_init_kwargs or {})}
    args.gradient_checkpointing_kwargs = copy.deepcopy(args.gradient_checkpointing_kwargs)
    args.report_to = []
    args.push_to_hub = args.log_completions = args.sync_ref_model = args.load_best_model_at_end = False
    args.log_completions_hub_repo = None
    args.eval_strategy, args.save_strategy = type(args.eval_strategy)("no"), type(args.save_strategy)("no")
    args.disable_tqdm = True
    if not trainable:
        args.beta = 0.0
    args.reward_weights = list(args.reward_weights) if args.reward_weights is not None else None
    return args


def _reference_of(model: nn.Module) -> contextlib.AbstractContextManager:
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        # ZeRO-3 partitioned the model when it was loaded, so it came from a place it can be loaded from again
        return contextlib.nullcontext()
    return reference_is_a_copy_of(model)


def _merge(rollouts: list[tuple]) -> tuple:
    """Rollouts of several turns as one: token ids, masks, texts and log-probabilities one after the other."""
    if len(rollouts) == 1:
        return rollouts[0]
    prompt_ids, completion_ids, masks, completions, logprobs = zip(*(rollout[:5] for rollout in rollouts), strict=True)
    if any(mask is not None for mask in masks):
        masks = [
            [[1] * len(row) for row in ids] if mask is None else mask
            for mask, ids in zip(masks, completion_ids, strict=True)
        ]
    lists = [prompt_ids, completion_ids, masks, completions, logprobs]
    merged = [None if any(part is None for part in parts) else sum(parts, []) for parts in lists]
    return (*merged, *rollouts[0][5:])


def _pad(rollout: tuple, missing: int, eos: int) -> tuple:
    """A rollout with `missing` more rows, whose one token no loss sees."""
    prompt_ids, completion_ids, mask, completions, logprobs = rollout[:5]
    mask = [[1] * len(ids) for ids in completion_ids] if mask is None else mask
    nothing = "" if isinstance(completions[0], str) else [{"role": "assistant", "content": ""}]
    return (
        prompt_ids + prompt_ids[:1] * missing,
        completion_ids + [[eos]] * missing,
        mask + [[0]] * missing,
        completions + [nothing] * missing,
        None if logprobs is None else logprobs + [[0.0]] * missing,
        *rollout[5:],
    )


def _without_trailing(ids: list[int], pad: int, eos: list[int]) -> list[int]:
    end = len(ids)
    while end and ids[end - 1] == pad and pad not in eos:
        end -= 1
    return ids[:end]


def _text(completion: str | list[dict]) -> str:
    return completion if isinstance(completion, str) else completion[-1].get("content", "")
