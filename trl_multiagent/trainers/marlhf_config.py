# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Configs of multi-agent RL from preferences, whose RL is that of one of the other trainers."""

import functools
import logging
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, field, fields, make_dataclass
from typing import Any, ClassVar, get_args

import torch

from .actor_critic_config import IACConfig, MAACConfig
from .multi_agent_config import MultiAgentConfig, check_choice, check_number
from .preference_config import IterativePreferenceConfig, MADPOIterConfig, PreferenceConfig
from .reinforce_config import MAGRPOConfig, MAREINFORCEConfig, MAReMaxConfig, MARLOOConfig


logger = logging.getLogger(__name__)

# What `rl_algorithm` may be, and whose options it has
RL_CONFIGS: dict[str, type[MultiAgentConfig]] = {
    "magrpo": MAGRPOConfig,
    "mareinforce": MAREINFORCEConfig,
    "marloo": MARLOOConfig,
    "maremax": MAReMaxConfig,
    "maac": MAACConfig,
    "iac": IACConfig,
}


def _options(config: type) -> dict[str, Field]:
    return {option.name: option for option in fields(config)}


def _owners(name: str) -> list[str]:
    """The algorithms that have an option."""
    return [algorithm for algorithm, config in RL_CONFIGS.items() if name in _options(config)]


def _rl_fields() -> Iterator[tuple[str, Any, Field]]:
    """Name, type and field of every option in which an RL config differs from `MultiAgentConfig`, unset by default."""
    shared, configs = _options(MultiAgentConfig), [_options(config) for config in RL_CONFIGS.values()]
    for name in dict.fromkeys(name for options in configs for name in options):
        found = [options[name] for options in configs if name in options]
        if name in shared and all(option.default == shared[name].default for option in found):
            continue
        assert all(option.default is not MISSING for option in found), "a new option has a default factory"
        kind = found[0].type
        metadata = {**found[0].metadata, "help": f"{found[0].metadata['help']} For {', '.join(_owners(name))}."}
        if kind is bool:  # the option without a word after it means True, as it does where it is not optional
            metadata |= {"nargs": "?", "const": True}
        optional = kind if type(None) in get_args(kind) else kind | None
        yield name, optional, field(default=None, metadata=metadata)


_RLOptions = make_dataclass("_RLOptions", _rl_fields(), namespace={"__module__": __name__})
_RL_OPTIONS = tuple(_options(_RLOptions))


