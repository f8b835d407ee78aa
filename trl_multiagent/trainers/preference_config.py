# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Configs of the preference trainers."""

import json
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..functional.preference_losses import LOSS_TYPES
from ..rollouts.replay import REPLAY_MODES, PreferenceReplay
from .multi_agent_config import MultiAgentConfig, check_choice, check_number


COMPARATORS = ("current", "current_copy", "model", "history", "api")


@dataclass
class PreferenceConfig(MultiAgentConfig):
    """
    What the configs of the preference trainers share.

    Parameters:
        preference_num_candidates (`int`, *optional*, defaults to `8`):
            Joint responses that are sampled for each task; pairs are made of them.
        preference_pairs_per_sample (`int`, *optional*, defaults to `16`):
            Most pairs of one task. `None`: all.
        pair_selection (`str`, *optional*, defaults to `"reward_gap"`):
            Which pairs: `"reward_gap"` those with the largest difference of rewards, `"random"` any, `"all"` all,
            whatever `preference_pairs_per_sample` says. Ties are never pairs.
        preference_batch_size (`int`, *optional*):
            Joint responses that are sampled at once on each device, rounded up to whole tasks. Default: 32.
        preference_dir (`str`, *optional*):
            Where pairs are written as JSON Lines, see [`~trl_multiagent.rollouts.preferences.PreferencePair`].
            Default: `output_dir/preferences`.
        collaboration_mode (`str`, *optional*, defaults to `"decentralized"`):
            `"centralized"`: one actor writes the responses of all `num_agents` roles, each in its section.
        unparsable_reward (`float`, *optional*):
            With `collaboration_mode="centralized"`, the reward of a response whose sections cannot be read. `None`: it
            has no reward, and is part of no pair.
    """

    preference_num_candidates: int = field(
        default=8, metadata={"help": "Joint responses that are sampled for each task; pairs are made of them."}
    )
    preference_pairs_per_sample: int | None = field(
        default=16, metadata={"help": "Most pairs of one task. Not set: all."}
    )
    pair_selection: str = field(
        default="reward_gap",
        metadata={
            "help": "Which pairs: those with the largest difference of rewards, any, or all.",
            "choices": ["reward_gap", "random", "all"],
        },
    )
    preference_batch_size: int | None = field(
        default=None,
        metadata={"help": "Joint responses that are sampled at once on each device. If not set, 32 (whole tasks)."},
    )
    preference_dir: str | None = field(
        default=None,
        metadata={"help": "Where pairs are written as JSON Lines. If not set, `output_dir/preferences`."},
    )
    collaboration_mode: str = field(
        default="decentralized",
        metadata={
            "help": "Whether each actor writes its own response, or one actor those of all roles.",
            "choices": ["decentralized", "centralized"],
        },
    )
    unparsable_reward: float | None = field(
        default=None,
        metadata={"help": "Centralized: reward of a response whose sections cannot be read. Not set: none."},
    )

    _pair_selections: ClassVar[tuple[str, ...]] = ("reward_gap", "random", "all")

    def __post_init__(self):
        check_number("preference_num_candidates", self.preference_num_candidates, int, 2)
        for name in ("preference_pairs_per_sample", "preference_batch_size"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), int, 1)
        check_choice("pair_selection", self.pair_selection, self._pair_selections)
        check_choice("collaboration_mode", self.collaboration_mode, ("decentralized", "centralized"))
        if self.unparsable_reward is not None:
            check_number("unparsable_reward", self.unparsable_reward, float)
            if self.collaboration_mode != "centralized":
                raise ValueError(
                    f"unparsable_reward={self.unparsable_reward} is read with collaboration_mode='centralized' only."
                )
        if self.num_turns != 1:
            raise ValueError(
                f"num_turns={self.num_turns}: preferences compare single answers, so it must be 1 in "
                f"{type(self).__name__}."
            )
        if self.turn_order != "simultaneous":
            raise ValueError(
                f"turn_order={self.turn_order!r}: both answers of a pair must be answers to the same prompts, and an "
                "actor that hears others gets another prompt for each. Set turn_order='simultaneous'."
            )
        super().__post_init__()


