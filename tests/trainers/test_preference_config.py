# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Configs of the preference trainers: defaults, what is refused, and the options of the RL that RLHF ends in."""

import copy
import dataclasses
import json
import pickle

import pytest
import torch
from transformers import HfArgumentParser

from trl_multiagent import (
    ActorCriticConfig,
    IACConfig,
    MAACConfig,
    MADPOConfig,
    MADPOIterConfig,
    MAGRPOConfig,
    MAREINFORCEConfig,
    MAReMaxConfig,
    MARLHFConfig,
    MARLHFIterConfig,
    MARLOOConfig,
    PreferenceConfig,
)
from trl_multiagent.trainers.marlhf_config import RL_CONFIGS, find_device


ITERATIVE = [MADPOIterConfig, MARLHFIterConfig]
RLHF = [MARLHFConfig, MARLHFIterConfig]
CONFIGS = [MADPOConfig, MARLHFConfig, *ITERATIVE]
EVERY = pytest.mark.parametrize("config_class", CONFIGS)
EACH_ITERATIVE = pytest.mark.parametrize("config_class", ITERATIVE)
EACH_RLHF = pytest.mark.parametrize("config_class", RLHF)


@pytest.fixture
def make(tmp_path):
    return lambda config_class, **options: config_class(output_dir=str(tmp_path), use_cpu=True, **options)


@pytest.fixture
def parse(tmp_path):
    def parse(config_class, *words):
        command = ["--output_dir", str(tmp_path), "--use_cpu", *words]
        (config,) = HfArgumentParser(config_class).parse_args_into_dataclasses(command)
        return config

    return parse


@pytest.fixture
def refused(make):
    def refused(config_class, *parts, **options):
        """The options are refused in words that name all of `parts`."""
        with pytest.raises(ValueError) as caught:
            make(config_class, **options)
        message = str(caught.value)
        assert all(part in message for part in parts), message

    return refused


class TestWhatAllShare:
    @pytest.mark.parametrize(
        ("config_class", "candidates", "pairs", "selection", "epochs"),
        [
            (PreferenceConfig, 8, 16, "reward_gap", 3),
            (MADPOConfig, 8, 16, "reward_gap", 3),
            (MARLHFConfig, 8, 16, "reward_gap", 3),
            (MADPOIterConfig, 20, 4, "comparator_reward", 1),
            (MARLHFIterConfig, 20, 4, "comparator_reward", 2),
        ],
    )
    def test_defaults(self, make, config_class, candidates, pairs, selection, epochs):
        config = make(config_class)
        assert (config.preference_num_candidates, config.preference_pairs_per_sample) == (candidates, pairs)
        assert (config.pair_selection, config.num_train_epochs) == (selection, epochs)
        assert config.collaboration_mode == "decentralized" and config.preference_batch_size is None

    @EVERY
    @pytest.mark.parametrize("value", [1, 0, 2.5, "4", None])
    def test_preference_num_candidates_are_two_or_more(self, make, refused, config_class, value):
        refused(config_class, f"preference_num_candidates={value!r}", "2 or more", preference_num_candidates=value)
        assert make(config_class, preference_num_candidates=2).preference_num_candidates == 2

    @pytest.mark.parametrize("name", ["preference_pairs_per_sample", "preference_batch_size"])
    def test_preference_pairs_per_sample_and_batch_sizes_may_be_left_open_but_not_none_at_all(
        self, make, refused, name
    ):
        assert getattr(make(MADPOConfig, **{name: None}), name) is None
        for value in (0, -1, 1.5, True):
            refused(MADPOConfig, f"{name}={value!r}", "1 or more", **{name: value})

    def test_preference_batch_size_counts_joint_responses(self, make):
        assert make(MADPOConfig, preference_batch_size=64).preference_batch_size == 64

    @EVERY
    def test_pair_selection_has_its_choices(self, make, refused, config_class):
        for choice in ("reward_gap", "random", "all"):
            assert make(config_class, pair_selection=choice).pair_selection == choice
        refused(config_class, "pair_selection='best'", "'reward_gap', 'random', 'all'", pair_selection="best")

    @pytest.mark.parametrize("config_class", [MADPOConfig, MARLHFConfig])
    def test_pair_selection_by_the_comparator_needs_one(self, refused, config_class):
        refused(config_class, "pair_selection='comparator_reward'", pair_selection="comparator_reward")

    @EVERY
    def test_collaboration_mode_has_two_choices(self, make, refused, config_class):
        config = make(config_class, collaboration_mode="centralized", num_agents=3)
        assert (config.collaboration_mode, config.num_agents) == ("centralized", 3)
        refused(config_class, "collaboration_mode='shared'", "'centralized'", collaboration_mode="shared")

    @EVERY
    def test_unparsable_reward_is_read_in_the_centralized_mode_only(self, make, refused, config_class):
        refused(config_class, "unparsable_reward=-1", "collaboration_mode='centralized'", unparsable_reward=-1)
        mode = {"collaboration_mode": "centralized"}
        assert make(config_class, unparsable_reward=-1, **mode).unparsable_reward == -1
        refused(config_class, "unparsable_reward='0'", "a number", unparsable_reward="0", **mode)

    def test_preference_dir_is_unset_by_default(self, make):
        assert make(MADPOConfig).preference_dir is None
        assert make(MADPOConfig, preference_dir="pairs").preference_dir == "pairs"

    @EVERY
    def test_several_turns_are_refused(self, refused, config_class):
        refused(config_class, "num_turns=2", "single answers", num_turns=2)

    @EVERY
    @pytest.mark.parametrize("mode", ["decentralized", "centralized"])
    def test_actors_that_hear_others_are_refused(self, refused, config_class, mode):
        refused(config_class, "turn_order='sequential'", turn_order="sequential", collaboration_mode=mode)

    @EVERY
    def test_a_command_line_gives_the_options_of_preferences(self, parse, config_class):
        words = "--preference_num_candidates 6 --preference_pairs_per_sample 3 --pair_selection random"
        words += " --preference_batch_size 12 --preference_dir p --collaboration_mode centralized"
        words += " --unparsable_reward -0.5"
        config = parse(config_class, *words.split())
        assert (config.preference_num_candidates, config.preference_pairs_per_sample) == (6, 3)
        assert (config.pair_selection, config.preference_batch_size, config.preference_dir) == ("random", 12, "p")
        assert (config.collaboration_mode, config.unparsable_reward) == ("centralized", -0.5)

    @EVERY
    @pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda config: pickle.loads(pickle.dumps(config))])
    def test_a_copy_is_equal_and_of_the_same_class(self, make, config_class, copied):
        config = make(config_class, preference_num_candidates=5)
        other = copied(config)
        assert type(other) is type(config) and other == config and other is not config
        other.preference_num_candidates = 7
        assert config.preference_num_candidates == 5
        assert json.loads(config.to_json_string())["preference_num_candidates"] == 5


