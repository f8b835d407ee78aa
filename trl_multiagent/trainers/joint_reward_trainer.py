# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Learns the reward of joint responses from pairs of them."""

import copy
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from torch import nn
from transformers import PreTrainedTokenizerBase, set_seed
from trl import RewardTrainer

from .._compat import find_file
from ..agents.loading import (
    check_vocabulary,
    clear_dense_quantization,
    copy_tokenizer,
    either,
    identifier,
    init_kwargs,
    load_tokenizer,
)
from ..functional.preference_losses import calibration_error
from ..models.joint_reward import (
    JointRewardScorer,
    Render,
    check_reward_model,
    encode_joint_texts,
    head_names,
    keep_end,
    length_limit,
    load_reward_model,
    render_joint_response,
    reward_tokenizer,
)
from ..models.language_model import base_language_model
from ..rollouts.formatters import check_prompt
from ..rollouts.preferences import JOINT_COLUMNS
from .joint_reward_config import JointRewardConfig


logger = logging.getLogger(__name__)

# What TRL takes, the last by its old name
PAIR_COLUMNS = (("chosen", "rejected"), ("chosen_ids", "rejected_ids"), ("chosen_input_ids", "rejected_input_ids"))


class JointRewardTrainer(RewardTrainer):
    """
    [`~trl.RewardTrainer`] on joint responses: each is rendered as one text, and the text of the preferred one shall
    get the higher reward, `-log sigmoid(r(winner) - r(loser))` (Bradley-Terry). On a team of one it is TRL's trainer.

    Args:
        model (`str`, [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            A hub id or a directory, which is loaded as a sequence classification model with one label (also an adapter
            of one); or such a model.
        args ([`JointRewardConfig`], *optional*):
            The configuration.
        train_dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            Pairs with the columns `prompts`, `winner_completions` and `loser_completions`, each a list with one entry
            for each actor; a prompt is a text or a list of messages. A column `margin` is what the rewards shall at
            least differ by; others are ignored. All formats of [`~trl.RewardTrainer`] are taken too, as they are
            there.
        eval_dataset (as `train_dataset`, or a `dict` of such, *optional*):
            Pairs for evaluation.
        processing_class, tokenizer ([`~transformers.PreTrainedTokenizerBase`] or `str`, *optional*):
            Two words for the tokenizer, which is copied. Default: the model's own. Its copy gets another pad token
            where that is EOS or missing.
        render (`Callable`, *optional*):
            `(prompts, completions) -> str`, the text of a joint response. Default:
            [`~trl_multiagent.models.joint_reward.render_joint_response`].
        peft_config ([`~peft.PeftConfig`], *optional*):
            Adapters. A copy of it trains and saves the head too.
        quantization_config (*optional*):
            For loading a model by its identifier.
        **kwargs:
            Further arguments of [`~trl.RewardTrainer`].

    Raises:
        ValueError: the model is no reward model, its tokenizer has no EOS token or more tokens than the model, a row
            has the wrong columns or lengths, or arguments contradict each other.
        TypeError: `args` is no [`JointRewardConfig`].

    Besides TRL's metrics there is `calibration_error`, the expected calibration error of `sigmoid(r(winner) -
    r(loser))`. It, `accuracy`, `margin` and `mean_reward` are over all pairs since the last log, or of the evaluation.

    The export of a model loads with `AutoModelForSequenceClassification.from_pretrained(directory)`. That of an
    adapter loads with `AutoPeftModelForSequenceClassification.from_pretrained(directory, num_labels=1,
    pad_token_id=...)`, with the pad token of the exported tokenizer, which the base does not know. [`scorer`], or a
    [`~trl_multiagent.models.joint_reward.JointRewardScorer`] of a loaded export, renders and encodes as in training.
    """

    _tag_names = ["trl", "trl_multiagent", "joint-reward"]
    _name = "Joint Reward"

    def __init__(
        self,
        model: str | os.PathLike | nn.Module,
        args: JointRewardConfig | None = None,
        data_collator: Callable | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | str | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | str | None = None,
        render: Render | None = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        **kwargs,
    ):
        model = os.fspath(model) if isinstance(model, os.PathLike) else model
        loaded = isinstance(model, str)
        if not loaded:
            check_reward_model(model)
        if args is None:
            name = identifier(model).rstrip("/").split("/")[-1] or type(model).__name__
            args = JointRewardConfig(f"{name}-Reward")
        if not isinstance(args, JointRewardConfig):
            raise TypeError(f"`args` must be of type JointRewardConfig, got {type(args).__name__}.")
        if args.freeze_backbone and peft_config is not None:
            raise ValueError(
                "freeze_backbone=True trains the head alone, `peft_config` adapters in the backbone. Leave one out."
            )
        if render is not None and not callable(render):
            raise TypeError(f"`render` must map prompts and completions to a text, got {type(render).__name__}.")
        tokenizer = _resolve_tokenizer(either(tokenizer=tokenizer, processing_class=processing_class), model, args)
        if loaded:
            # A new head is random
            set_seed(args.seed)
            model = load_reward_model(model, **_load_kwargs(args, quantization_config))
        _prepare_model(model, tokenizer, args)

        self.render = render_joint_response if render is None else render
        self._max_length = length_limit(model, args.max_length)
        # Rewards of winners and losers (P, 2) since the last log
        self._pairs: dict[str, list[torch.Tensor]] = {"train": [], "eval": []}
        peft_config = peft_config if peft_config is None else _with_head(peft_config, model)
        # They were used; TRL warns that it ignores them
        model_init_kwargs = args.model_init_kwargs
        args.model_init_kwargs = None if loaded else model_init_kwargs
        try:
            super().__init__(
                *(model, args, data_collator, train_dataset, eval_dataset, tokenizer),
                quantization_config=None if loaded else quantization_config,
                peft_config=peft_config,
                **kwargs,
            )
        finally:
            args.model_init_kwargs = model_init_kwargs

    # Data

    def _prepare_dataset(self, dataset, processing_class, args, dataset_name):
        _check_pad_token(processing_class)
        columns = dataset.column_names or list(next(iter(dataset), {}))
        is_joint = set(JOINT_COLUMNS) <= set(columns)
        if not is_joint and not any(set(pair) <= set(columns) for pair in PAIR_COLUMNS):
            raise ValueError(
                f"The {dataset_name} dataset has the columns {sorted(columns)}, expected {', '.join(JOINT_COLUMNS)} "
                f"for joint responses, or chosen and rejected."
            )
        # A stream is mapped while it is read, in one process
        options = {}
        if isinstance(dataset, Dataset):
            # From the cache, another `render` of the same name would go unnoticed
            options = {"num_proc": args.dataset_num_proc, "load_from_cache_file": False}
        common = {"name": dataset_name, "tokenizer": processing_class, "max_length": self._max_length}
        if is_joint:
            dataset = dataset.map(
                _encode_pair,
                with_indices=True,
                fn_kwargs={"render": self.render, **common},
                remove_columns=[name for name in columns if name != "margin"],
                **options,
            )
        # TRL drops what is longer than its limit
        unlimited = copy.copy(args)
        unlimited.max_length = None
        dataset = super()._prepare_dataset(dataset, processing_class, unlimited, dataset_name)
        if is_joint:
            return dataset
        return dataset.map(_shorten_pair, with_indices=True, fn_kwargs=common, **options)

    # Metrics

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        mode = "train" if self.model.training else "eval"
        rewards = outputs.logits.detach().float().view(2, -1).T.contiguous()  # (P, 2)
        # In training the last batch of an epoch is fetched before the others of its step are done, and would cut them
        gather = self.accelerator.gather if mode == "train" else self.accelerator.gather_for_metrics
        self._pairs[mode].append(gather(rewards).cpu())
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log what [`~trl.RewardTrainer`] does, with means over pairs instead of over batches, and the calibration."""
        mode = "train" if self.model.training else "eval"
        if self._pairs[mode]:
            rewards = torch.cat(self._pairs[mode]).double()
            margins = rewards[:, 0] - rewards[:, 1]
            means = {
                "accuracy": (margins > 0).double().mean().item(),
                "margin": margins.mean().item(),
                "mean_reward": rewards.mean().item(),
                "calibration_error": calibration_error(margins),
            }
            self._metrics[mode].update({name: [value] for name, value in means.items()})
            self._pairs[mode].clear()
        super().log(logs, start_time)

    # The trained model

    def scorer(self, batch_size: int | None = None) -> JointRewardScorer:
        """
        The model as it is now, to score joint responses with.

        Args:
            batch_size (`int`, *optional*):
                Joint responses in a forward pass. Default: `args.per_device_eval_batch_size`.
        """
        return JointRewardScorer(
            self.accelerator.unwrap_model(self.model),
            self.processing_class,
            self.render,
            self._max_length,
            self.args.per_device_eval_batch_size if batch_size is None else batch_size,
        )

    def _send_telemetry(self) -> None:
        """Nothing is reported."""


# Models and tokenizers


def _resolve_tokenizer(tokenizer: Any, model: str | nn.Module, args: JointRewardConfig) -> PreTrainedTokenizerBase:
    """A copy of the given tokenizer, or the model's own, with a pad token that is not EOS."""
    source = tokenizer if isinstance(tokenizer, str) else identifier(model)
    if tokenizer is None and not source:
        raise ValueError("The reward model is a loaded model and has no tokenizer. Pass `tokenizer=`.")
    if tokenizer is None or isinstance(tokenizer, str):
        tokenizer = load_tokenizer(source, args)
    else:
        tokenizer = copy_tokenizer("The reward model", tokenizer)
    if args.eos_token is not None and args.eos_token in tokenizer.get_vocab():  # else TRL says so
        tokenizer.eos_token = args.eos_token
    if args.pad_token is not None and args.pad_token == tokenizer.eos_token:
        raise ValueError(
            f"pad_token={args.pad_token!r} is the EOS token: the model reads the reward at the last token that is not "
            f"the pad token, and EOS is the last of each text. Leave `pad_token` out, or name another token."
        )
    return reward_tokenizer(tokenizer)