_NO_ROLLOUTS = "the loss is that of preference pairs; no advantages and ratios of rollouts are in it"
# Options of the losses of rollouts, and of the terms beside them
_OF_ROLLOUTS = (
    "influence_steps",
    "num_iterations",
    "steps_per_generation",
    "epsilon",
    "epsilon_high",
    "delta",
    "scale_rewards",
    "importance_sampling_level",
    "mask_truncated_completions",
    "off_policy_mask_threshold",
    "use_bias_correction_kl",
    "sapo_temperature_neg",
    "sapo_temperature_pos",
    "vespo_k_pos",
    "vespo_lambda_pos",
    "vespo_k_neg",
    "vespo_lambda_neg",
    "top_entropy_quantile",
    "entropy_coef",
    "use_adaptive_entropy",
    "entropy_coef_min",
    "entropy_coef_max",
    "entropy_coef_delta",
    "entropy_target",
    "router_aux_loss_coef",
)


@dataclass
class MADPOConfig(PreferenceConfig):
    """
    Configuration of [`MADPOTrainer`]. `per_device_train_batch_size` counts pairs, `temperature` and the like are those
    with which candidates are sampled, and offline completions are cut at `max_completion_length`.

    Parameters:
        beta (`float`, *optional*, defaults to `0.1`):
            Strength with which the policies are held to their references, as in [`~trl.DPOConfig`].
        dpo_beta (`float`, *optional*):
            Another word for `beta`.
        reference_free (`bool`, *optional*, defaults to `False`):
            Whether margins are those of the log-probabilities alone, without references (CoMLRL's objective).
        loss_type (`str`, *optional*, defaults to `"sigmoid"`):
            `"sigmoid"`, `"hinge"` or `"ipo"`, see [`~trl_multiagent.functional.preference_losses.preference_loss`].
            With `"ipo"` each actor's margin is that of means over tokens, as in TRL.
        label_smoothing (`float`, *optional*, defaults to `0.0`):
            Probability that a preference is the wrong way round, below 0.5, for `"sigmoid"` (conservative DPO).
        precompute_ref_log_probs (`bool`, *optional*, defaults to `False`):
            Whether the references are read once for all pairs, before they are trained on.
        recompute_activations (`bool`, *optional*, defaults to `True`):
            Whether each actor's forward pass is done again in the backward pass, so that the activations of one actor
            at a time are in memory. It costs a third more computation. A team with one learning actor does without.

    > [!NOTE]
    > These parameters have default values different from [`MultiAgentConfig`]:
    > - `num_generations`: Defaults to `1` instead of `8`: training samples nothing but candidates. Evaluation on tasks
    >   samples `num_generations_eval`.
    > - `influence_steps`: Defaults to `0` instead of `50`.
    """

    dpo_beta: float | None = field(default=None, metadata={"help": "Another word for `beta`."})
    beta: float | None = field(
        default=None,
        metadata={"help": "Strength with which the policies are held to their references. If not set, 0.1."},
    )
    reference_free: bool = field(
        default=False, metadata={"help": "Whether margins are those of log-probabilities, without references."}
    )
    loss_type: str = field(
        default="sigmoid", metadata={"help": "Loss of a pair's joint margin.", "choices": list(LOSS_TYPES)}
    )
    label_smoothing: float = field(
        default=0.0, metadata={"help": "Probability that a preference is the wrong way round, below 0.5."}
    )
    precompute_ref_log_probs: bool = field(
        default=False, metadata={"help": "Read the references once for all pairs, before they are trained on."}
    )
    recompute_activations: bool = field(
        default=True,
        metadata={"help": "Do each actor's forward pass again in the backward pass, for less memory."},
    )
    num_generations: int = field(
        default=1, metadata={"help": "Must stay 1: candidates are counted by `preference_num_candidates`."}
    )
    influence_steps: int = field(default=0, metadata={"help": "Must stay 0: it is measured on rollouts that train."})

    _refused: ClassVar[dict[str, str]] = {
        **PreferenceConfig._refused,
        "num_generations": "candidates for pairs are counted by `preference_num_candidates`",
        **dict.fromkeys(_OF_ROLLOUTS, _NO_ROLLOUTS),
        "generation_batch_size": "candidates are sampled `preference_batch_size` at once",
        "multi_objective_aggregation": "pairs are ranked by the weighted sum of the rewards",
        "reference_kl_enabled": "`beta` is the strength of the references, set `reference_free` to do without them",
        "reference_kl_coef": "`beta` is the strength of the references",
    }

    def __post_init__(self):
        check_choice("loss_type", self.loss_type, LOSS_TYPES)
        check_number("label_smoothing", self.label_smoothing, float, 0, 0.5)
        if self.label_smoothing and (self.loss_type != "sigmoid" or self.label_smoothing == 0.5):
            raise ValueError(
                f"label_smoothing={self.label_smoothing} with loss_type={self.loss_type!r}: it is defined below 0.5, "
                "for loss_type='sigmoid'."
            )
        super().__post_init__()
        check_number("beta", self.beta, float, 0)
        if self.beta == 0:
            raise ValueError("beta=0 leaves no loss. Set a number above 0; `reference_free` does without references.")

    def _min_generations(self) -> int:
        return 1

    def _merge_words(self) -> None:
        self._refuse_options()  # before the words of a KL coefficient are taken for beta
        if self.beta is None and self.dpo_beta is None:
            self.beta = 0.1
        self._merge("beta", "dpo_beta")
        super()._merge_words()