class TestMADPO:
    @pytest.mark.parametrize("config_class", [MADPOConfig, MADPOIterConfig])
    def test_defaults(self, make, config_class):
        config = make(config_class)
        assert (config.beta, config.loss_type, config.label_smoothing) == (0.1, "sigmoid", 0.0)
        assert config.recompute_activations and not config.reference_free and not config.precompute_ref_log_probs
        assert (config.num_generations, config.influence_steps, config.per_device_train_batch_size) == (1, 0, 8)

    @pytest.mark.parametrize("options", [{"dpo_beta": 0.3}, {"beta": 0.3}, {"dpo_beta": 0.3, "beta": 0.3}])
    def test_dpo_beta_is_another_word_for_beta(self, make, options):
        assert make(MADPOConfig, **options).beta == 0.3

    def test_dpo_beta_that_differs_from_beta_is_refused(self, refused):
        refused(MADPOConfig, "dpo_beta=0.3", "beta=0.2", dpo_beta=0.3, beta=0.2)

    @pytest.mark.parametrize("word", ["dpo_beta", "beta"])
    @pytest.mark.parametrize("value", [0, 0.0, -0.1])
    def test_dpo_beta_that_is_not_above_0_is_refused(self, refused, word, value):
        refused(MADPOConfig, f"beta={value:g}", **{word: value})

    @pytest.mark.parametrize(
        "option",
        [
            {"reference_kl_enabled": True},
            {"reference_kl_enabled": False},
            {"reference_kl_coef": 0.1},
        ],
    )
    def test_words_of_a_kl_term_are_refused(self, refused, option):
        (name,) = option
        refused(MADPOConfig, name, "`beta` is the strength of the references", **option)

    def test_reference_free_keeps_beta_as_the_scale_of_margins(self, make):
        config = make(MADPOConfig, reference_free=True, beta=0.5)
        assert config.reference_free and config.beta == 0.5

    @pytest.mark.parametrize("loss_type", ["sigmoid", "hinge", "ipo"])
    def test_losses_of_pairs_pass_the_checks_of_grpos_config(self, make, loss_type):
        assert make(MADPOConfig, loss_type=loss_type).loss_type == loss_type

    @pytest.mark.parametrize("loss_type", ["dapo", "grpo", "kto"])
    def test_other_losses_are_refused(self, refused, loss_type):
        refused(MADPOConfig, f"loss_type={loss_type!r}", "'sigmoid', 'hinge', 'ipo'", loss_type=loss_type)

    def test_label_smoothing_is_below_one_half(self, make, refused):
        assert make(MADPOConfig, label_smoothing=0.49).label_smoothing == 0.49
        for value in (0.5, 0.6, -0.1):
            refused(MADPOConfig, f"label_smoothing={value}", label_smoothing=value)

    @pytest.mark.parametrize("loss_type", ["hinge", "ipo"])
    def test_label_smoothing_of_another_loss_is_refused(self, refused, loss_type):
        refused(MADPOConfig, "label_smoothing=0.1", f"'{loss_type}'", label_smoothing=0.1, loss_type=loss_type)

    def test_label_smoothing_factor_is_something_else(self, refused):
        refused(MADPOConfig, "label_smoothing_factor=0.1", label_smoothing_factor=0.1)

    @pytest.mark.parametrize("name", ["precompute_ref_log_probs", "recompute_activations", "reference_free"])
    def test_precompute_ref_log_probs_and_the_other_switches_are_turned_on_a_command_line(self, parse, name):
        for word, value in (("true", True), ("false", False)):
            assert getattr(parse(MADPOConfig, f"--{name}", word), name) is value

    def test_recompute_activations_can_be_turned_off(self, make):
        assert make(MADPOConfig, recompute_activations=False).recompute_activations is False

    @pytest.mark.parametrize("config_class", [MADPOConfig, MADPOIterConfig])
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("num_generations", 8),
            ("influence_steps", 50),
            ("steps_per_generation", 2),
            ("generation_batch_size", 16),
            ("epsilon", 0.3),
            ("epsilon_high", 0.3),
            ("delta", 2.0),
            ("scale_rewards", "none"),
            ("importance_sampling_level", "sequence"),
            ("mask_truncated_completions", True),
            ("off_policy_mask_threshold", 0.5),
            ("use_bias_correction_kl", False),
            ("sapo_temperature_neg", 2.0),
            ("sapo_temperature_pos", 2.0),
            ("vespo_k_pos", 9.0),
            ("vespo_lambda_pos", 9.0),
            ("vespo_k_neg", 9.0),
            ("vespo_lambda_neg", 9.0),
            ("top_entropy_quantile", 0.5),
            ("entropy_coef", 0.1),
            ("use_adaptive_entropy", True),
            ("entropy_coef_min", 0.1),
            ("entropy_coef_max", 9.0),
            ("entropy_coef_delta", 0.1),
            ("entropy_target", 9.0),
            ("router_aux_loss_coef", 0.1),
            ("multi_objective_aggregation", "normalize_then_sum"),
        ],
    )
    def test_options_of_rollouts_that_train_are_refused(self, refused, config_class, name, value):
        refused(config_class, f"{name}={value!r}", config_class.__name__, **{name: value})

    def test_several_updates_on_a_rollout_are_refused(self, refused):
        refused(MADPOConfig, "num_iterations=2", num_iterations=2)

    def test_the_error_for_group_sizes_points_to_candidates(self, refused):
        refused(MADPOConfig, "preference_num_candidates", num_generations=4)

    def test_evaluation_has_a_group_size_of_its_own(self, make):
        assert make(MADPOConfig, num_generations_eval=4).num_generations_eval == 4