def _check_pad_token(tokenizer: PreTrainedTokenizerBase) -> None:
    """A chat template's tokenizer may have brought another EOS."""
    if tokenizer.pad_token_id == tokenizer.eos_token_id:
        raise ValueError(
            f"The pad token {tokenizer.pad_token!r} is the EOS token of `chat_template_path`, at which the reward is "
            f"read. Set another `tokenizer.pad_token`."
        )


def _load_kwargs(args: JointRewardConfig, quantization_config: Any) -> dict[str, Any]:
    if quantization_config is not None and "quantization_config" in (args.model_init_kwargs or {}):
        raise ValueError("`quantization_config` is given both as an argument and in `model_init_kwargs`. Give one.")
    return init_kwargs(args, quantization_config)


def _prepare_model(model: nn.Module, tokenizer: PreTrainedTokenizerBase, args: JointRewardConfig) -> None:
    """Check a loaded model, make it saveable, and freeze what is not trained."""
    check_reward_model(model)
    check_vocabulary("The reward model", model, tokenizer)
    clear_dense_quantization("The reward model", model)
    is_adapter = model is not base_language_model(model)
    if args.freeze_backbone and is_adapter:
        raise ValueError("freeze_backbone=True trains the head alone, but the model has adapters. Pass its base.")
    if args.freeze_backbone or is_adapter:
        base = base_language_model(model)
        head = [p for name in head_names(model) for p in base.get_submodule(name).parameters()]
        if args.freeze_backbone:
            model.requires_grad_(False)
            for parameter in head:
                parameter.requires_grad_(True)
        elif not any(parameter.requires_grad for parameter in head):
            logger.warning(
                "The adapter of the reward model does not train its head. A new head stays random, and is not saved: "
                "put %s into `modules_to_save`.",
                head_names(model),
            )