@dataclass
class MARLHFConfig(_RLOptions, PreferenceConfig):
    """
    Configuration of [`MARLHFTrainer`]: the options of preferences, of the reward model, and of the RL that learns from
    it. Those that the config of `rl_algorithm` ([`MAGRPOConfig`], [`MAREINFORCEConfig`], [`MARLOOConfig`],
    [`MAReMaxConfig`], [`MAACConfig`], [`IACConfig`]) adds to [`MultiAgentConfig`], or gives another default, are
    options here too. Not set, they have that config's default; set for an algorithm that lacks them, they are an
    error.

    An instance is also one of the RL's config: when `rl_algorithm` is known, its class is exchanged for a subclass of
    both, so that the RL's own checks and properties hold.

    Parameters:
        rl_algorithm (`str`, *optional*, defaults to `"magrpo"`):
            How the team learns from the reward model: `"magrpo"`, `"mareinforce"`, `"marloo"`, `"maremax"`, `"maac"`
            or `"iac"`. `beta` is the KL coefficient of this RL.
        critic_model_name (`str`, *optional*):
            With `"maac"` and `"iac"`, the model that critics start from.
        reward_model_name (`str`, *optional*):
            The model that the reward model starts from.
        reward_model_device (`str`, *optional*, defaults to `"auto"`):
            Where the reward model is. `"auto"` or `None`: where the team is, which is the first GPU if there is one,
            and each process's own where there are several processes. On a machine without GPUs, a name of one means
            the same, with a warning.
        reward_learning_rate (`float`, *optional*, defaults to `1e-5`):
            Learning rate of the reward model.
        reward_num_train_epochs (`float`, *optional*, defaults to `1`):
            Epochs for which the reward model is trained on the pairs. 0: it is used as it is.
        reward_train_batch_size (`int`, *optional*, defaults to `8`):
            Pairs on each device in a micro-step of the reward model's training.
        reward_max_length (`int`, *optional*):
            Most tokens of a text that the reward model reads; the beginning is cut. `None`: what it has positions for.
        reward_freeze_backbone (`bool`, *optional*, defaults to `False`):
            Whether only the reward model's head is trained.
        reward_eval_fraction (`float`, *optional*, defaults to `0.1`):
            Share of the tasks whose pairs the reward model is not trained on, but measured with. 0: none.
    """

    rl_algorithm: str = field(
        default="magrpo", metadata={"help": "How the team learns from the reward model.", "choices": list(RL_CONFIGS)}
    )
    critic_model_name: str | None = field(
        default=None, metadata={"help": "The model that critics start from. For maac, iac."}
    )
    reward_model_name: str | None = field(
        default=None, metadata={"help": "The model that the reward model starts from."}
    )
    reward_model_device: str | None = field(
        default="auto", metadata={"help": "Where the reward model is. 'auto': where the team is."}
    )
    reward_learning_rate: float = field(default=1e-5, metadata={"help": "Learning rate of the reward model."})
    reward_num_train_epochs: float = field(
        default=1, metadata={"help": "Epochs for which the reward model is trained. 0: it is used as it is."}
    )
    reward_train_batch_size: int = field(
        default=8, metadata={"help": "Pairs on each device in a micro-step of the reward model's training."}
    )
    reward_max_length: int | None = field(
        default=None,
        metadata={"help": "Most tokens of a text that the reward model reads. Not set: what it has positions for."},
    )
    reward_freeze_backbone: bool = field(
        default=False, metadata={"help": "Whether only the reward model's head is trained."}
    )
    reward_eval_fraction: float = field(
        default=0.1, metadata={"help": "Share of the tasks whose pairs measure the reward model. 0: none."}
    )

    _refused: ClassVar[dict[str, str]] = {
        **PreferenceConfig._refused,
        "individual_rewards": "the reward model has one reward for each joint response",
        "multi_objective_aggregation": "RL has one reward, and pairs are ranked by the weighted sum of the rewards",
    }
    # The class that was asked for, where this one was made of it
    _declared: ClassVar[type | None] = None

    def __post_init__(self):
        check_choice("rl_algorithm", self.rl_algorithm, tuple(RL_CONFIGS))
        self._check_reward_model()
        self.__class__ = _with_rl_config(self._declared or type(self), self.rl_algorithm)
        self._take_defaults()
        super().__post_init__()
        if self.critic_model_name is not None:
            self._check_critic_model()

    def __reduce__(self):
        # The class is not found by its name
        return _restore, (self._declared or type(self), self.rl_algorithm), vars(self)

    @property
    def reward_device(self) -> torch.device:
        """The device of the reward model."""
        return find_device("reward_model_device", self.reward_model_device) or self.device

    def _check_reward_model(self) -> None:
        for name in ("reward_learning_rate", "reward_num_train_epochs"):
            check_number(name, getattr(self, name), float, 0)
        check_number("reward_train_batch_size", self.reward_train_batch_size, int, 1)
        if self.reward_max_length is not None:
            check_number("reward_max_length", self.reward_max_length, int, 1)
        check_number("reward_eval_fraction", self.reward_eval_fraction, float, 0, 1)
        if self.reward_eval_fraction == 1:
            raise ValueError("reward_eval_fraction=1 leaves no pair to train on. Set a number below 1.")
        wanted = self.reward_model_device
        if find_device("reward_model_device", wanted) is None and wanted not in (None, "auto"):
            logger.warning("reward_model_device=%r, but there is no GPU: the reward model is with the team.", wanted)

    def _take_defaults(self) -> None:
        """Give the RL's options that were not set its defaults, and refuse those that it lacks."""
        options = _options(RL_CONFIGS[self.rl_algorithm])
        for name in _RL_OPTIONS:
            value = getattr(self, name)
            if name in options:
                setattr(self, name, options[name].default if value is None else value)
            elif value is not None:
                raise ValueError(
                    f"{name}={value!r} is an option of rl_algorithm {', '.join(map(repr, _owners(name)))}, but "
                    f"rl_algorithm={self.rl_algorithm!r}. Leave it out, or set another rl_algorithm."
                )

    def _check_critic_model(self) -> None:
        if self.rl_algorithm not in _owners("critic_type"):
            raise ValueError(
                f"critic_model_name={self.critic_model_name!r} is read with rl_algorithm "
                f"{', '.join(map(repr, _owners('critic_type')))}, got {self.rl_algorithm!r}."
            )
        if self.use_separate_critic is False:
            raise ValueError(
                f"critic_model_name={self.critic_model_name!r} has no effect with use_separate_critic=False: the "
                "value heads are on the actors."
            )