class TestIterations:
    @EACH_ITERATIVE
    def test_num_iterations_count_iterations_not_updates(self, make, refused, config_class):
        config = make(config_class)
        assert config.num_iterations == 6 and config.updates_per_rollout == 1
        assert make(config_class, num_iterations=2).updates_per_rollout == 1
        for value in (0, 1.5):
            refused(config_class, f"num_iterations={value}", "1 or more", num_iterations=value)

    def test_without_iterations_they_are_the_updates_of_rl(self, make):
        assert make(MARLHFConfig, num_iterations=2).updates_per_rollout == 2

    @EACH_ITERATIVE
    @pytest.mark.parametrize("options", [{"num_train_epochs": 1.5}, {"num_train_epochs": 0}, {"max_steps": 10}])
    def test_a_length_that_is_not_whole_epochs_is_refused(self, refused, config_class, options):
        ((name, value),) = options.items()
        refused(config_class, f"{name}={value}", "num_iterations", **options)

    @EACH_ITERATIVE
    def test_pair_selection_knows_the_comparator(self, make, config_class):
        assert make(config_class, pair_selection="comparator_reward").pair_selection == "comparator_reward"

    @EACH_ITERATIVE
    @pytest.mark.parametrize(
        "options",
        [
            {"preference_replay_mode": "current"},
            {"preference_replay_mode": "nearest_k", "preference_replay_k": 2},
            {"preference_replay_mode": "all_history", "preference_replay_sample_size": 5},
            {"preference_replay_mode": "lambda_decay", "preference_replay_lambda": 0.5},
        ],
        ids=lambda options: options["preference_replay_mode"],
    )
    def test_preference_replay_mode_with_its_options(self, make, config_class, options):
        replay = make(config_class, seed=3, **options).replay()
        assert replay.mode == options["preference_replay_mode"] and replay.seed == 3
        assert replay.k == options.get("preference_replay_k")
        assert replay.decay == options.get("preference_replay_lambda")
        assert replay.sample_size == options.get("preference_replay_sample_size")

    @EACH_ITERATIVE
    def test_preference_replay_mode_of_another_name_is_refused(self, refused, config_class):
        refused(config_class, "preference_replay_mode='newest'", "current", preference_replay_mode="newest")

    @EACH_ITERATIVE
    @pytest.mark.parametrize("value", [0, 1.5, None])
    def test_preference_replay_k_is_a_whole_number(self, refused, config_class, value):
        options = {"preference_replay_mode": "nearest_k", "preference_replay_k": value}
        refused(config_class, "preference_replay_k", **options)

    @EACH_ITERATIVE
    @pytest.mark.parametrize("value", [-0.1, 1.1, None])
    def test_preference_replay_lambda_is_from_0_to_1(self, refused, config_class, value):
        options = {"preference_replay_mode": "lambda_decay", "preference_replay_lambda": value}
        refused(config_class, "preference_replay_lambda", **options)

    @EACH_ITERATIVE
    @pytest.mark.parametrize("mode", ["current", "all_history"])
    def test_preference_replay_sample_size_is_a_number_of_draws(self, refused, config_class, mode):
        value = 3 if mode == "current" else 0
        options = {"preference_replay_mode": mode, "preference_replay_sample_size": value}
        refused(config_class, f"preference_replay_sample_size={value}", **options)

    @EACH_ITERATIVE
    def test_comparator_policy_has_its_choices(self, make, refused, config_class):
        for policy, options in {
            "current": {},
            "current_copy": {},
            "model": {"comparator_model_name": "other"},
            "history": {"comparator_history_k": 2},
            "api": {"comparator_api_model": "m"},
        }.items():
            assert make(config_class, comparator_policy=policy, **options).comparator_policy == policy
        refused(config_class, "comparator_policy='older'", "'history'", comparator_policy="older")

    @EACH_ITERATIVE
    def test_comparator_model_name_or_agents_are_needed_for_other_models(self, make, refused, config_class):
        both = {"comparator_model_name": "m", "comparator_agents": ["a", "b"]}
        refused(config_class, "comparator_model_name", "comparator_agents", comparator_policy="model")
        refused(config_class, "comparator_model_name", "comparator_agents", comparator_policy="model", **both)
        for name, value in both.items():
            assert getattr(make(config_class, comparator_policy="model", **{name: value}), name) == value

    @EACH_ITERATIVE
    @pytest.mark.parametrize(
        ("policy", "name", "value"),
        [
            ("current", "comparator_model_name", "m"),
            ("api", "comparator_agents", ["m"]),
            ("current_copy", "comparator_history_k", 1),
            ("current", "comparator_api_url", "http://localhost/v1"),
            ("current", "comparator_api_model", "m"),
            ("current", "comparator_api_key_env", "KEY"),
            ("history", "comparator_api_timeout", 5.0),
            ("model", "comparator_api_max_retries", 0),
            ("current", "comparator_api_max_n_per_request", 4),
            ("current", "comparator_api_headers", {"x": "y"}),
            ("current", "comparator_api_extra_body", {"x": 1}),
        ],
    )
    def test_options_of_another_comparator_are_refused(self, refused, config_class, policy, name, value):
        needs = {"api": {"comparator_api_model": "m"}, "history": {"comparator_history_k": 1}}
        needs["model"] = {"comparator_model_name": "m"}
        options = {"comparator_policy": policy, **needs.get(policy, {}), name: value}
        refused(config_class, f"{name}={value!r}", repr(policy), **options)

    def test_comparator_agents_on_a_command_line(self, parse):
        config = parse(MADPOIterConfig, "--comparator_policy", "model", "--comparator_agents", "one", "two")
        assert config.comparator_agents == ["one", "two"]

    @EACH_ITERATIVE
    def test_comparator_num_candidates_are_one_or_more(self, make, refused, config_class):
        assert make(config_class).comparator_num_candidates is None
        assert make(config_class, comparator_num_candidates=1).comparator_num_candidates == 1
        refused(config_class, "comparator_num_candidates=0", "1 or more", comparator_num_candidates=0)

    @EACH_ITERATIVE
    @pytest.mark.parametrize("value", [None, 0, 1.5])
    def test_comparator_history_k_is_needed_for_earlier_policies(self, refused, config_class, value):
        refused(config_class, "comparator_history_k", comparator_policy="history", comparator_history_k=value)

    @EACH_ITERATIVE
    def test_comparator_api_model_is_needed_for_an_endpoint(self, refused, config_class):
        refused(config_class, "comparator_api_model", comparator_policy="api", comparator_api_url="http://localhost")

    def test_comparator_api_url_and_key_env_have_the_clients_defaults(self, make):
        config = make(MADPOIterConfig, comparator_policy="api", comparator_api_model="m")
        assert config.comparator_api_url is None and config.comparator_api_key_env == "OPENAI_API_KEY"

    def test_comparator_api_key_env_is_a_name(self, make):
        options = {"comparator_policy": "api", "comparator_api_model": "m", "comparator_api_key_env": "MY_KEY"}
        assert make(MADPOIterConfig, **options).comparator_api_key_env == "MY_KEY"

    @pytest.mark.parametrize(
        ("name", "default", "bad"),
        [
            ("comparator_api_timeout", 120.0, -1),
            ("comparator_api_max_retries", 3, -1),
            ("comparator_api_max_n_per_request", None, 0),
        ],
    )
    def test_comparator_api_timeout_and_other_numbers(self, make, refused, name, default, bad):
        options = {"comparator_policy": "api", "comparator_api_model": "m"}
        assert getattr(make(MADPOIterConfig, **options), name) == default
        refused(MADPOIterConfig, f"{name}={bad}", "or more", **options, **{name: bad})

    def test_comparator_api_max_retries_may_be_0(self, make):
        options = {"comparator_policy": "api", "comparator_api_model": "m", "comparator_api_max_retries": 0}
        assert make(MADPOIterConfig, **options).comparator_api_max_retries == 0

    def test_comparator_api_max_n_per_request_limits_a_request(self, make):
        options = {"comparator_policy": "api", "comparator_api_model": "m", "comparator_api_max_n_per_request": 2}
        assert make(MADPOIterConfig, **options).comparator_api_max_n_per_request == 2

    @EACH_ITERATIVE
    @pytest.mark.parametrize("name", ["comparator_api_headers", "comparator_api_extra_body"])
    def test_comparator_api_headers_and_extra_body_are_json_on_a_command_line(self, parse, config_class, name):
        words = ["--comparator_policy", "api", "--comparator_api_model", "m"]
        config = parse(config_class, *words, f"--{name}", '{"team": "red", "depth": {"levels": 2}}')
        assert getattr(config, name) == {"team": "red", "depth": {"levels": 2}}

    @EACH_ITERATIVE
    def test_comparator_api_headers_are_not_in_logs_and_files(self, make, config_class):
        headers = {"X-Key": "a secret", "X-Team": "red"}
        options = {"comparator_policy": "api", "comparator_api_model": "m", "comparator_api_headers": headers}
        config = make(config_class, **options)
        assert config.to_dict()["comparator_api_headers"] == {"X-Key": "***", "X-Team": "***"}
        assert "a secret" not in config.to_json_string()
        assert config.comparator_api_headers == headers

    @pytest.mark.parametrize("name", ["comparator_api_headers", "comparator_api_extra_body"])
    @pytest.mark.parametrize("value", ["[1]", [1], "red"])
    def test_comparator_api_extra_body_and_headers_that_are_no_dictionary_are_refused(self, make, name, value):
        options = {"comparator_policy": "api", "comparator_api_model": "m", name: value}
        with pytest.raises(ValueError, match=name):
            make(MADPOIterConfig, **options)