def _with_head(peft_config: Any, model: nn.Module) -> Any:
    """A copy of a PEFT config which trains and saves the head of a sequence classification model."""
    from peft import PeftConfig, TaskType

    if not isinstance(peft_config, PeftConfig):
        return peft_config  # TRL says so
    if peft_config.is_prompt_learning:
        raise ValueError(
            f"{type(peft_config).__name__} puts vectors before the tokens, so that the model cannot see where a text "
            f"ends. Use adapters, such as `LoraConfig`."
        )
    peft_config = copy.deepcopy(peft_config)
    saved = list(peft_config.modules_to_save or [])
    missing = [name for name in head_names(model) if name not in saved]
    if missing or peft_config.task_type != TaskType.SEQ_CLS:
        logger.info("The adapter gets task_type='SEQ_CLS', and %s in `modules_to_save`.", missing or "nothing new")
    if find_file(identifier(model), "config.json") is None:
        logger.warning(
            "The export will hold the adapter, but its base cannot be found by name, so it loads only on the same "
            "base. Export `trainer.model.merge_and_unload()` instead, or load the base from an identifier."
        )
    peft_config.modules_to_save = saved + missing
    peft_config.task_type = TaskType.SEQ_CLS
    return peft_config


# Rows


def _encode_pair(
    row: dict[str, Any],
    index: int,
    render: Callable[..., str],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None,
    name: str,
) -> dict[str, list[int]]:
    """Token ids of winner and loser of a joint row."""
    where = f"Row {index} of the {name} dataset"
    lists = {column: row[column] for column in JOINT_COLUMNS}
    _check_lists(lists, where)
    texts = [render(row["prompts"], row[column]) for column in ("winner_completions", "loser_completions")]
    chosen, rejected = encode_joint_texts(tokenizer, texts, max_length)
    return {"chosen_ids": chosen, "rejected_ids": rejected}


