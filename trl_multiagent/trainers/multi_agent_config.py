# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""What all team trainers share in their configs."""

import math
import os
from contextlib import nullcontext
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar

from transformers.utils import is_torch_bf16_gpu_available
from trl import GRPOConfig

from .._compat import groups_of_one


# Inherited options that a team cannot honour, with the reason. A value other than the default is refused.
_TEXT_ONLY = "actors are text models"
_ONE_ENGINE = "each actor needs a vLLM engine of its own, which is not offered yet"
_NO_TOOLS = "actors answer once in a turn; tools are not offered"
_NO_LABELS = "a team is trained on rewards; there are no labels or predictions"
REFUSED_OPTIONS: dict[str, str] = {
    "use_vllm": _ONE_ENGINE,
    **{
        f"vllm_{name}": _ONE_ENGINE
        for name in (
            "mode",
            "model_impl",
            "enable_sleep_mode",
            "structured_outputs_regex",
            "server_base_url",
            "server_host",
            "server_port",
            "server_timeout",
            "group_port",
            "gpu_memory_utilization",
            "max_model_length",
            "tensor_parallel_size",
            "importance_sampling_correction",
            "importance_sampling_mode",
            "importance_sampling_clip_max",
            "importance_sampling_clip_min",
            "importance_sampling_cap",
        )
    },
    "use_transformers_continuous_batching": "generation is batched over prompts by `generate`",
    "transformers_continuous_batching_config": "generation is batched over prompts by `generate`",
    "use_transformers_paged": "generation is batched over prompts by `generate`",
    "max_tool_calling_iterations": _NO_TOOLS,
    "log_multimodal": _TEXT_ONLY,
    "log_completions_hub_repo": "completions are written to `output_dir/completions` only",
    "remove_unused_columns": "reward functions and formatters get every column of the dataset",
    "label_smoothing_factor": _NO_LABELS,
    "label_names": _NO_LABELS,
    "prediction_loss_only": _NO_LABELS,
    "include_for_metrics": _NO_LABELS,
    "batch_eval_metrics": _NO_LABELS,
    "eval_do_concat_batches": _NO_LABELS,
    "eval_use_gather_object": _NO_LABELS,
    "train_sampling_strategy": "prompts are repeated for their groups in a random or the dataset's order",
    "length_column_name": "prompts are repeated for their groups in a random or the dataset's order",
    "neftune_noise_alpha": "a team has no single input embedding",
    "optim_target_modules": "the optimizer's parameter groups are those of the actors and critics",
    "use_liger_kernel": "kernels are chosen for each model, by `model_init_kwargs={'use_kernels': True}`",
    "liger_kernel_config": "kernels are chosen for each model, by `model_init_kwargs={'use_kernels': True}`",
    "average_tokens_across_devices": "TRL's losses count the tokens of all devices",
    "torch_compile": "the team's forward is a different function for each micro-batch",
    "torch_compile_backend": "the team's forward is a different function for each micro-batch",
    "torch_compile_mode": "the team's forward is a different function for each micro-batch",
    "fsdp": "FSDP is not offered yet; use DDP or DeepSpeed",
    "fsdp_config": "FSDP is not offered yet; use DDP or DeepSpeed",
    "parallelism_config": "tensor, context and sequence parallelism are not offered",
    "fp16_full_eval": "evaluation samples with the weights as they are trained",
    "bf16_full_eval": "evaluation samples with the weights as they are trained",
    "ignore_data_skip": "a resumed run goes on at its place in the data",
    "enable_jit_checkpoint": "a run that saves checkpoints saves one on SIGTERM by itself",
}


