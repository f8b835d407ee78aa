# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""
What a run was set up with, so that a resume with something else is noticed: descriptions as JSON, and how they differ.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import datasets
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase, TrainingArguments

from ..models.critic import ValueModel
from ..models.language_model import base_language_model
from ..placement.backends import local_part
from .storage import CheckpointError


# Options that say where and when something is written or measured, or on what it is computed
MAY_CHANGE = {
    "output_dir",
    "logging_strategy",
    "logging_steps",
    "logging_first_step",
    "log_on_each_node",
    "include_num_input_tokens_seen",
    "log_level",
    "log_level_replica",
    "disable_tqdm",
    "report_to",
    "run_name",
    "project",
    "trackio_space_id",
    "trackio_bucket_id",
    "trackio_static_space_id",
    "log_completions",
    "num_completions_to_print",
    "log_unique_prompts",
    "log_multimodal",
    "log_completions_hub_repo",
    "eval_strategy",
    "eval_steps",
    "eval_delay",
    "per_device_eval_batch_size",
    "num_generations_eval",
    "eval_on_start",
    "eval_accumulation_steps",
    "bf16_full_eval",
    "fp16_full_eval",
    "save_strategy",
    "save_steps",
    "save_only_model",
    "save_on_each_node",
    "save_total_limit",
    "enable_jit_checkpoint",
    "push_to_hub",
    "hub_token",
    "hub_private_repo",
    "hub_model_id",
    "hub_strategy",
    "hub_always_push",
    "hub_revision",
    "load_best_model_at_end",
    "metric_for_best_model",
    "greater_is_better",
    "restore_callback_states_from_checkpoint",
    "use_cpu",
    "local_rank",
    "dataloader_num_workers",
    "dataloader_pin_memory",
    "dataloader_persistent_workers",
    "dataloader_prefetch_factor",
    "dataloader_multiprocessing_context",
    "dataloader_in_order",
    "ddp_backend",
    "ddp_timeout",
    "debug",
    "skip_memory_metrics",
    "torch_empty_cache_steps",
    "do_train",
    "do_eval",
    "do_predict",
    "resume_from_checkpoint",
    "influence_steps",
    "gradient_checkpointing",
    "gradient_checkpointing_kwargs",
    "activation_checkpointing",
    "activation_checkpointing_kwargs",
    "preference_dir",
    "reward_model_device",
    # How an endpoint is reached, not which model answers
    "comparator_api_url",
    "comparator_api_key_env",
    "comparator_api_timeout",
    "comparator_api_max_retries",
    "comparator_api_max_n_per_request",
    "comparator_api_headers",
}
# Options that the description has in another form: other words for one thing, what is told by the entities, the
# length of the run, which is compared in steps, and DeepSpeed's config, of which the stage is compared
_TOLD_OTHERWISE = {
    "agent_learning_rate",
    "max_new_tokens",
    "reference_kl_enabled",
    "reference_kl_coef",
    "num_agents",
    "agent_names",
    "trainable_agents",
    "num_train_epochs",
    "max_steps",
    "deepspeed",
}
# Entries of a model's config that do not say what it computes, or that a tokenizer sets
_NOT_OF_THE_MODEL = {
    "_name_or_path",
    "name_or_path",
    "transformers_version",
    "architectures",
    "dtype",
    "torch_dtype",
    "use_cache",
    "attn_implementation",
    "_attn_implementation",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "decoder_start_token_id",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
}
# Elements of a frozen weight, and rows of a dataset, that are looked at
_SAMPLED = 64
_PACKAGES = ("trl_multiagent", "torch", "transformers", "trl", "accelerate", "deepspeed", "peft", "datasets")


def describe_options(args: TrainingArguments) -> dict[str, Any]:
    """The options that decide what is learned."""
    options = args.to_dict()
    return {name: options[name] for name in sorted(options) if name not in MAY_CHANGE | _TOLD_OTHERWISE}


def describe_model(module: nn.Module) -> dict[str, Any]:
    """An entity: its architecture, adapter and head, and a sample of the weights that training leaves alone."""
    model = module.backbone if isinstance(module, ValueModel) else module
    language_model = base_language_model(model)
    config = _what_it_computes(language_model.config.to_dict())
    adapters = {name: adapter.to_dict() for name, adapter in getattr(model, "peft_config", {}).items()}
    for adapter in adapters.values():
        adapter.pop("base_model_name_or_path", None)
        adapter.pop("inference_mode", None)
    head = getattr(module, "value_head", None)
    return {
        "model": type(language_model).__name__,
        "config": config,
        "adapter": adapters,
        "value_head": None if head is None else {"critic_type": head.critic_type, "hidden_dim": head.hidden_dim},
        "trained_parameters": sum(parameter.requires_grad for parameter in module.parameters()),
        "frozen_weights": sample_of_weights(
            (name, parameter) for name, parameter in module.named_parameters() if not parameter.requires_grad
        ),
    }