@dataclass
class IterativePreferenceConfig:
    """
    What the configs of the iterative trainers have in addition.

    Parameters:
        num_iterations (`int`, *optional*, defaults to `6`):
            Iterations of the run: in each the team answers all tasks, and learns for `num_train_epochs`. Each rollout
            is trained on once.
        preference_replay_mode (`str`, *optional*, defaults to `"current"`):
            Which iterations' pairs are trained on: `"current"`, `"nearest_k"`, `"all_history"` or `"lambda_decay"`,
            see [`~trl_multiagent.rollouts.replay.PreferenceReplay`].
        preference_replay_k (`int`, *optional*):
            With `"nearest_k"`, how many iterations.
        preference_replay_lambda (`float`, *optional*):
            With `"lambda_decay"`, the weight of an iteration's pairs relative to those of the next, 0 to 1.
        preference_replay_sample_size (`int`, *optional*):
            How many pairs are drawn. Default: as many as the newest iteration found.
        comparator_policy (`str`, *optional*, defaults to `"current"`):
            Whose answers the team's are compared with: `"current"` or `"current_copy"` the team's own, `"model"` those
            of other models, `"history"` of the team as an earlier iteration began, `"api"` of an endpoint.
        comparator_model_name (`str`, *optional*), comparator_agents (list of `str`, *optional*):
            With `"model"`, one model for all actors, or one for each.
        comparator_num_candidates (`int`, *optional*):
            The comparator's answers to each task. Default: `preference_num_candidates`.
        comparator_history_k (`int`, *optional*):
            With `"history"`, how many iterations back. 1: the policy that the iteration before began with.
        comparator_api_url (`str`, *optional*), comparator_api_model (`str`, *optional*):
            With `"api"`, an OpenAI-compatible endpoint (default: the client's own) and the model to ask for.
        comparator_api_key_env (`str`, *optional*, defaults to `"OPENAI_API_KEY"`):
            Environment variable that holds the key.
        comparator_api_timeout (`float`, *optional*, defaults to `120.0`):
            Seconds that a request may take.
        comparator_api_max_retries (`int`, *optional*, defaults to `3`):
            How often a request that failed is sent again.
        comparator_api_max_n_per_request (`int`, *optional*):
            Most answers that one request asks for.
        comparator_api_headers (`dict`, *optional*), comparator_api_extra_body (`dict`, *optional*):
            What requests have besides.
    """

    num_iterations: int = field(
        default=6, metadata={"help": "Iterations; in each the team answers all tasks and learns from the answers."}
    )
    preference_replay_mode: str = field(
        default="current",
        metadata={"help": "Which iterations' pairs are trained on.", "choices": list(REPLAY_MODES)},
    )
    preference_replay_k: int | None = field(default=None, metadata={"help": "With 'nearest_k', how many iterations."})
    preference_replay_lambda: float | None = field(
        default=None, metadata={"help": "With 'lambda_decay', an iteration's weight relative to the next one's."}
    )
    preference_replay_sample_size: int | None = field(
        default=None, metadata={"help": "How many pairs are drawn. If not set, as many as the newest iteration found."}
    )
    comparator_policy: str = field(
        default="current",
        metadata={"help": "Whose answers the team's are compared with.", "choices": list(COMPARATORS)},
    )
    comparator_model_name: str | None = field(
        default=None, metadata={"help": "With 'model', one model for all actors."}
    )
    comparator_agents: list[str] | None = field(
        default=None, metadata={"help": "With 'model', a model for each actor."}
    )
    comparator_num_candidates: int | None = field(
        default=None, metadata={"help": "Answers to each task. If not set, `preference_num_candidates`."}
    )
    comparator_history_k: int | None = field(
        default=None, metadata={"help": "With 'history', how many iterations back."}
    )
    comparator_api_url: str | None = field(default=None, metadata={"help": "An OpenAI-compatible endpoint."})
    comparator_api_model: str | None = field(default=None, metadata={"help": "The model to ask the endpoint for."})
    comparator_api_key_env: str = field(
        default="OPENAI_API_KEY", metadata={"help": "Environment variable that holds the endpoint's key."}
    )
    comparator_api_timeout: float = field(default=120.0, metadata={"help": "Seconds that a request may take."})
    comparator_api_max_retries: int = field(
        default=3, metadata={"help": "How often a request that failed is sent again."}
    )
    comparator_api_max_n_per_request: int | None = field(
        default=None, metadata={"help": "Most answers that one request asks for."}
    )
    comparator_api_headers: dict | str | None = field(default=None, metadata={"help": "Headers of requests."})
    comparator_api_extra_body: dict | str | None = field(
        default=None, metadata={"help": "Further entries of requests."}
    )

    _dictionaries: ClassVar[tuple[str, ...]] = ("comparator_api_headers", "comparator_api_extra_body")

    @property
    def updates_per_rollout(self) -> int:
        return 1  # `num_iterations` counts something else here

    def __post_init__(self):
        check_number("num_iterations", self.num_iterations, int, 1)
        check_choice("comparator_policy", self.comparator_policy, COMPARATORS)
        for name in (
            "comparator_num_candidates",
            "comparator_api_max_n_per_request",
            "preference_replay_k",
            "preference_replay_sample_size",
        ):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), int, 1)
        check_number("comparator_api_timeout", self.comparator_api_timeout, float, 0)
        check_number("comparator_api_max_retries", self.comparator_api_max_retries, int, 0)
        self.replay()
        self._check_comparator()
        for name in self._dictionaries:
            setattr(self, name, _as_dictionary(name, getattr(self, name)))
        whole = self.num_train_epochs >= 1 and self.num_train_epochs == int(self.num_train_epochs)
        if self.max_steps > 0 or not whole:
            raise ValueError(
                f"max_steps={self.max_steps} and num_train_epochs={self.num_train_epochs}: the length of the run is "
                "given by `num_iterations` and, for each of them, whole `num_train_epochs`, 1 or more."
            )
        super().__post_init__()

    def to_dict(self) -> dict[str, Any]:
        """The options for logs and files, where headers, which may hold credentials, have their names alone."""
        options = super().to_dict()
        if self.comparator_api_headers:
            options["comparator_api_headers"] = dict.fromkeys(self.comparator_api_headers, "***")
        return options

    def replay(self) -> PreferenceReplay:
        """The replay that is asked for, checked."""
        return PreferenceReplay(
            self.preference_replay_mode,
            self.preference_replay_k,
            self.preference_replay_lambda,
            self.preference_replay_sample_size,
            self.seed,
        )

    def _check_comparator(self) -> None:
        policy = self.comparator_policy
        options = {
            "model": ("comparator_model_name", "comparator_agents"),
            "history": ("comparator_history_k",),
            "api": tuple(name for name in _API_DEFAULTS),
        }
        for owner, names in options.items():
            given = [name for name in names if getattr(self, name) != _API_DEFAULTS.get(name)]
            if owner != policy and given:
                raise ValueError(
                    f"{given[0]}={getattr(self, given[0])!r} is read with comparator_policy={owner!r} only, got "
                    f"{policy!r}."
                )
        if policy == "model" and (self.comparator_model_name is None) == (self.comparator_agents is None):
            raise ValueError("comparator_policy='model' needs either `comparator_model_name` or `comparator_agents`.")
        if policy == "api" and self.comparator_api_model is None:
            raise ValueError("comparator_policy='api' needs `comparator_api_model`, the model to ask for.")
        if policy == "history":
            if self.comparator_history_k is None:
                raise ValueError("comparator_policy='history' needs `comparator_history_k`, how many iterations back.")
            check_number("comparator_history_k", self.comparator_history_k, int, 1)