RL = [
    # algorithm, its config, an option with another value than its default, and one that it lacks
    ("magrpo", MAGRPOConfig, {"advantage_groups": "actor"}, {"critic_type": "q"}),
    ("mareinforce", MAREINFORCEConfig, {"role_baseline_decay": 0.5}, {"gae_lambda": 0.9}),
    ("marloo", MARLOOConfig, {"joint_mode": "cross", "cross_samples": 2}, {"remax_baseline": "greedy"}),
    ("maremax", MAReMaxConfig, {"remax_baseline": "greedy"}, {"value_loss_coef": 1.0}),
    ("maac", MAACConfig, {"critic_type": "q", "gae_lambda": 0.5}, {"use_separate_critic": False}),
    ("iac", IACConfig, {"use_separate_critic": False, "value_head_hidden_dim": 8}, {"advantage_mode": "rloo"}),
]
EACH_RL = pytest.mark.parametrize(("algorithm", "rl_config", "other", "lacked"), RL, ids=[row[0] for row in RL])


@EACH_RLHF
class TestOptionsOfTheRL:
    @EACH_RL
    def test_a_config_is_one_of_its_rl_with_its_defaults(
        self, make, config_class, algorithm, rl_config, other, lacked
    ):
        config, plain = make(config_class, rl_algorithm=algorithm), make(rl_config)
        assert isinstance(config, rl_config) and isinstance(config, config_class)
        assert type(config).__name__ == config_class.__name__
        its_own = {"num_train_epochs", "num_iterations"} if config_class is MARLHFIterConfig else set()
        for option in dataclasses.fields(rl_config):
            if option.name not in its_own | {"distributed_state", "deepspeed_plugin", "logging_dir"}:
                assert getattr(config, option.name) == getattr(plain, option.name), option.name

    @EACH_RL
    def test_its_options_pass_through(self, make, config_class, algorithm, rl_config, other, lacked):
        config = make(config_class, rl_algorithm=algorithm, **other)
        assert {name: getattr(config, name) for name in other} == other

    @EACH_RL
    def test_options_of_others_are_refused(self, refused, config_class, algorithm, rl_config, other, lacked):
        ((name, value),) = lacked.items()
        refused(config_class, f"{name}={value!r}", f"rl_algorithm={algorithm!r}", rl_algorithm=algorithm, **lacked)

    def test_the_refusal_says_whose_option_it_is(self, refused, config_class):
        refused(config_class, "'maac', 'iac'", critic_type="v")
        refused(config_class, "rl_algorithm 'iac'", rl_algorithm="maac", advantage_level="token")
        owners = "'magrpo', 'mareinforce', 'marloo', 'maremax'"
        refused(config_class, owners, rl_algorithm="iac", joint_mode="aligned")

    @pytest.mark.parametrize(
        ("options", "parts"),
        [
            ({"rl_algorithm": "magrpo", "advantage_mode": "raw"}, ["scale_rewards='group'", "advantage_mode='raw'"]),
            ({"rl_algorithm": "mareinforce", "scale_rewards": "group"}, ["scale_rewards='group'"]),
            ({"rl_algorithm": "marloo", "advantage_groups": "actor"}, ["advantage_groups='actor'", "'rloo'"]),
            ({"rl_algorithm": "maremax", "remax_baseline": "mean"}, ["remax_baseline='mean'", "'greedy'"]),
            (
                {"rl_algorithm": "maac", "scale_rewards": "none"},
                ["scale_rewards='none'", "critic is the baseline"],
            ),
            ({"rl_algorithm": "maac", "kl_in_reward": True}, ["kl_in_reward=True", "beta=0.0"]),
            ({"rl_algorithm": "iac", "advantage_level": "token", "critic_type": "q"}, ["advantage_level='token'"]),
            ({"rl_algorithm": "iac", "gae_lambda": 2}, ["gae_lambda=2", "from 0 to 1"]),
            ({"rl_algorithm": "magrpo", "num_generations": 1}, ["num_generations=1"]),
            ({"rl_algorithm": "maac", "individual_rewards": True}, ["individual_rewards=True", "one reward"]),
        ],
    )
    def test_they_are_checked_by_the_rls_own_checks(self, refused, config_class, options, parts):
        refused(config_class, *parts, **options)

    def test_a_default_that_is_spelled_out_is_fine(self, make, config_class):
        assert make(config_class, rl_algorithm="maac", scale_rewards="group", individual_rewards=False)

    @pytest.mark.parametrize("algorithm", ["mareinforce", "maac", "iac"])
    def test_a_group_of_one_is_enough_where_the_rl_needs_no_more(self, make, config_class, algorithm):
        assert make(config_class, rl_algorithm=algorithm, num_generations=1).num_generations == 1

    def test_beta_is_the_kl_coefficient_of_the_rl(self, make, config_class):
        assert make(config_class).beta == 0.0
        assert make(config_class, reference_kl_coef=0.2).beta == 0.2

    def test_rl_algorithm_of_another_name_is_refused(self, refused, config_class):
        refused(config_class, "rl_algorithm='ppo'", *map(repr, RL_CONFIGS), rl_algorithm="ppo")

    def test_a_command_line_gives_them(self, parse, config_class):
        words = "--rl_algorithm iac --critic_type q --critic_learning_rate 2e-4 --kl_in_reward --beta 0.1"
        words += " --value_normalization false --value_clip_range 0.2 --critic_value_head_hidden_dim 8"
        config = parse(config_class, *words.split())
        assert isinstance(config, IACConfig)
        assert (config.critic_type, config.critic_learning_rate, config.kl_in_reward) == ("q", 2e-4, True)
        assert config.value_normalization is False and config.use_separate_critic is True
        assert (config.value_clip_range, config.critic_value_head_hidden_dim) == (0.2, 8)

    def test_a_command_line_refuses_a_word_that_is_no_choice(self, parse, config_class, capsys):
        with pytest.raises(SystemExit):
            parse(config_class, "--rl_algorithm", "iac", "--critic_type", "w")
        assert "--critic_type" in capsys.readouterr().err

    def test_the_help_says_for_which_algorithms_they_are(self, config_class):
        text = " ".join(HfArgumentParser(config_class).format_help().split())
        assert "For maac, iac." in text and "For maremax." in text

    @EACH_RL
    @pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda config: pickle.loads(pickle.dumps(config))])
    def test_a_copy_is_of_the_rl_too(self, make, config_class, algorithm, rl_config, other, lacked, copied):
        config = make(config_class, rl_algorithm=algorithm, **other)
        again = copied(config)
        assert type(again) is type(config) and isinstance(again, rl_config) and again == config

    @EACH_RL
    def test_one_may_be_made_of_another(self, make, config_class, algorithm, rl_config, other, lacked):
        """As far as GRPO's config allows it, which refuses the two sizes of a batch that it computed itself."""
        config = make(config_class, rl_algorithm=algorithm, **other)
        sizes = {"steps_per_generation": None, "generation_batch_size": None}
        again = dataclasses.replace(config, preference_num_candidates=3, **sizes)
        assert type(again) is type(config) and again.preference_num_candidates == 3
        assert {name: getattr(again, name) for name in other} == other

    def test_it_may_be_made_with_another_algorithm(self, make, config_class):
        config = make(config_class, rl_algorithm="magrpo")
        unset = dict.fromkeys(
            [option.name for option in dataclasses.fields(MAGRPOConfig) if option.name in ADDED_BY_REINFORCE]
        )
        sizes = {"steps_per_generation": None, "generation_batch_size": None}
        again = dataclasses.replace(config, rl_algorithm="maac", **unset, **sizes)
        assert isinstance(again, MAACConfig) and not isinstance(again, MAGRPOConfig)
        assert again.critic_type == "v" and again.joint_mode is None

    def test_it_can_be_written_as_json(self, make, config_class):
        options = json.loads(make(config_class, rl_algorithm="iac", critic_type="q").to_json_string())
        assert (options["rl_algorithm"], options["critic_type"], options["joint_mode"]) == ("iac", "q", None)