def _check_lists(lists: dict[str, Sequence[Any]], where: str) -> None:
    for column, entries in lists.items():
        if not isinstance(entries, (list, tuple)):
            raise ValueError(
                f"{where}: `{column}` is a {type(entries).__name__}, expected a list with one entry for each actor."
            )
    lengths = {column: len(entries) for column, entries in lists.items()}
    if len(set(lengths.values())) > 1 or not lengths["prompts"]:
        numbers = ", ".join(f"`{column}` has {length}" for column, length in lengths.items())
        raise ValueError(f"{where}: {numbers} entries, expected one for each actor in each.")
    for actor, prompt in enumerate(lists["prompts"]):
        check_prompt(prompt, f"{where}, actor {actor}")
    for column in JOINT_COLUMNS[1:]:
        for actor, text in enumerate(lists[column]):
            if not isinstance(text, str):
                raise ValueError(
                    f"{where}: `{column}` holds a {type(text).__name__} for actor {actor}, expected a text (`str`)."
                )


def _shorten_pair(
    row: dict[str, Any], index: int, tokenizer: PreTrainedTokenizerBase, max_length: int | None, name: str
) -> dict[str, list[int]]:
    """The ends of the token ids of a pair that TRL encoded."""
    for column in ("chosen_ids", "rejected_ids"):
        if not row[column] or row[column][-1] == tokenizer.pad_token_id:
            raise ValueError(
                f"Row {index} of the {name} dataset: `{column}` is empty or ends with the pad token "
                f"{tokenizer.pad_token!r}, which a reward model passes over. End texts with EOS."
            )
    return {column: keep_end(tokenizer, row[column], max_length) for column in ("chosen_ids", "rejected_ids")}
