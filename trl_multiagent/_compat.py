# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""
Every private name of TRL and transformers that the package uses, and the contract with them.

Nothing else imports from private upstream modules. Each entry of `TRL_CONTRACT` says what we lean on and what would
let us drop it; a test compares it with the installed TRL and fails first, by name, when a release changes one.
"""

import contextlib
import copy
import os
from collections.abc import Iterator
from dataclasses import dataclass

import trl
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import convert_to_fp32
from packaging.version import Version
from torch import nn
from transformers.trainer_utils import rotate_checkpoints
from transformers.utils import cached_file
from trl.data_utils import is_conversational
from trl.trainer import grpo_trainer
from trl.trainer.callbacks import SyncRefModelCallback
from trl.trainer.reward_trainer import suppress_seqcls_warning
from trl.trainer.utils import (
    RepeatSampler,
    create_model_from_path,
    get_callable_name,
    print_prompt_completions_sample,
    repeat_iterable_dataset,
    shuffle_sequence_dict,
    split_tensor_dict,
    use_adapter,
)


__all__ = [
    "TRL_ATTRIBUTES",
    "TRL_CONTRACT",
    "RepeatSampler",
    "SyncRefModelCallback",
    "create_model_from_path",
    "get_callable_name",
    "find_file",
    "groups_of_one",
    "is_conversational",
    "keep_outputs_in_float32",
    "print_prompt_completions_sample",
    "reference_is_a_copy_of",
    "repeat_iterable_dataset",
    "rotate_checkpoints",
    "separate_accelerate_state",
    "shuffle_sequence_dict",
    "split_tensor_dict",
    "suppress_seqcls_warning",
    "use_adapter",
]


@dataclass(frozen=True)
class Contract:
    """One private thing of TRL: where it is, the parameters we rely on, why, and when it can go."""

    where: str
    parameters: tuple[str, ...]
    why: str
    drop_when: str


TRL_CONTRACT = (
    Contract(
        "trl.trainer.grpo_trainer.GRPOTrainer._generate",
        ("self", "prompts"),
        "GRPOAgent hands over the rollouts that the team sampled; items 0 to 4 of the 8-tuple are prompt ids, "
        "completion ids, loss mask or None, completions, log-probabilities or None",
        "TRL has a public hook that takes ready rollouts with their texts",
    ),
    Contract(
        "trl.trainer.grpo_trainer.GRPOTrainer._generate_single_turn",
        ("self", "prompt_ids", "images", "multimodal_fields", "num_generations"),
        "GRPOAgent removes padding after a stop string, which TRL counts as tokens",
        "TRL masks padding after stopping criteria other than EOS",
    ),
    Contract(
        "trl.trainer.grpo_trainer.GRPOTrainer._tokenize_prompts",
        ("self", "prompts"),
        "GRPOAgent drops a second BOS of a text that was rendered by a chat template; item 0 is the token ids",
        "TRL tokenizes rendered texts without another BOS",
    ),
    Contract(
        "trl.trainer.grpo_trainer.GRPOTrainer._calculate_rewards",
        ("self", "inputs", "prompts", "completions", "completion_ids_list"),
        "GRPOAgent returns the team's rewards, shape (B over all processes, F)",
        "TRL has a public hook for rewards",
    ),
    Contract(
        "trl.trainer.grpo_trainer.GRPOTrainer._generate_and_score_completions",
        ("self", "inputs"),
        "called once for each actor and generation batch: pads, masks, old and reference log-probabilities, "
        "advantages",
        "TRL offers a public way from rollouts to loss inputs",
    ),
    Contract(
        "trl.trainer.grpo_trainer.GRPOTrainer._compute_loss",
        ("self", "model", "inputs"),
        "the actor's stock loss on its bare module",
        "`compute_loss` can be called without a wrapped model",
    ),
    Contract(
        "trl.trainer.grpo_trainer.GRPOTrainer._get_per_token_logps_and_entropies",
        ("self", "model", "batch_size"),
        "called with prompts and completions in one, their mask and the completions' length, for log-probabilities "
        "at sampling time where TRL does not need them; item 0 is those, shape (B, T)",
        "TRL can be told to keep log-probabilities at sampling time",
    ),
    Contract(
        "trl.trainer.base_trainer._BaseTrainer._send_telemetry",
        ("self",),
        "an actor's trainer is a part of the team and sends no telemetry of its own",
        "never trained trainers send none",
    ),
    Contract(
        "transformers.Trainer.create_accelerator_and_postprocess",
        ("self",),
        "an Accelerator with a DeepSpeed plugin can be made once a process, so the actors' trainers share one",
        "`Trainer` takes an accelerator",
    ),
    Contract(
        "transformers.Trainer._prepare_inputs",
        ("self", "inputs"),
        "overridden: one micro-batch of a rollout instead of a collated batch",
        "never: it is the documented place for it",
    ),
    Contract(
        "transformers.Trainer._clip_grad_norm",
        ("self", "model"),
        "overridden: clips each entity by its own norm",
        "`Trainer` clips by parameter group",
    ),
    Contract(
        "transformers.Trainer._get_dataloader",
        ("self", "dataset", "description", "batch_size", "sampler_fn", "is_training"),
        "called: loaders of whole generation batches",
        "it is public",
    ),
    Contract(
        "transformers.Trainer._get_train_sampler",
        ("self", "train_dataset"),
        "replaced by the sampler of groups",
        "`Trainer` takes a sampler",
    ),
    Contract(
        "transformers.Trainer._get_eval_sampler",
        ("self", "eval_dataset"),
        "replaced by the sampler of groups",
        "`Trainer` takes a sampler",
    ),
    Contract(
        "transformers.Trainer._set_signature_columns_if_needed",
        ("self",),
        "overridden: every column is kept",
        "`remove_unused_columns=False` needs no columns",
    ),
    Contract(
        "transformers.Trainer._save_checkpoint",
        ("self", "model", "trial"),
        "overridden: adapters are not merged, and the team's own state is written",
        "checkpoints have a public hook",
    ),
    Contract(
        "transformers.Trainer._get_output_dir",
        ("self", "trial"),
        "overridden and called: the folder of checkpoints",
        "`Trainer` can save a checkpoint elsewhere than in `output_dir`",
    ),
    Contract(
        "transformers.Trainer._load_from_checkpoint",
        ("self", "resume_from_checkpoint", "model"),
        "overridden: loads every entity",
        "checkpoints have a public hook",
    ),
    Contract(
        "transformers.Trainer._load_best_model",
        ("self",),
        "overridden: loads every entity",
        "checkpoints have a public hook",
    ),
    Contract(
        "transformers.Trainer._init_training_state",
        ("self", "max_steps", "num_update_steps_per_epoch", "num_train_epochs", "resume_from_checkpoint", "trial"),
        "overridden: returns the epoch and the number of its batches that a checkpoint names, and lets users' objects "
        "go on",
        "checkpoints have a public hook",
    ),
    Contract(
        "transformers.Trainer._prepare_for_training",
        ("self", "max_steps", "train_dataloader", "resume_from_checkpoint"),
        "overridden: called without the checkpoint, and followed by the loading of optimizer and team's state",
        "checkpoints have a public hook",
    ),
    Contract(
        "transformers.Trainer._run_epoch",
        ("self", "model", "epoch", "train_dataloader", "steps_in_epoch"),
        "overridden: the position in the data is counted from here; called with keywords",
        "callbacks are told the epoch and its length",
    ),
    Contract(
        "transformers.Trainer._maybe_log_save_evaluate",
        ("self", "tr_loss", "grad_norm", "model", "trial", "epoch"),
        "overridden: what the last step of an epoch logs and saves waits for the epoch's end, which calls it again",
        "`Trainer` saves after the events of an epoch's end",
    ),
    Contract(
        "transformers.Trainer._load_rng_state",
        ("self", "checkpoint"),
        "overridden: the random states are in the team's own file",
        "checkpoints have a public hook",
    ),
    Contract(
        "transformers.Trainer._push_from_checkpoint",
        ("self", "checkpoint_folder"),
        "called after a checkpoint is complete",
        "checkpoints have a public hook",
    ),
    Contract(
        "transformers.trainer_utils.rotate_checkpoints",
        ("output_dir", "save_total_limit", "best_model_checkpoint", "use_mtime"),
        "called: `save_total_limit` as `Trainer` honours it",
        "it is documented",
    ),
    Contract(
        "transformers.utils.cached_file",
        ("path_or_repo_id", "filename"),
        "finds files of hub ids without an error where there are none",
        "huggingface_hub offers the same for local directories",
    ),
    Contract(
        "trl.trainer.grpo_trainer.create_model_from_path",
        ("model_id",),
        "`reference_is_a_copy_of` replaces it while an actor is built, to copy the reference instead of reloading it",
        "TRL copies the reference of a model that was passed as an object",
    ),
    Contract(
        "trl.trainer.reward_trainer.RewardTrainer._prepare_dataset",
        ("self", "dataset", "processing_class", "args", "dataset_name"),
        "overridden: renders joint responses, and keeps the end of long texts; called for every dataset",
        "TRL has a public hook for the preparation of a dataset",
    ),
    Contract(
        "trl.trainer.reward_trainer.RewardTrainer.compute_loss",
        ("self", "model", "inputs", "return_outputs", "num_items_in_batch"),
        "overridden: the logits are those of the winners, then those of the losers, and `_metrics[mode]` holds lists "
        "of which `log` takes the means",
        "TRL takes means over pairs and has a hook for more metrics",
    ),
    Contract(
        "trl.trainer.reward_trainer.suppress_seqcls_warning",
        (),
        "a language model is loaded without a warning about its new reward head",
        "public",
    ),
    Contract(
        "trl.trainer.utils.shuffle_sequence_dict",
        ("seq_dict",),
        "one permutation for all actors' rows, drawn as TRL draws it",
        "public",
    ),
    Contract("trl.trainer.utils.split_tensor_dict", ("tensor_dict", "num_chunks"), "micro-batches", "public"),
    Contract(
        "trl.trainer.utils.RepeatSampler",
        ("data_source", "mini_repeat_count", "batch_size", "repeat_count", "shuffle", "seed"),
        "order of the prompts in evaluation; the training order follows it",
        "public",
    ),
    Contract(
        "trl.trainer.utils.repeat_iterable_dataset",
        ("dataset", "mini_repeat_count", "batch_size", "repeat_count"),
        "groups over streamed prompts",
        "public",
    ),
    Contract(
        "trl.trainer.utils.use_adapter",
        ("model", "adapter_name"),
        "the reference of an adapter, as TRL's trainers take it",
        "public",
    ),
)


@contextlib.contextmanager
def separate_accelerate_state() -> Iterator[None]:
    """
    Inside, what Accelerate keeps for the whole process is begun anew, so that another trainer can run beside one.

    Drop it when Accelerate can make a second, independent state.
    """
    classes = (AcceleratorState, GradientState, PartialState)
    states = [state._shared_state for state in classes]
    for state in classes:
        state._shared_state = {}
    try:
        yield
    finally:
        for state, shared in zip(classes, states, strict=True):
            state._shared_state = shared


def find_file(source: str, name: str, revision: str | None = None) -> str | None:
    """Path of a file of a directory or a hub id (downloaded if need be); None if it is not there."""
    if not source or (os.path.isabs(source) and not os.path.isdir(source)):
        return None
    return cached_file(
        source,
        name,
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_connection_errors=False,
    )


def keep_outputs_in_float32(trainer: grpo_trainer.GRPOTrainer) -> None:
    """
    Give the bare model of a trainer under mixed precision the float32 outputs that its wrapper would give.

    TRL before 1.16 takes log-probabilities from the model's logits and relies on Accelerate's wrapper to convert them.
    Drop it when 1.16 is the oldest TRL: its fused head works in float32.
    """
    if trainer.accelerator.native_amp and Version(trl.__version__) < Version("1.16.0"):
        trainer.model.register_forward_hook(lambda module, args, output: convert_to_fp32(output))


# What the package reads and writes on a `GRPOTrainer` instance
TRL_ATTRIBUTES = (
    "_entropy_bonus_enabled",
    "_last_world_entropy",
    "_metrics",
    "_tokenizer",
    "aux_loss_enabled",
    "beta",
    "current_gradient_accumulation_steps",
    "entropy_coef",
    "eos_token_ids",
    "generation_config",
    "loss_type",
    "num_generations",
    "num_generations_eval",
    "num_iterations",
    "use_adaptive_entropy",
    "ref_model",
    "reward_func_names",
    "reward_weights",
)


@contextlib.contextmanager
def groups_of_one(config: trl.GRPOConfig) -> Iterator[None]:
    """
    While active, the checks of a `GRPOConfig` with `num_generations=1` see groups of two, in batches twice as large.

    TRL refuses groups of one, since its estimator needs a baseline. Drop it when TRL leaves that to the trainer.
    """
    explicit = config.generation_batch_size is not None
    generations_eval = config.num_generations_eval
    config.num_generations, config.num_generations_eval = 2, generations_eval or 1
    config.per_device_train_batch_size *= 2
    if explicit:
        config.generation_batch_size *= 2
    try:
        yield
    finally:
        config.num_generations, config.num_generations_eval = 1, generations_eval
        config.per_device_train_batch_size //= 2
        if config.generation_batch_size is not None:
            config.generation_batch_size //= 2


@contextlib.contextmanager
def reference_is_a_copy_of(model: nn.Module) -> Iterator[None]:
    """
    While active, a `GRPOTrainer` that loads its reference model gets a copy of `model` as it is at that moment.

    Stock TRL reloads the reference from `config._name_or_path`: a model built from a config has none, and a model
    whose weights were changed after loading would get a reference that differs from it at step 0.
    """

    def copy_of_model(*args, **kwargs) -> nn.Module:
        return copy.deepcopy(model).eval()

    original = grpo_trainer.create_model_from_path
    grpo_trainer.create_model_from_path = copy_of_model
    try:
        yield
    finally:
        grpo_trainer.create_model_from_path = original