@dataclass
class MultiAgentConfig(GRPOConfig):
    """
    Configuration of a team trainer. Every option of [`~trl.GRPOConfig`] applies to each actor, unless it is refused
    with a reason.

    Parameters:
        num_agents (`int`, *optional*):
            Number of actors. May be given to the trainer instead; with a list of agents it may be left out.
        agent_learning_rate (`float`, *optional*):
            Learning rate of the actors: another word for `learning_rate`.
        max_new_tokens (`int`, *optional*):
            Longest completion, in tokens: another word for `max_completion_length`.
        agent_names (list of `str`, *optional*):
            Names of the actors in metrics, tables and errors. Default: `agent_0`, `agent_1`, ... Directories are
            always named so.
        trainable_agents (list of `bool`, *optional*):
            Which actors learn. A frozen one samples, but has no gradient, no optimizer state and no reference model.
            Default: those that have a trainable parameter.
        num_turns (`int`, *optional*, defaults to `1`):
            Most turns of an interaction. More than one needs an `external_transition`.
        turn_order (`str`, *optional*, defaults to `"simultaneous"`):
            `"simultaneous"`: the actors of a turn do not hear each other. `"sequential"`: they speak in actor order,
            and a formatter that takes `earlier_completions` gets the texts of the actors before it.
        rollout_mode (`str`, *optional*, defaults to `"tree"`):
            How an interaction of several turns goes on: in a `"tree"` each joint response branches into
            `num_generations`, in a `"chain"` it goes on alone. Evaluation always rolls out chains.
        discount (`float`, *optional*, defaults to `1.0`):
            Weight of the next turn's return in a turn's return.
        early_termination_threshold (`float`, *optional*):
            Reward above which an interaction ends early: the mean reward of the joint responses to one context in a
            tree, the joint response's own reward in a chain; where actors have rewards of their own, the mean over the
            actors.
        external_prompt_passthrough (`bool`, *optional*, defaults to `False`):
            Whether the prompts of `external_transition` are used as they are. By default each goes through the actor's
            formatter, as the `prompt` of the row (the dataset's own is then `_original_prompt`).
        influence_steps (`int`, *optional*, defaults to `50`):
            Every how many generation batches each actor's share of the reward's variance is measured, besides the
            first few: one more reward call for each actor, in which its answers to one task are exchanged. An actor
            whose reward does not depend on it is named in a warning. Offered for single turns. 0: never; with crossed
            joint responses it needs no calls and is always measured.
        reference_kl_enabled (`bool`, *optional*):
            Whether the loss has a KL term to the frozen start of each actor: another word for `beta != 0`.
        reference_kl_coef (`float`, *optional*):
            Its coefficient: another word for `beta`.
        batched_rewards (`bool`, *optional*, defaults to `False`):
            Whether reward functions are called once for a whole batch instead of once for each task item.

    > [!NOTE]
    > These parameters have default values different from [`~trl.GRPOConfig`]:
    > - `per_device_train_batch_size`, `per_device_eval_batch_size`: Default to the smallest size from 8 up that fits
    >   `num_generations`, instead of `8`.
    > - `disable_dropout`: Defaults to `True` instead of `False`, so that the ratio to the sampling policy starts at 1.
    > - `bf16`: Defaults to `True` only where the device supports it, so that a default config works on a CPU.
    """

    # Refused by a subclass in addition to REFUSED_OPTIONS
    _refused: ClassVar[dict[str, str]] = {}

    num_agents: int | None = field(
        default=None,
        metadata={"help": "Number of actors. With a list of agents it may be left out."},
    )
    agent_learning_rate: float | None = field(
        default=None,
        metadata={"help": "Learning rate of the actors: another word for `learning_rate`."},
    )
    max_new_tokens: int | None = field(
        default=None,
        metadata={"help": "Longest completion, in tokens: another word for `max_completion_length`."},
    )
    agent_names: list[str] | None = field(
        default=None,
        metadata={
            "help": "Names of the actors in metrics, tables and errors. If not set, agent_0, agent_1, ... (in the "
            "examples their roles)."
        },
    )
    # On the command line each entry is a word, so that is the declared type
    trainable_agents: list[str] | None = field(
        default=None,
        metadata={
            "help": "Which actors learn: true or false for each; a frozen one only samples. If not set, those with "
            "trainable parameters."
        },
    )
    num_turns: int = field(
        default=1,
        metadata={"help": "Most turns of an interaction. More than one needs an `external_transition`."},
    )
    turn_order: str = field(
        default="simultaneous",
        metadata={
            "help": "Whether the actors of a turn speak at once, or in order, each hearing those before it.",
            "choices": ["simultaneous", "sequential"],
        },
    )
    rollout_mode: str = field(
        default="tree",
        metadata={
            "help": "With several turns: each joint response branches into `num_generations` (tree), or goes on alone "
            "(chain).",
            "choices": ["tree", "chain"],
        },
    )
    discount: float = field(
        default=1.0,
        metadata={"help": "Weight of the next turn's return in a turn's return."},
    )
    early_termination_threshold: float | None = field(
        default=None,
        metadata={"help": "Reward above which an interaction ends early."},
    )
    external_prompt_passthrough: bool = field(
        default=False,
        metadata={"help": "Use the prompts of `external_transition` as they are, without the actors' formatters."},
    )
    influence_steps: int = field(
        default=50,
        metadata={
            "help": "Every how many generation batches each actor's share of the reward's variance is measured. "
            "0: never."
        },
    )
    reference_kl_enabled: bool | None = field(
        default=None,
        metadata={"help": "Whether the loss has a KL term to the start of each actor: another word for `beta != 0`."},
    )
    reference_kl_coef: float | None = field(
        default=None,
        metadata={"help": "Coefficient of the KL term: another word for `beta`."},
    )
    batched_rewards: bool = field(
        default=False,
        metadata={"help": "Call reward functions once for a whole batch instead of once for each task item."},
    )

    # Words that have a second one: not set means TRL's default, so that a value that was set is known
    learning_rate: float | None = field(
        default=None,
        metadata={"help": "Initial learning rate of the actors. If not set, 1e-6."},
    )
    max_completion_length: int | None = field(
        default=None,
        metadata={"help": "Longest completion, in tokens. If not set, 512."},
    )
    beta: float | None = field(
        default=None,
        metadata={
            "help": "Coefficient of the KL term to the frozen start of each actor. If not set, 0: no reference."
        },
    )

    # Changed defaults
    per_device_train_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Joint samples on each device in a micro-step. If not set, the smallest size from 8 up that fits "
            "`num_generations`."
        },
    )
    per_device_eval_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Joint samples on each device in an evaluation step. If not set, the smallest size from 8 up that "
            "fits the number of generations in evaluation."
        },
    )
    disable_dropout: bool = field(
        default=True,
        metadata={
            "help": "Whether to disable dropout in the actors, so that the ratio to the sampling policy starts at 1."
        },
    )
    top_k: int | None = field(
        default=0,
        metadata={"help": "Number of most probable tokens that are considered. 0 or None: all."},
    )

    def __post_init__(self):
        self._merge_words()
        if self.num_generations < self._min_generations():
            raise ValueError(
                f"num_generations={self.num_generations}: {type(self).__name__} needs at least "
                f"{self._min_generations()} joint samples for each prompt, since they are each other's baseline."
            )
        self._set_batch_sizes()
        self._check_interaction()
        if self.bf16 is None:
            self.bf16 = not self.fp16 and not self.use_cpu and is_torch_bf16_gpu_available()
        # transformers warns about the older of two words, whose default TRL sets
        if getattr(self, "activation_checkpointing", False) is None:
            self.activation_checkpointing = self.gradient_checkpointing
            self.activation_checkpointing_kwargs = self.gradient_checkpointing_kwargs
        self._refuse_options()
        with groups_of_one(self) if self.num_generations == 1 else nullcontext():
            super().__post_init__()
        # Only now is a JSON string from the command line a dictionary
        for name in ("stop_strings", "stopping_criteria"):
            if (self.generation_kwargs or {}).get(name) is not None:
                raise ValueError(
                    f"generation_kwargs[{name!r}] is not supported by {type(self).__name__}: TRL gives `generate` no "
                    f"tokenizer to find it by. Set `eos_token_id` in the generation config instead."
                )

    @property
    def updates_per_rollout(self) -> int:
        """How often each rollout is trained on."""
        return self.num_iterations

    def _min_generations(self) -> int:
        """Fewest joint samples in a group; 1 where the baseline needs no others."""
        return 2

    def _check_interaction(self) -> None:
        check_choice("turn_order", self.turn_order, ("simultaneous", "sequential"))
        check_choice("rollout_mode", self.rollout_mode, ("tree", "chain"))
        for name in ("agent_names", "trainable_agents"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, (list, tuple)):
                raise ValueError(f"{name}={value!r}, expected a list with one entry for each actor.")
        if self.trainable_agents is not None:
            self.trainable_agents = [as_bool("trainable_agents", entry) for entry in self.trainable_agents]
        check_number("num_turns", self.num_turns, int, 1)
        check_number("discount", self.discount, float, 0, 1)
        check_number("influence_steps", self.influence_steps, int, 0)
        if self.early_termination_threshold is not None:
            check_number("early_termination_threshold", self.early_termination_threshold, float)
        if self.turn_order == "sequential" and self.external_prompt_passthrough and self.num_turns > 1:
            raise ValueError(
                "turn_order='sequential' and external_prompt_passthrough=True: after the first turn no formatter "
                "runs, so no actor would hear those before it. Set external_prompt_passthrough=False."
            )
        if self.num_turns > 1 and self.multi_objective_aggregation == "normalize_then_sum":
            raise ValueError(
                "multi_objective_aggregation='normalize_then_sum' compares the rewards of single turns, so it does "
                f"not fit num_turns={self.num_turns}. Weigh the functions with `reward_weights` instead."
            )
        self._check_names(self.agent_names or [])

    def _check_names(self, names: list[str]) -> None:
        words = all(isinstance(name, str) and name and "/" not in name for name in names)
        if not words or len(set(names)) < len(names):
            raise ValueError(f"agent_names={names}: expected different, non-empty texts without '/'.")
        for index, name in enumerate(names):
            kind, _, number = name.partition("_")
            if kind in ("critic", "turn", "eval", "train", "rewards") or (kind == "agent" and number != str(index)):
                raise ValueError(
                    f"agent_names={names}: {name!r} would be taken for something else. Names that begin with critic, "
                    "turn, eval, train or rewards name other metrics, and agent_i is the i-th actor."
                )

    def _merge_words(self) -> None:
        """Bring the documents' words and Hugging Face's together; an error if both are given and differ."""
        self._merge("learning_rate", "agent_learning_rate")
        self._merge("max_completion_length", "max_new_tokens")
        if self.top_k is None:
            self.top_k = 0
        if self.reference_kl_enabled is False:
            if self.reference_kl_coef or self.beta:
                raise ValueError(
                    f"reference_kl_enabled=False, but reference_kl_coef={self.reference_kl_coef} and "
                    f"beta={self.beta}. Set them to 0 or leave them out."
                )
        elif self.reference_kl_enabled and not (self.reference_kl_coef or self.beta):
            raise ValueError("reference_kl_enabled=True needs its coefficient: set `reference_kl_coef` (or `beta`).")
        self._merge("beta", "reference_kl_coef")

    def _merge(self, name: str, other_word: str) -> None:
        value, other = getattr(self, name), getattr(self, other_word)
        if value is not None and other is not None and value != other:
            raise ValueError(
                f"{other_word}={other} and {name}={value} are two words for one thing, but differ. Set one of them."
            )
        value = other if value is None else value
        setattr(self, name, _default(GRPOConfig, name) if value is None else value)

    def _set_batch_sizes(self) -> None:
        processes = int(os.environ.get("WORLD_SIZE", 1))
        if self.per_device_train_batch_size is None:
            steps = self.steps_per_generation or self.gradient_accumulation_steps
            if self.generation_batch_size is not None:
                steps = 1
            self.per_device_train_batch_size = _smallest_fit(8, processes * steps, self.num_generations)
        if self.per_device_eval_batch_size is None:
            generations = self.num_generations_eval or self.num_generations
            self.per_device_eval_batch_size = _smallest_fit(8, processes, generations)

    def _refuse_options(self) -> None:
        defaults = {f.name for f in fields(self)}
        for name, reason in {**REFUSED_OPTIONS, **self._refused}.items():
            # Options that the installed transformers or TRL does not have cannot be set
            if name in defaults and getattr(self, name) != _default(type(self), name):
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is not supported by {type(self).__name__}: {reason}."
                )


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise a `ValueError` that names the choices if `value` is none of them."""
    if value not in choices:
        raise ValueError(f"{name}={value!r}, expected one of {', '.join(map(repr, choices))}.")


def check_number(name: str, value: Any, kind: type, low: float = -math.inf, high: float = math.inf) -> None:
    """Raise a `ValueError` that names the expected range if `value` is no such number. An `int` is a `float` too."""
    is_number = isinstance(value, (int, float) if kind is float else int) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or math.isinf(value):
        bounds = f" from {low} to {high}" if high < math.inf else f", {low} or more" if low > -math.inf else ""
        raise ValueError(f"{name}={value!r}, expected {'a number' if kind is float else 'a whole number'}{bounds}.")


def as_bool(name: str, value: bool | str) -> bool:
    """A truth value, or its word on the command line."""
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    known = value if isinstance(value, bool) else words.get(str(value).lower())
    if known is None:
        raise ValueError(f"{name} has the entry {value!r}, expected true or false.")
    return known


def _default(config: type, name: str) -> Any:
    option = config.__dataclass_fields__[name]
    return option.default_factory() if option.default is MISSING else option.default


def _smallest_fit(start: int, factor: int, group: int) -> int:
    """The smallest n >= start such that n * factor is a multiple of group."""
    size = start
    while size * factor % group:
        size += 1
    return size