def _as_dictionary(name: str, value: Any) -> dict[str, Any] | None:
    """An optional dictionary, which is JSON on the command line."""
    try:
        known = json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError:
        known = value
    if not isinstance(known, dict | None):
        raise ValueError(f"{name}={value!r}, expected a dictionary; on the command line, as JSON.")
    return known


_API_DEFAULTS = {
    name: IterativePreferenceConfig.__dataclass_fields__[name].default
    for name in IterativePreferenceConfig.__dataclass_fields__
    if name.startswith("comparator_api_")
}


@dataclass
class MADPOIterConfig(IterativePreferenceConfig, MADPOConfig):
    """
    Configuration of [`MADPOIterTrainer`].

    > [!NOTE]
    > These parameters have default values different from [`MADPOConfig`]:
    > - `num_train_epochs`: Defaults to `1` instead of `3`, and counts the epochs of each iteration.
    > - `preference_num_candidates`: Defaults to `20` instead of `8`.
    > - `preference_pairs_per_sample`: Defaults to `4` instead of `16`.
    > - `pair_selection`: Defaults to `"comparator_reward"` instead of `"reward_gap"`: the pairs whose comparator got
    >   the highest reward.
    """

    num_train_epochs: float = field(default=1, metadata={"help": "Epochs of each iteration."})
    preference_num_candidates: int = field(
        default=20, metadata={"help": "Joint responses that the team gives to each task in an iteration."}
    )
    preference_pairs_per_sample: int | None = field(
        default=4, metadata={"help": "Most pairs of one task. Not set: all."}
    )
    pair_selection: str = field(
        default="comparator_reward",
        metadata={
            "help": "Which pairs: those whose comparator got the highest reward, those with the largest difference, "
            "any, or all.",
            "choices": ["comparator_reward", "reward_gap", "random", "all"],
        },
    )

    _pair_selections: ClassVar[tuple[str, ...]] = ("comparator_reward", *PreferenceConfig._pair_selections)
    _refused: ClassVar[dict[str, str]] = {
        name: reason for name, reason in MADPOConfig._refused.items() if name != "num_iterations"
    }