def _what_it_computes(config: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a config, and of configs in it, that say what a model computes."""
    return {
        name: _what_it_computes(value) if isinstance(value, Mapping) else value
        for name, value in config.items()
        if name not in _NOT_OF_THE_MODEL
    }


def sample_of_weights(parameters: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """A hash of some elements of each parameter; `None` without any."""
    digest, parameters = hashlib.sha256(), list(parameters)
    for name, parameter in parameters:
        flat = local_part(parameter).detach().flatten()
        sample = flat[:: max(1, len(flat) // _SAMPLED)]
        sample = sample.double() if sample.is_floating_point() else sample
        digest.update(name.encode() + sample.cpu().numpy().tobytes())
    return digest.hexdigest() if parameters else None


def describe_tokenizer(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """A tokenizer: its vocabulary, special tokens and chat template."""
    return {
        "vocabulary": _hash(sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])),
        "special_tokens": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "chat_template": tokenizer.chat_template and _hash(tokenizer.chat_template),
    }


def describe_dataset(dataset: Any) -> dict[str, Any]:
    """A dataset: its columns and, if it is not streamed, its length and some rows."""
    if not isinstance(dataset, datasets.Dataset):
        has_length = not isinstance(dataset, torch.utils.data.IterableDataset)
        return {"rows": len(dataset) if has_length else None, "columns": None, "sample": None}
    rows = dataset.with_format(None)  # as they are stored: a transform, or a class of its own, may draw or count
    sample = [
        datasets.Dataset.__getitem__(rows, index) for index in range(0, len(rows), max(1, len(rows) // _SAMPLED))
    ]
    return {"rows": len(rows), "columns": sorted(rows.column_names), "sample": _hash(sample)}


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=lambda other: type(other).__name__)
    return hashlib.sha256(text.encode()).hexdigest()


def versions() -> dict[str, str]:
    """Versions of the packages that decide the bits of a run."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except ModuleNotFoundError:  # an optional one
            continue
    return found


def differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """What differs between two descriptions, by name, as `name: saved -> current`."""
    saved, current = _flat(saved), _flat(json.loads(as_json(current)))
    for name in [name for name in saved.keys() ^ current.keys() if name.endswith("/reference")]:
        saved.pop(name, None), current.pop(name, None)  # follows from the option that asks for references
    differing = [
        name for name in sorted(saved.keys() | current.keys()) if _shown(saved, name) != _shown(current, name)
    ]
    # What follows from another architecture goes without saying
    others = tuple(name.removesuffix("model") for name in differing if name.endswith(".model"))
    told = [name for name in differing if name.endswith(".model") or not name.startswith(others)]
    return [f"{name}: {_shown(saved, name)} -> {_shown(current, name)}" for name in told]


def check_settings(checkpoint: Any, saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """
    Raise an error if a run is set up otherwise than the one that wrote a checkpoint.

    Raises:
        CheckpointError: each setting that differs is named, with its saved and its present value.
    """
    differing: Sequence[str] = differences(saved, current)
    if differing:
        raise CheckpointError(
            f"The checkpoint {str(checkpoint)!r} was written by a run that was set up otherwise (saved -> now):\n  "
            + "\n  ".join(differing)
            + "\nResume with the settings of that run. To train its models on with other settings, start a new run "
            "from the checkpoint's `agent_i/` directories."
        )


def as_json(value: Any) -> str:
    """JSON of a description; what JSON has no word for by its own text, sets in order."""
    return json.dumps(
        value, default=lambda other: sorted(other) if isinstance(other, (set, frozenset)) else str(other)
    )


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested description by dotted names."""
    flat: dict[str, Any] = {}
    for name, entry in value.items():
        if isinstance(entry, Mapping) and entry:
            flat |= _flat(entry, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = entry
    return flat


def _shown(flat: Mapping[str, Any], name: str) -> str:
    return repr(flat[name]) if name in flat else "not there"