@functools.cache
def _with_rl_config(declared: type[MARLHFConfig], algorithm: str) -> type[MARLHFConfig]:
    """The class of `declared`'s instances with an RL algorithm: theirs and the algorithm's config's."""
    config = RL_CONFIGS[algorithm]
    options = {name: option for name, option in _options(config).items() if name in _RL_OPTIONS}
    namespace = {
        "__module__": declared.__module__,
        "__qualname__": declared.__qualname__,
        "__doc__": declared.__doc__,
        # Defaults, which refusals compare with, are the algorithm's
        "__dataclass_fields__": {**declared.__dataclass_fields__, **options},
        "_refused": {**config._refused, **declared._refused},
        "_declared": declared,
    }
    return type(declared.__name__, (declared, config), namespace)


def _restore(declared: type[MARLHFConfig], algorithm: str) -> MARLHFConfig:
    """An empty instance, of which a copy is made."""
    return object.__new__(_with_rl_config(declared, algorithm))


def find_device(name: str, wanted: str | None) -> torch.device | None:
    """
    The device that an option names, `None` for `None`, `"auto"` and, on a machine without GPUs, for a GPU.

    Raises:
        ValueError: there is no such device.
    """
    if wanted in (None, "auto"):
        return None
    try:
        device = torch.device(wanted)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{name}={wanted!r} is no device, expected 'auto' or one such as 'cuda:1'.") from error
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        return None
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        known = ", ".join(f"'cuda:{index}'" for index in range(count))
        raise ValueError(f"{name}={wanted!r}: there is no such GPU, but {known}. Name one of them, or set 'auto'.")
    return device


def _like_madpo_iter(name: str) -> Any:
    """An option as `MADPOIterConfig` has it."""
    option = MADPOIterConfig.__dataclass_fields__[name]
    return field(default=option.default, metadata=option.metadata)


@dataclass
class MARLHFIterConfig(IterativePreferenceConfig, MARLHFConfig):
    """
    Configuration of [`MARLHFIterTrainer`].

    Parameters:
        preference_scoring_reward (`str`, *optional*, defaults to `"task"`):
            What candidates are scored by: `"task"` the reward functions, `"reward_model"` from the second iteration on
            the reward model of the iteration before.

    > [!NOTE]
    > These parameters have default values different from [`MARLHFConfig`]:
    > - `num_train_epochs`: Defaults to `2` instead of `3`, and counts the epochs of each iteration.
    > - `reward_num_train_epochs`: Defaults to `2` instead of `1`, in each iteration.
    > - `preference_num_candidates`: Defaults to `20` instead of `8`.
    > - `preference_pairs_per_sample`: Defaults to `4` instead of `16`.
    > - `pair_selection`: Defaults to `"comparator_reward"` instead of `"reward_gap"`.
    """

    num_train_epochs: float = field(default=2, metadata={"help": "Epochs of each iteration."})
    reward_num_train_epochs: float = field(
        default=2, metadata={"help": "Epochs of the reward model in each iteration. 0: it is used as it is."}
    )
    preference_num_candidates: int = _like_madpo_iter("preference_num_candidates")
    preference_pairs_per_sample: int | None = _like_madpo_iter("preference_pairs_per_sample")
    pair_selection: str = _like_madpo_iter("pair_selection")
    preference_scoring_reward: str = field(
        default="task",
        metadata={
            "help": "What scores candidates: the reward functions, or the reward model of the iteration before.",
            "choices": ["task", "reward_model"],
        },
    )

    _pair_selections: ClassVar[tuple[str, ...]] = MADPOIterConfig._pair_selections

    def __post_init__(self):
        check_choice("preference_scoring_reward", self.preference_scoring_reward, ("task", "reward_model"))
        super().__post_init__()