ADDED_BY_REINFORCE = {
    "advantage_mode",
    "advantage_groups",
    "role_baseline_decay",
    "role_baseline_column",
    "joint_mode",
    "cross_samples",
    "scale_rewards",
}


def test_a_config_of_a_users_own_class_works(make):
    class Tuned(MARLHFConfig):
        pass

    config = make(Tuned, rl_algorithm="iac")
    assert isinstance(config, Tuned) and isinstance(config, ActorCriticConfig)
    assert type(copy.copy(config)) is type(config)


def test_every_option_that_an_rl_adds_is_one_of_rlhf():
    known = {option.name for option in dataclasses.fields(MARLHFConfig)}
    for config in RL_CONFIGS.values():
        assert {option.name for option in dataclasses.fields(config)} <= known


class TestRewardModel:
    def test_defaults(self, make):
        config = make(MARLHFConfig)
        assert (config.rl_algorithm, config.reward_model_name, config.reward_model_device) == ("magrpo", None, "auto")
        assert (config.reward_learning_rate, config.reward_num_train_epochs) == (1e-5, 1)
        assert (config.reward_train_batch_size, config.reward_max_length) == (8, None)
        assert config.reward_freeze_backbone is False and config.reward_eval_fraction == 0.1
        config = make(MARLHFIterConfig)
        assert (config.reward_num_train_epochs, config.preference_scoring_reward) == (2, "task")

    @EACH_RLHF
    def test_reward_model_name_is_a_word(self, parse, config_class):
        assert parse(config_class, "--reward_model_name", "org/model").reward_model_name == "org/model"

    @EACH_RLHF
    def test_reward_learning_rate_is_a_number_from_0_up(self, parse, refused, config_class):
        config = parse(config_class, "--reward_learning_rate", "2e-5", "--learning_rate", "1e-6")
        assert (config.reward_learning_rate, config.learning_rate) == (2e-5, 1e-6)
        refused(config_class, "reward_learning_rate=-1e-05", "0 or more", reward_learning_rate=-1e-5)

    @EACH_RLHF
    def test_reward_num_train_epochs_may_be_0(self, parse, refused, config_class):
        config = parse(config_class, "--reward_num_train_epochs", "0", "--num_train_epochs", "4")
        assert (config.reward_num_train_epochs, config.num_train_epochs) == (0, 4)
        refused(config_class, "reward_num_train_epochs=-1", "0 or more", reward_num_train_epochs=-1)

    @EACH_RLHF
    def test_reward_train_batch_size_is_one_or_more(self, parse, refused, config_class):
        config = parse(config_class, "--reward_train_batch_size", "4")
        assert (config.reward_train_batch_size, config.per_device_train_batch_size) == (4, 8)
        refused(config_class, "reward_train_batch_size=0", "1 or more", reward_train_batch_size=0)

    @EACH_RLHF
    def test_reward_max_length_is_one_or_more(self, parse, refused, config_class):
        assert parse(config_class, "--reward_max_length", "256").reward_max_length == 256
        refused(config_class, "reward_max_length=0", "1 or more", reward_max_length=0)

    @EACH_RLHF
    def test_reward_freeze_backbone_is_a_switch(self, parse, config_class):
        assert parse(config_class, "--reward_freeze_backbone").reward_freeze_backbone is True

    @EACH_RLHF
    def test_reward_eval_fraction_is_from_0_to_less_than_1(self, parse, refused, config_class):
        assert parse(config_class, "--reward_eval_fraction", "0").reward_eval_fraction == 0
        for value in (-0.1, 1.5):
            refused(config_class, f"reward_eval_fraction={value}", "from 0 to 1", reward_eval_fraction=value)
        refused(config_class, "reward_eval_fraction=1", "below 1", reward_eval_fraction=1)

    @EACH_RLHF
    def test_rl_algorithm_on_a_command_line_is_one_of_six(self, parse, config_class):
        for algorithm, rl_config in RL_CONFIGS.items():
            assert isinstance(parse(config_class, "--rl_algorithm", algorithm), rl_config)

    @EACH_RLHF
    def test_critic_model_name_needs_an_algorithm_with_critics(self, make, refused, config_class):
        for algorithm in ("maac", "iac"):
            config = make(config_class, rl_algorithm=algorithm, critic_model_name="org/critic")
            assert config.critic_model_name == "org/critic"
        refused(config_class, "critic_model_name='c'", "'maac', 'iac'", "'magrpo'", critic_model_name="c")

    def test_critic_model_name_has_no_use_for_heads_on_actors(self, refused):
        options = {"rl_algorithm": "iac", "use_separate_critic": False, "critic_model_name": "c"}
        refused(MARLHFConfig, "critic_model_name='c'", "use_separate_critic=False", **options)

    def test_preference_scoring_reward_has_two_choices(self, make, refused):
        config = make(MARLHFIterConfig, preference_scoring_reward="reward_model")
        assert config.preference_scoring_reward == "reward_model"
        refused(MARLHFIterConfig, "preference_scoring_reward='model'", "'task'", preference_scoring_reward="model")

    @pytest.mark.parametrize("wanted", ["auto", None])
    def test_reward_model_device_is_by_default_the_teams(self, make, wanted):
        config = make(MARLHFConfig, reward_model_device=wanted)
        assert config.reward_device == config.device == torch.device("cpu")

    def test_reward_model_device_that_is_none_is_refused(self, refused):
        for wanted in ("gpu1", "cuda:one"):
            refused(MARLHFConfig, f"reward_model_device={wanted!r}", "'auto'", reward_model_device=wanted)

    def test_reward_model_device_that_is_a_gpu_is_the_teams_where_there_is_none(self, make, monkeypatch, caplog):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        config = make(MARLHFConfig, reward_model_device="cuda:1")
        assert "reward_model_device='cuda:1'" in caplog.text and "no GPU" in caplog.text
        assert config.reward_device == torch.device("cpu")

    def test_reward_model_device_that_is_a_gpu_must_be_there(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        assert find_device("reward_model_device", "cuda:1") == torch.device("cuda:1")
        assert find_device("reward_model_device", "cuda") == torch.device("cuda")
        assert find_device("reward_model_device", "auto") is find_device("reward_model_device", None) is None
        with pytest.raises(ValueError, match="reward_model_device='cuda:2'.*'cuda:0', 'cuda:1'"):
            find_device("reward_model_device", "cuda:2")
