# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Every option of the configs, inherited or their own: who honours it, or the reason why it is refused."""

import ast
import dataclasses
import math
from pathlib import Path

import pandas as pd
import pytest
import torch
from tiny import dataset, lm, logged, parameters, record_batches, stub_rollouts, team_args, tok, word_reward
from transformers import HfArgumentParser
from trl import GRPOConfig

from trl_multiagent import (
    IACConfig,
    IACTrainer,
    MAACConfig,
    MAACTrainer,
    MADPOConfig,
    MADPOIterConfig,
    MAGRPOConfig,
    MAGRPOTrainer,
    MAREINFORCEConfig,
    MAREINFORCETrainer,
    MAReMaxConfig,
    MAReMaxTrainer,
    MARLHFConfig,
    MARLHFIterConfig,
    MARLOOConfig,
    MARLOOTrainer,
    MultiAgentConfig,
)
from trl_multiagent.agents import loading
from trl_multiagent.trainers.multi_agent_config import REFUSED_OPTIONS


TRAINER = "transformers.Trainer"
ACTORS = "TRL in each actor"
TEAM = "the team"
CONFIG = "TRL's config, which refuses it"
SCRIPT = "the user's script, or its launcher"

# A new option of TRL's or transformers' fails the test below until it stands here or among the refused ones. Before
# you add one, find the code that reads it, and see that it does so for every actor.
HONOURED_BY = {
    # Training
    "output_dir": TRAINER,
    "per_device_train_batch_size": TEAM,
    "num_train_epochs": TRAINER,
    "max_steps": TRAINER,
    "learning_rate": TEAM,
    "lr_scheduler_type": TRAINER,
    "lr_scheduler_kwargs": TRAINER,
    "warmup_steps": TRAINER,
    "optim": TRAINER,
    "optim_args": TRAINER,
    "weight_decay": TRAINER,
    "adam_beta1": TRAINER,
    "adam_beta2": TRAINER,
    "adam_epsilon": TRAINER,
    "gradient_accumulation_steps": TRAINER,
    "max_grad_norm": TEAM,
    "bf16": TRAINER,
    "fp16": TRAINER,
    "tf32": TRAINER,
    "activation_checkpointing": TRAINER,
    "activation_checkpointing_kwargs": TRAINER,
    "gradient_checkpointing": TRAINER,
    "gradient_checkpointing_kwargs": TRAINER,
    "use_cache": TRAINER,
    "torch_empty_cache_steps": TRAINER,
    "auto_find_batch_size": CONFIG,
    "seed": TRAINER,
    "data_seed": TEAM,
    "full_determinism": TRAINER,
    "use_cpu": TRAINER,
    "debug": TRAINER,
    "skip_memory_metrics": TRAINER,
    # Logging
    "logging_strategy": TRAINER,
    "logging_steps": TRAINER,
    "logging_first_step": TRAINER,
    "log_on_each_node": TRAINER,
    "logging_nan_inf_filter": TRAINER,
    "include_num_input_tokens_seen": TRAINER,
    "log_level": TRAINER,
    "log_level_replica": TRAINER,
    "disable_tqdm": TRAINER,
    "report_to": TRAINER,
    "run_name": TRAINER,
    "project": TRAINER,
    "trackio_space_id": TRAINER,
    "trackio_bucket_id": TRAINER,
    "trackio_static_space_id": TRAINER,
    "log_completions": TEAM,
    "num_completions_to_print": TEAM,
    "log_unique_prompts": TEAM,
    # Evaluation
    "eval_strategy": TRAINER,
    "eval_steps": TRAINER,
    "eval_delay": TRAINER,
    "per_device_eval_batch_size": TEAM,
    "eval_on_start": TRAINER,
    "eval_accumulation_steps": TRAINER,
    # Saving
    "save_only_model": TRAINER,
    "save_strategy": TRAINER,
    "save_steps": TRAINER,
    "save_on_each_node": TRAINER,
    "save_total_limit": TRAINER,
    "push_to_hub": TEAM,
    "hub_token": TRAINER,
    "hub_private_repo": TRAINER,
    "hub_model_id": TRAINER,
    "hub_strategy": TRAINER,
    "hub_always_push": TRAINER,
    "hub_revision": TEAM,
    "load_best_model_at_end": TEAM,
    "metric_for_best_model": TRAINER,
    "greater_is_better": TRAINER,
    "restore_callback_states_from_checkpoint": TRAINER,
    # Data and processes
    "accelerator_config": TRAINER,
    "dataloader_drop_last": TRAINER,
    "dataloader_num_workers": TRAINER,
    "dataloader_pin_memory": TRAINER,
    "dataloader_persistent_workers": TRAINER,
    "dataloader_prefetch_factor": TRAINER,
    "dataloader_multiprocessing_context": TRAINER,
    "dataloader_in_order": TRAINER,
    "ddp_find_unused_parameters": TRAINER,
    "ddp_bucket_cap_mb": TRAINER,
    "ddp_broadcast_buffers": TRAINER,
    "ddp_static_graph": TRAINER,
    "ddp_backend": TRAINER,
    "ddp_timeout": TRAINER,
    "deepspeed": TRAINER,
    "do_train": SCRIPT,
    "do_eval": SCRIPT,
    "do_predict": SCRIPT,
    "resume_from_checkpoint": SCRIPT,
    "local_rank": SCRIPT,
    # Models
    "model_init_kwargs": ACTORS,
    "trust_remote_code": ACTORS,
    "router_aux_loss_coef": ACTORS,
    "disable_dropout": ACTORS,
    "cast_lm_head_to_fp32": ACTORS,
    # Rollouts
    "num_generations": TEAM,
    "num_generations_eval": TEAM,
    "max_completion_length": ACTORS,
    "ds3_gather_for_generation": ACTORS,
    "shuffle_dataset": TEAM,
    "pad_to_multiple_of": ACTORS,
    "generation_batch_size": TEAM,
    "steps_per_generation": TEAM,
    "temperature": ACTORS,
    "top_p": ACTORS,
    "top_k": ACTORS,
    "min_p": ACTORS,
    "generation_kwargs": ACTORS,
    "chat_template_kwargs": ACTORS,
    "repetition_penalty": ACTORS,
    "cache_implementation": ACTORS,
    # Losses
    "beta": ACTORS,
    "num_iterations": TEAM,
    "epsilon": ACTORS,
    "delta": ACTORS,
    "epsilon_high": ACTORS,
    "sapo_temperature_neg": ACTORS,
    "sapo_temperature_pos": ACTORS,
    "vespo_k_pos": ACTORS,
    "vespo_lambda_pos": ACTORS,
    "vespo_k_neg": ACTORS,
    "vespo_lambda_neg": ACTORS,
    "importance_sampling_level": ACTORS,
    "reward_weights": TEAM,
    "multi_objective_aggregation": ACTORS,
    "scale_rewards": TEAM,
    "loss_type": ACTORS,
    "mask_truncated_completions": ACTORS,
    "sync_ref_model": TEAM,
    "ref_model_mixup_alpha": TEAM,
    "ref_model_sync_steps": TEAM,
    "top_entropy_quantile": ACTORS,
    "entropy_coef": ACTORS,
    "use_adaptive_entropy": ACTORS,
    "entropy_coef_min": ACTORS,
    "entropy_coef_max": ACTORS,
    "entropy_coef_delta": ACTORS,
    "entropy_target": ACTORS,
    "off_policy_mask_threshold": ACTORS,
    "use_bias_correction_kl": ACTORS,
}

INHERITED = {field.name: field for field in dataclasses.fields(GRPOConfig)}
CRITIC_FREE = [MAGRPOConfig, MAREINFORCEConfig, MARLOOConfig, MAReMaxConfig]
CRITICS = [MAACConfig, IACConfig]
CONFIGS = [*CRITIC_FREE, *CRITICS]
# Those that end in RL, and so have its groups, and those that do not
RLHF = [MARLHFConfig, MARLHFIterConfig]
PREFERENCES = [MADPOConfig, MADPOIterConfig, *RLHF]

# The configs' own options, each with the test here that shows what it does; another word is one of TwoWords. Those of
# critics and values, and those of preferences, have tests in files of their own that begin with their name
OWN_OPTIONS = {
    "num_agents": "TestOwnOptions.test_num_agents",
    "agent_learning_rate": "TestTwoWordsForOneThing",
    "max_new_tokens": "TestTwoWordsForOneThing",
    "reference_kl_enabled": "TestTwoWordsForOneThing",
    "reference_kl_coef": "TestTwoWordsForOneThing",
    "agent_names": "TestOwnOptions.test_agent_names",
    "trainable_agents": "TestOwnOptions.test_trainable_agents",
    "num_turns": "TestOwnOptions.test_num_turns",
    "turn_order": "TestOwnOptions.test_turn_order",
    "rollout_mode": "TestOwnOptions.test_rollout_mode",
    "discount": "TestOwnOptions.test_discount",
    "early_termination_threshold": "TestOwnOptions.test_early_termination_threshold",
    "external_prompt_passthrough": "TestOwnOptions.test_external_prompt_passthrough",
    "influence_steps": "TestOwnOptions.test_influence_steps",
    "batched_rewards": "TestOwnOptions.test_batched_rewards",
    "advantage_mode": "TestOwnOptions.test_advantage_mode",
    "advantage_groups": "TestOwnOptions.test_advantage_groups",
    "role_baseline_decay": "TestOwnOptions.test_role_baseline_decay",
    "role_baseline_column": "TestOwnOptions.test_role_baseline_column",
    "joint_mode": "TestOwnOptions.test_joint_mode",
    "cross_samples": "TestOwnOptions.test_cross_samples",
    "remax_baseline": "TestOwnOptions.test_remax_baseline",
}


def default_of(field):
    return field.default_factory() if field.default is dataclasses.MISSING else field.default


def another_value(value):
    """A value of the same kind that is not the default."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    return ["another"] if isinstance(value, list) else "another"


class TestEveryInheritedOption:
    @pytest.mark.parametrize("name", INHERITED)
    def test_it_is_honoured_by_someone_or_refused(self, name):
        places = [place for place, names in (("honoured", HONOURED_BY), ("refused", REFUSED_OPTIONS)) if name in names]
        assert len(places) == 1, (
            f"`{name}` is {' and '.join(places) or 'neither honoured nor refused'}. Say in HONOURED_BY who reads it, "
            f"or add it to REFUSED_OPTIONS with the reason."
        )

    @pytest.mark.parametrize("config_class", [*CONFIGS, *PREFERENCES])
    @pytest.mark.parametrize("name", sorted(set(REFUSED_OPTIONS) & set(INHERITED)))
    def test_a_refused_one_raises_with_its_name_and_the_reason(self, tmp_path, config_class, name):
        value = another_value(default_of(INHERITED[name]))
        with pytest.raises(ValueError) as caught:
            config_class(output_dir=str(tmp_path), use_cpu=True, **{name: value})
        message = str(caught.value)
        assert name in message and repr(value) in message and REFUSED_OPTIONS[name] in message
        assert config_class.__name__ in message

    @pytest.mark.parametrize("config_class", CRITICS)
    @pytest.mark.parametrize(
        ("name", "value"), [("scale_rewards", "none"), ("multi_objective_aggregation", "normalize_then_sum")]
    )
    def test_a_critic_refuses_what_compares_rewards_in_a_group(self, tmp_path, config_class, name, value):
        message = f"{name}={value!r} is not supported by {config_class.__name__}: the critic is the baseline"
        with pytest.raises(ValueError, match=message):
            config_class(output_dir=str(tmp_path), use_cpu=True, **{name: value})
        MAGRPOConfig(output_dir=str(tmp_path), use_cpu=True, **{name: value})

    @pytest.mark.parametrize("config_class", [*CONFIGS, *PREFERENCES, MultiAgentConfig])
    def test_every_own_one_has_a_test(self, config_class):
        own = {field.name for field in dataclasses.fields(config_class)} - set(INHERITED)
        for name in own & set(OWN_OPTIONS):
            group, _, test = OWN_OPTIONS[name].partition(".")
            assert hasattr(globals()[group], test or "__init__"), name
        files = [Path(__file__).with_name(f"test_{part}.py") for part in ("critic_options", "preference_config")]
        trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
        tests = [node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        untested = [n for n in own - set(OWN_OPTIONS) if not any(test.startswith(f"test_{n}_") for test in tests)]
        assert untested == []

    @pytest.mark.parametrize("config_class", [*CONFIGS, *PREFERENCES])
    def test_defaults_may_be_spelled_out(self, tmp_path, config_class):
        values = {name: default_of(INHERITED[name]) for name in REFUSED_OPTIONS if name in INHERITED}
        config_class(output_dir=str(tmp_path), use_cpu=True, **values)

    def test_auto_find_batch_size_is_refused_by_trl(self, tmp_path):
        with pytest.raises(ValueError, match="auto_find_batch_size"):
            MAGRPOConfig(output_dir=str(tmp_path), use_cpu=True, auto_find_batch_size=True)

    @pytest.mark.parametrize("config_class", [*CONFIGS, *PREFERENCES])
    def test_every_own_option_has_help(self, config_class):
        for field in dataclasses.fields(config_class):
            if field.name not in INHERITED or INHERITED[field.name] is not field:
                assert field.metadata.get("help"), field.name

    @pytest.mark.parametrize("config_class", [*CONFIGS, *RLHF])
    def test_a_command_line_works(self, tmp_path, config_class):
        words = ["--output_dir", str(tmp_path), "--use_cpu", "--agent_learning_rate", "3e-5", "--num_generations", "3"]
        (config,) = HfArgumentParser(config_class).parse_args_into_dataclasses(words)
        assert config.learning_rate == 3e-5 and config.num_generations == 3

    def test_a_command_line_gives_the_options_of_turns_and_credit(self, tmp_path):
        words = "--num_turns 2 --rollout_mode chain --discount 0.9 --advantage_groups role --scale_rewards none"
        words += " --agent_names planner coder --trainable_agents True false"
        command = ["--output_dir", str(tmp_path), "--use_cpu", *words.split()]
        (config,) = HfArgumentParser(MAGRPOConfig).parse_args_into_dataclasses(command)
        assert (config.num_turns, config.rollout_mode, config.discount) == (2, "chain", 0.9)
        assert config.agent_names == ["planner", "coder"] and config.trainable_agents == [True, False]
        assert config.advantage_groups == "role"

    @pytest.mark.parametrize("config_class", CRITICS)
    def test_a_command_line_gives_the_options_of_critics(self, tmp_path, config_class):
        words = "--critic_type q --critic_learning_rate 2e-4 --critic_warmup_steps 3 --critic_max_length 64"
        words += " --value_head_dtype bfloat16 --gae_lambda 0.5 --advantage_normalization false --value_clip_range 0.2"
        words += " --value_loss_coef 1.5 --value_normalization --kl_in_reward --beta 0.1 --num_generations 1"
        words += " --critic_value_head_hidden_dim 8 --num_turns 2"
        words += " --individual_rewards" if config_class is MAACConfig else " --use_separate_critic true"
        command = ["--output_dir", str(tmp_path), "--use_cpu", *words.split()]
        (config,) = HfArgumentParser(config_class).parse_args_into_dataclasses(command)
        assert (config.critic_type, config.critic_learning_rate, config.critic_warmup_steps) == ("q", 2e-4, 3)
        assert (config.critic_max_length, config.value_head_dtype, config.gae_lambda) == (64, "bfloat16", 0.5)
        assert (config.value_loss_coef, config.value_clip_range, config.beta) == (1.5, 0.2, 0.1)
        assert config.advantage_normalization is False and config.value_normalization and config.kl_in_reward
        assert (config.num_generations, config.critic_value_head_hidden_dim, config.num_turns) == (1, 8, 2)
        assert config.individual_rewards if config_class is MAACConfig else config.use_separate_critic

    def test_a_command_line_gives_the_options_of_heads_on_actors(self, tmp_path):
        words = "--use_separate_critic false --value_head_hidden_dim 8 --advantage_level token --bootstrap_truncated"
        command = ["--output_dir", str(tmp_path), "--use_cpu", *words.split()]
        (config,) = HfArgumentParser(IACConfig).parse_args_into_dataclasses(command)
        assert config.use_separate_critic is False and config.bootstrap_truncated is True
        assert (config.value_head_hidden_dim, config.advantage_level) == (8, "token")

    @pytest.mark.parametrize("entry", ["maybe", 2, None])
    def test_an_entry_of_trainable_agents_that_is_no_truth_value_is_an_error(self, tmp_path, entry):
        with pytest.raises(ValueError, match=f"trainable_agents.*{entry!r}"):
            MAGRPOConfig(output_dir=str(tmp_path), use_cpu=True, trainable_agents=[True, entry])


WORDS = [
    # documents' word, Hugging Face's word, two values
    ("agent_learning_rate", "learning_rate", 3e-5, 2e-5),
    ("max_new_tokens", "max_completion_length", 7, 9),
    ("reference_kl_coef", "beta", 0.3, 0.2),
]


class TestTwoWordsForOneThing:
    @pytest.mark.parametrize(("documents", "hugging_face", "value", "other"), WORDS)
    def test_either_works(self, tmp_path, documents, hugging_face, value, other):
        for word in (documents, hugging_face):
            config = MAGRPOConfig(output_dir=str(tmp_path), use_cpu=True, **{word: value})
            assert getattr(config, hugging_face) == value

    @pytest.mark.parametrize(("documents", "hugging_face", "value", "other"), WORDS)
    def test_equal_values_work(self, tmp_path, documents, hugging_face, value, other):
        config = MAGRPOConfig(output_dir=str(tmp_path), use_cpu=True, **{documents: value, hugging_face: value})
        assert getattr(config, hugging_face) == value

    @pytest.mark.parametrize(("documents", "hugging_face", "value", "other"), WORDS)
    def test_different_values_are_an_error_with_both(self, tmp_path, documents, hugging_face, value, other):
        with pytest.raises(ValueError) as caught:
            MAGRPOConfig(output_dir=str(tmp_path), use_cpu=True, **{documents: value, hugging_face: other})
        message = str(caught.value)
        assert all(part in message for part in (documents, hugging_face, str(value), str(other)))

    @pytest.mark.parametrize(("documents", "hugging_face", "value", "other"), WORDS)
    def test_so_they_are_where_one_of_them_is_hugging_faces_default(
        self, tmp_path, documents, hugging_face, value, other
    ):
        default = default_of(INHERITED[hugging_face])
        with pytest.raises(ValueError, match=documents):
            MAGRPOConfig(output_dir=str(tmp_path), use_cpu=True, **{documents: value, hugging_face: default})

    @pytest.mark.parametrize("word", ["reference_kl_coef", "beta"])
    def test_reference_kl_enabled_may_stand_beside_its_coefficient(self, tmp_path, word):
        config = MAGRPOConfig(output_dir=str(tmp_path), use_cpu=True, reference_kl_enabled=True, **{word: 0.3})
        assert config.beta == 0.3

    def test_reference_kl_enabled_false_means_beta_zero(self, tmp_path):
        for options in ({}, {"beta": 0.0}, {"reference_kl_coef": 0.0}):
            config = MAGRPOConfig(output_dir=str(tmp_path), use_cpu=True, reference_kl_enabled=False, **options)
            assert config.beta == 0.0

    @pytest.mark.parametrize("options", [{"beta": 0.1}, {"reference_kl_coef": 0.1}])
    def test_reference_kl_enabled_false_with_a_coefficient_is_an_error(self, tmp_path, options):
        with pytest.raises(ValueError, match="reference_kl_enabled=False"):
            MAGRPOConfig(output_dir=str(tmp_path), use_cpu=True, reference_kl_enabled=False, **options)

    @pytest.mark.parametrize("options", [{}, {"beta": 0.0}, {"reference_kl_coef": 0.0}])
    def test_reference_kl_enabled_without_a_coefficient_is_an_error(self, tmp_path, options):
        with pytest.raises(ValueError, match="reference_kl_enabled=True"):
            MAGRPOConfig(output_dir=str(tmp_path), use_cpu=True, reference_kl_enabled=True, **options)

    @pytest.mark.parametrize("top_k", [None, 0])
    def test_top_k_none_and_zero_are_off(self, tmp_path, top_k):
        assert MAGRPOConfig(output_dir=str(tmp_path), use_cpu=True, top_k=top_k).top_k == 0


class TestGroupSizes:
    """Whatever the group size, the default batch settings fit it."""

    @pytest.mark.parametrize("config_class", [*CONFIGS, *RLHF])
    @pytest.mark.parametrize("accumulation", [1, 2, 3])
    @pytest.mark.parametrize("generations", range(2, 10))
    def test_default_batches_hold_whole_groups(self, tmp_path, config_class, generations, accumulation):
        config = config_class(
            output_dir=str(tmp_path),
            use_cpu=True,
            num_generations=generations,
            gradient_accumulation_steps=accumulation,
            eval_strategy="steps",
            eval_steps=1,
        )
        assert config.generation_batch_size % generations == 0
        assert config.per_device_eval_batch_size % generations == 0
        assert 8 <= config.per_device_train_batch_size < 8 + generations

    @pytest.mark.parametrize("generations", [3, 5])
    def test_they_train_and_evaluate(self, tmp_path, generations):
        seen = []

        def reward(first, second, batch_items):
            seen.append((len(first), batch_items[0]["gold"]))
            return word_reward(first, second)

        trainer = MAGRPOTrainer(
            agents=[lm(0), lm(1)],
            tokenizer=tok(),
            reward_func=reward,
            args=MAGRPOConfig(
                output_dir=str(tmp_path),
                use_cpu=True,
                report_to="none",
                save_strategy="no",
                max_completion_length=4,
                num_train_epochs=1,
                num_generations=generations,
                logging_steps=1,
            ),
            train_dataset=dataset(4),
            eval_dataset=dataset(4),
        )
        trainer.train()
        assert {size for size, _ in seen} == {generations}
        assert {gold for _, gold in seen} == {"w0", "w1", "w2", "w3"}
        assert all(math.isfinite(loss) for loss in logged(trainer, "loss"))
        seen.clear()
        trainer.evaluate()
        assert seen == [(generations, f"w{i}") for i in range(4)]

    @pytest.mark.parametrize(
        ("config_class", "options"),
        [
            (MAREINFORCEConfig, {}),
            (MAGRPOConfig, {"advantage_mode": "raw", "scale_rewards": "none"}),
            (MAGRPOConfig, {"advantage_groups": "role", "scale_rewards": "none"}),
            (MAReMaxConfig, {"remax_baseline": "greedy"}),
            (MAACConfig, {}),
            (IACConfig, {}),
        ],
        ids=["reinforce", "raw", "role", "greedy", "maac", "iac"],
    )
    def test_a_group_of_one_is_enough_where_the_baseline_needs_no_other(self, tmp_path, config_class, options):
        config = config_class(output_dir=str(tmp_path), use_cpu=True, num_generations=1, **options)
        assert config.num_generations == 1 and config.per_device_train_batch_size == 8
        for generations in (0, -2):
            with pytest.raises(ValueError, match=f"num_generations={generations}"):
                config_class(output_dir=str(tmp_path), use_cpu=True, num_generations=generations, **options)

    @pytest.mark.parametrize("config_class", [MAGRPOConfig, MARLOOConfig, MAReMaxConfig])
    @pytest.mark.parametrize("generations", [1, 0, -2])
    def test_a_group_that_is_none_is_an_error_that_names_the_option(self, tmp_path, config_class, generations):
        with pytest.raises(ValueError, match=f"num_generations={generations}"):
            config_class(output_dir=str(tmp_path), use_cpu=True, num_generations=generations)

    def test_a_batch_that_does_not_hold_whole_groups_is_an_error_with_both_numbers(self, tmp_path):
        with pytest.raises(ValueError, match="4.*3"):
            MAGRPOConfig(output_dir=str(tmp_path), use_cpu=True, num_generations=3, per_device_train_batch_size=4)


@pytest.fixture
def build(tmp_path):
    def build(kwargs=None, **options):
        kwargs = {"agents": [lm(0), lm(1)], "train_dataset": dataset(4), "reward_func": word_reward, **(kwargs or {})}
        kwargs.setdefault("tokenizer", tok())
        return MAGRPOTrainer(args=team_args(MAGRPOConfig, tmp_path / "out", **options), **kwargs)

    return build


class TestOptionsOfTheTeam:
    """Options that the team reads itself, each by what it does."""

    def test_log_completions_writes_a_table(self, build, tmp_path):
        trainer = build(log_completions=True, max_steps=2)
        trainer.train()
        files = sorted((tmp_path / "out" / "completions").glob("*.parquet"))
        assert len(files) == 2
        frame = pd.read_parquet(files[0])
        assert len(frame) == 4
        assert {"agent_0/prompt", "agent_1/completion", "agent_1/advantage", "rewards/word_reward"} <= set(
            frame.columns
        )

    def test_without_it_none_is_written(self, build, tmp_path):
        build().train()
        assert not (tmp_path / "out" / "completions").exists()

    @pytest.mark.parametrize(
        ("config_class", "options"),
        [
            (MAACConfig, {"critic_type": "v"}),
            (MAACConfig, {"critic_type": "q"}),
            (IACConfig, {"use_separate_critic": False}),
            (IACConfig, {"use_separate_critic": False, "advantage_level": "token"}),
        ],
        ids=["maac v", "maac q", "iac", "iac tokens"],
    )
    def test_the_table_of_completions_has_the_advantages_that_teach(
        self, tmp_path, monkeypatch, config_class, options
    ):
        """Where each token has an advantage of its own, their mean."""
        trainer = TRAINERS[config_class](
            agents=[lm(0), lm(1)],
            tokenizer=tok(),
            reward_func=word_reward,
            args=team_args(config_class, tmp_path, log_completions=True, **options),
            train_dataset=dataset(4),
            **({"critic_model": lm(5)} if config_class is MAACConfig else {}),
        )
        answers = [[5, 6, 2], [7, 2], [8, 9, 10, 2], [11, 2]]
        stub_rollouts(monkeypatch, trainer, [answers, answers[::-1]])
        batches = record_batches(trainer)
        trainer.train()
        frame = pd.read_parquet(next((tmp_path / "completions").glob("*.parquet")))
        for index, said in enumerate((answers, answers[::-1])):
            expected = batches[0][f"agent_{index}/advantages"].tolist()
            if options.get("advantage_level") == "token":
                expected = [sum(row[: len(ids)]) / len(ids) for row, ids in zip(expected, said, strict=True)]
            assert frame[f"agent_{index}/advantage"].tolist() == pytest.approx(expected, abs=1e-6)
            assert any(expected)

    @pytest.mark.parametrize("shuffle", [True, False])
    def test_shuffle_dataset(self, build, shuffle):
        seen = []

        def reward(first, second, batch_items):
            seen.append(batch_items[0]["gold"])
            return [0.0] * len(first)

        trainer = build(
            {"reward_func": reward, "train_dataset": dataset(8)},
            shuffle_dataset=shuffle,
            max_steps=-1,
            num_train_epochs=1,
            influence_steps=0,
        )
        trainer.train()
        assert (seen == [f"w{i}" for i in range(8)]) is not shuffle and len(set(seen)) == 8

    def test_data_seed_fixes_the_order_of_prompts_alone(self, build):
        orders = []
        for seed, data_seed in ((1, 5), (2, 5), (1, 6)):
            sampler = build({"train_dataset": dataset(20)}, seed=seed, data_seed=data_seed)._get_train_sampler()
            orders.append(list(sampler))
        assert orders[0] == orders[1] != orders[2]

    @pytest.mark.parametrize(
        ("options", "batches"),
        [
            ({}, 4),
            ({"num_iterations": 2}, 2),
            ({"steps_per_generation": 2}, 2),
            ({"generation_batch_size": 8}, 2),
            ({"gradient_accumulation_steps": 2}, 4),
            ({"gradient_accumulation_steps": 2, "steps_per_generation": 1}, 8),
        ],
        ids=lambda value: "-".join(value) or "default" if isinstance(value, dict) else "",
    )
    def test_how_often_is_sampled_for_four_steps(self, build, options, batches):
        trainer = build({"train_dataset": dataset(16)}, max_steps=4, **options)
        recorded = record_batches(trainer)
        trainer.train()
        assert trainer.state.global_step == 4 and len(recorded) == batches

    def test_num_generations_eval(self, build):
        sizes = []

        def reward(first, second):
            sizes.append(len(first))
            return [0.0] * len(first)

        trainer = build({"reward_func": reward, "eval_dataset": dataset(2)}, num_generations_eval=1, influence_steps=0)
        trainer.train()
        trainer.evaluate()
        assert sizes == [2, 2, 1, 1]

    def test_reward_weights_must_be_as_many_as_reward_functions(self, build):
        with pytest.raises(ValueError, match="weights"):
            build({"reward_func": [word_reward, word_reward]}, reward_weights=[1.0])

    def test_sync_ref_model_mixes_every_actor_into_its_reference(self, build):
        trainer = build(beta=0.1, sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=0.25)
        start = [parameters(actor) for actor in trainer.agents]
        trainer.train()
        for agent, old in zip(trainer.agent_trainers, start, strict=True):
            expected = 0.75 * old + 0.25 * parameters(agent.model)
            torch.testing.assert_close(parameters(agent.ref_model), expected, rtol=0, atol=1e-6)
            assert not torch.equal(expected, old)

    def test_sync_ref_model_without_a_reference_is_an_error(self, build):
        """As in TRL: there is nothing to synchronise."""
        with pytest.raises(ValueError, match="sync_ref_model"):
            build(sync_ref_model=True, beta=0.0)

    def test_sync_ref_model_with_an_adapter_is_an_error(self, build):
        """As in TRL: an adapter's reference is no model of its own."""
        from peft import LoraConfig

        adapter = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
        # The first is this package's error; TRL's own, in releases that check it themselves, is the second
        with pytest.raises((ValueError, NotImplementedError), match="sync_ref_model"):
            build({"peft_config": adapter}, sync_ref_model=True, beta=0.1)

    def test_max_grad_norm_holds_for_each_entity(self, build):
        trainer = build(max_grad_norm=1e-3, optim="sgd", learning_rate=1.0, lr_scheduler_type="constant")
        before = [parameters(actor) for actor in trainer.agents]
        trainer.train()
        norms = [(parameters(a) - old).norm().item() for a, old in zip(trainer.agents, before, strict=True)]
        assert norms == pytest.approx([1e-3, 1e-3], rel=1e-2)

    def test_an_adaptive_entropy_coefficient_is_each_actors_own_and_goes_on_after_a_resume(self, build, tmp_path):
        options = dict(
            use_adaptive_entropy=True, entropy_coef=0.1, entropy_coef_delta=0.01, entropy_target=10.0, save_steps=2
        )
        whole = build(max_steps=4, save_strategy="steps", **options)
        whole.train()
        expected = [agent.entropy_coef for agent in whole.agent_trainers]
        assert expected == pytest.approx([0.14, 0.14])
        resumed = build(max_steps=4, save_strategy="no", **options)
        resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
        assert [agent.entropy_coef for agent in resumed.agent_trainers] == pytest.approx(expected)


class TestOptionsOfTheActors:
    """Options that TRL reads: they reach every actor."""

    def test_temperature_reaches_generation_and_scoring(self, build):
        trainer = build(temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.2)
        for agent in trainer.agent_trainers:
            config = agent.generation_config
            assert (config.temperature, config.top_p, config.top_k) == (0.5, 0.9, 5)
            assert (config.min_p, config.repetition_penalty, agent.temperature) == (0.1, 1.2, 0.5)

    def test_model_init_kwargs_and_revisions_reach_models_and_tokenizers(self, build, tmp_path, monkeypatch):
        """A tokenizer of another revision than its model's would give other ids."""
        lm(0).save_pretrained(tmp_path / "model")
        seen = []

        def from_pretrained(source, **kwargs):
            seen.append(kwargs)
            return tok()

        monkeypatch.setattr(loading, "get_tokenizer_config", lambda *args, **kwargs: {})
        monkeypatch.setattr(loading.AutoTokenizer, "from_pretrained", from_pretrained)
        trainer = build(
            {"agents": [str(tmp_path / "model")] * 2, "tokenizer": None},
            trust_remote_code=True,
            model_init_kwargs={"revision": "v1", "dtype": "bfloat16"},
        )
        assert all(actor.dtype == torch.bfloat16 for actor in trainer.agents)
        assert seen[0].get("revision") == "v1" and seen[0].get("trust_remote_code") is True

    def test_every_loss_type_trains_a_team(self, build):
        for loss_type in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"):
            trainer = build(loss_type=loss_type)
            trainer.train()
            assert math.isfinite(logged(trainer, "loss")[0]), loss_type

    def test_stop_strings_reach_generate_with_the_tokenizer_or_are_refused_at_construction(self, build):
        """`generate` cannot find a stop string without a tokenizer."""
        try:
            trainer = build(generation_kwargs={"stop_strings": ["w7"]})
        except ValueError as error:
            assert "stop_strings" in str(error)
            return
        seen = []
        for agent in trainer.agent_trainers:

            def generate(input_ids, **kwargs):
                seen.append(kwargs)
                return torch.cat([input_ids, torch.full((len(input_ids), 2), 5)], dim=1)

            agent.model.generate = generate
        trainer.train()
        assert len(seen) == 2
        assert all(kwargs["generation_config"].stop_strings == ["w7"] for kwargs in seen)
        assert all(kwargs.get("tokenizer") is not None for kwargs in seen)


def refused(tmp_path, config_class, options, *parts):
    """The options are refused in words that name all of `parts`."""
    with pytest.raises(ValueError) as caught:
        config_class(output_dir=str(tmp_path), use_cpu=True, **options)
    message = str(caught.value)
    assert all(part in message for part in parts), message


class TestWhatDoesNotFit:
    """Options that contradict each other, or that could have no effect, are errors that name their values."""

    @pytest.mark.parametrize(
        ("configs", "name", "choices"),
        [
            (CONFIGS, "turn_order", ("simultaneous", "sequential")),
            (CONFIGS, "rollout_mode", ("tree", "chain")),
            (CRITIC_FREE, "advantage_mode", ("raw", "mean", "rloo", "max")),
            (CRITIC_FREE, "advantage_groups", ("turn", "actor", "role")),
            (CRITIC_FREE, "joint_mode", ("aligned", "cross")),
        ],
    )
    def test_another_word_than_the_choices(self, tmp_path, configs, name, choices):
        for config_class in configs:
            refused(tmp_path, config_class, {name: "other"}, f"{name}='other'", *map(repr, choices))

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("num_turns", 0),
            ("num_turns", -1),
            ("discount", -0.1),
            ("discount", 1.1),
            ("discount", math.nan),
            ("influence_steps", -1),
        ],
    )
    @pytest.mark.parametrize("config_class", [MultiAgentConfig, MAGRPOConfig, MAREINFORCEConfig, *CRITICS])
    def test_a_number_out_of_its_range(self, tmp_path, config_class, name, value):
        refused(tmp_path, config_class, {name: value}, f"{name}={value}", "expected")

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("num_turns", 2.0),
            ("num_turns", "2"),
            ("num_turns", True),
            ("num_turns", None),
            ("discount", "0.9"),
            ("discount", True),
            ("discount", None),
            ("influence_steps", 1.5),
            ("influence_steps", True),
            ("early_termination_threshold", "1"),
            ("early_termination_threshold", True),
            ("early_termination_threshold", math.nan),
            ("early_termination_threshold", math.inf),
            ("early_termination_threshold", -math.inf),
        ],
    )
    @pytest.mark.parametrize("config_class", [MultiAgentConfig, MAGRPOConfig, *CRITICS])
    def test_what_is_no_number_of_its_kind(self, tmp_path, config_class, name, value):
        kind = "a whole number" if name in ("num_turns", "influence_steps") else "a number"
        refused(tmp_path, config_class, {name: value}, f"{name}={value!r}", f"expected {kind}")

    def test_the_range_is_in_the_error(self, tmp_path):
        refused(tmp_path, MAGRPOConfig, {"discount": 2}, "discount=2, expected a number from 0 to 1.")
        refused(tmp_path, MAGRPOConfig, {"num_turns": 0}, "num_turns=0, expected a whole number, 1 or more.")

    @pytest.mark.parametrize("threshold", [-5, 0, 0.5, 1e6])
    def test_any_finite_threshold_is_fine(self, tmp_path, threshold):
        config = MAGRPOConfig(output_dir=str(tmp_path), use_cpu=True, early_termination_threshold=threshold)
        assert config.early_termination_threshold == threshold

    @pytest.mark.parametrize("config_class", CRITIC_FREE)
    @pytest.mark.parametrize("scale", ["std", "groups", None, 2])
    def test_another_word_for_what_rewards_are_scaled_by(self, tmp_path, config_class, scale):
        refused(
            tmp_path, config_class, {"scale_rewards": scale}, f"scale_rewards={scale!r}", "'group', 'batch', 'none'"
        )

    @pytest.mark.parametrize("name", ["agent_names", "trainable_agents"])
    @pytest.mark.parametrize("value", ["planner", {"planner": True}, 2, True])
    @pytest.mark.parametrize("config_class", [MAGRPOConfig, *CRITICS])
    def test_one_value_where_each_actor_has_its_own(self, tmp_path, config_class, name, value):
        refused(tmp_path, config_class, {name: value}, f"{name}={value!r}", "a list with one entry for each actor")

    @pytest.mark.parametrize(("name", "value"), [("discount", 0), ("discount", 1), ("influence_steps", 0)])
    def test_the_ends_of_a_range_belong_to_it(self, tmp_path, name, value):
        assert getattr(MAGRPOConfig(output_dir=str(tmp_path), use_cpu=True, **{name: value}), name) == value

    @pytest.mark.parametrize(
        "names",
        [
            ["coder", "coder"],
            ["coder", ""],
            ["a/b", "coder"],
            ["critic", "coder"],
            ["critic_0", "coder"],
            ["turn_1", "coder"],
            ["eval", "coder"],
            ["train_er", "coder"],
            ["rewards", "coder"],
            ["agent_1", "agent_0"],
            ["agent_2", "coder"],
            ["agent_00", "coder"],
            ["coder", 3],
            ["coder", None],
        ],
        ids=lambda names: names[0] if names[0] != "coder" else f"coder_{names[1]}",
    )
    def test_names_that_would_hide_a_metric(self, tmp_path, names):
        refused(tmp_path, MAGRPOConfig, {"agent_names": names}, "agent_names", str(names))

    @pytest.mark.parametrize(
        "names",
        [
            ["critical", "turner"],
            ["planner", "Planner"],
            ["reward", "trainer"],
            ["agent_0", "agent_1"],
            ["agents", "coder"],
        ],
    )
    def test_names_that_only_begin_like_one_are_fine(self, tmp_path, names):
        assert MAGRPOConfig(output_dir=str(tmp_path), use_cpu=True, agent_names=names).agent_names == names

    @pytest.mark.parametrize("config_class", [MAGRPOConfig, *CRITICS])
    def test_sequential_turns_whose_prompts_are_passed_through(self, tmp_path, config_class):
        options = {"turn_order": "sequential", "external_prompt_passthrough": True}
        parts = "turn_order='sequential'", "external_prompt_passthrough=True"
        refused(tmp_path, config_class, {**options, "num_turns": 2}, *parts)
        config_class(output_dir=str(tmp_path), use_cpu=True, **options)  # in one turn a formatter runs

    @pytest.mark.parametrize("config_class", [MultiAgentConfig, MAGRPOConfig])
    def test_several_turns_with_functions_that_are_normalised_one_by_one(self, tmp_path, config_class):
        options = {"num_turns": 2, "multi_objective_aggregation": "normalize_then_sum"}
        refused(tmp_path, config_class, options, "multi_objective_aggregation='normalize_then_sum'", "num_turns=2")

    @pytest.mark.parametrize(
        ("config_class", "options", "parts"),
        [
            (MAREINFORCEConfig, {"scale_rewards": "group"}, ["'group'", "advantage_mode='raw'"]),
            (MAREINFORCEConfig, {"scale_rewards": "batch"}, ["'batch'", "advantage_mode='raw'"]),
            (MAREINFORCEConfig, {"scale_rewards": True}, ["'group'", "advantage_mode='raw'"]),
            (MAGRPOConfig, {"advantage_mode": "raw"}, ["'group'", "advantage_mode='raw'"]),
            (MAGRPOConfig, {"advantage_groups": "role"}, ["'group'", "advantage_groups='role'"]),
            (MARLOOConfig, {"advantage_groups": "role", "scale_rewards": "batch"}, ["'batch'", "='role'"]),
            (MAReMaxConfig, {"remax_baseline": "greedy", "scale_rewards": "group"}, ["remax_baseline='greedy'"]),
            (MAReMaxConfig, {"remax_baseline": "greedy", "scale_rewards": "batch"}, ["remax_baseline='greedy'"]),
        ],
    )
    def test_a_deviation_of_a_group_that_is_no_baseline(self, tmp_path, config_class, options, parts):
        refused(tmp_path, config_class, options, "scale_rewards=", "scale_rewards='none'", *parts)

    @pytest.mark.parametrize("scale", ["none", False])
    def test_without_scaling_it_is_fine(self, tmp_path, scale):
        for options in ({"advantage_mode": "raw"}, {"advantage_groups": "role"}):
            MAGRPOConfig(output_dir=str(tmp_path), use_cpu=True, scale_rewards=scale, **options)

    @pytest.mark.parametrize(
        ("config_class", "options", "got"),
        [
            (MARLOOConfig, {}, "'rloo'"),
            (MAREINFORCEConfig, {}, "'raw'"),
            (MAReMaxConfig, {}, "'max'"),
            (MAGRPOConfig, {"advantage_groups": "actor"}, "'actor'"),
            (MAGRPOConfig, {"joint_mode": "cross"}, "'cross'"),
        ],
    )
    def test_functions_that_are_normalised_one_by_one_with_another_estimator(
        self, tmp_path, config_class, options, got
    ):
        options = {"multi_objective_aggregation": "normalize_then_sum", **options}
        refused(tmp_path, config_class, options, "multi_objective_aggregation='normalize_then_sum'", got)

    @pytest.mark.parametrize(
        ("config_class", "options", "got"),
        [
            (MARLOOConfig, {}, "'rloo'"),
            (MAReMaxConfig, {}, "'max'"),
            (MAREINFORCEConfig, {}, "'raw'"),
            (MAGRPOConfig, {"scale_rewards": "batch"}, "'batch'"),
        ],
    )
    def test_an_actors_own_groups_with_another_estimator(self, tmp_path, config_class, options, got):
        refused(tmp_path, config_class, {"advantage_groups": "actor", **options}, "advantage_groups='actor'", got)

    @pytest.mark.parametrize("decay", [1.5, -0.1, math.nan, math.inf, "0.9", True])
    def test_a_decay_out_of_its_range(self, tmp_path, decay):
        refused(
            tmp_path, MAGRPOConfig, {"role_baseline_decay": decay}, f"role_baseline_decay={decay!r}", "from 0 to 1"
        )

    def test_a_decay_that_forgets_nothing(self, tmp_path):
        refused(tmp_path, MAGRPOConfig, {"role_baseline_decay": 1.0}, "keeps the running mean at 0", "below 1")

    @pytest.mark.parametrize("groups", ["turn", "actor"])
    def test_a_column_of_games_without_role_baselines(self, tmp_path, groups):
        options = {"role_baseline_column": "gold", "advantage_groups": groups}
        refused(tmp_path, MAGRPOConfig, options, "role_baseline_column='gold'", "advantage_groups='role'")

    @pytest.mark.parametrize("value", [0, -1, 1.5, "2", True])
    @pytest.mark.parametrize("joint_mode", ["aligned", "cross"])
    def test_a_number_of_tuples_that_is_none(self, tmp_path, joint_mode, value):
        options = {"cross_samples": value, "joint_mode": joint_mode}
        refused(tmp_path, MAGRPOConfig, options, f"cross_samples={value!r}", "a whole number, 1 or more")

    def test_a_number_of_tuples_that_is_not_read(self, tmp_path):
        refused(tmp_path, MAGRPOConfig, {"cross_samples": 2}, "cross_samples=2", "joint_mode='cross'", "'aligned'")

    @pytest.mark.parametrize(
        ("options", "parts"),
        [
            ({"turn_order": "sequential"}, ["turn_order='sequential'"]),
            ({"advantage_groups": "actor"}, ["advantage_groups='turn'", "'actor'"]),
            ({"advantage_groups": "role", "scale_rewards": "none"}, ["advantage_groups='turn'", "'role'"]),
            ({"num_turns": 2, "rollout_mode": "chain"}, ["rollout_mode='chain'"]),
        ],
        ids=["sequential", "actor", "role", "chain"],
    )
    def test_crossing_where_samples_do_not_belong_together(self, tmp_path, options, parts):
        refused(tmp_path, MAGRPOConfig, {"joint_mode": "cross", **options}, "joint_mode='cross'", *parts)

    @pytest.mark.parametrize(
        ("config_class", "options"),
        [(MAGRPOConfig, {"joint_mode": "cross", "num_turns": 2}), (MAReMaxConfig, {"remax_baseline": "greedy"})],
        ids=["cross", "greedy"],
    )
    def test_groups_that_span_processes_where_each_needs_whole_ones(
        self, tmp_path, monkeypatch, config_class, options
    ):
        monkeypatch.setattr(config_class, "world_size", 2)
        sizes = {"num_generations": 4, "per_device_train_batch_size": 2}
        name, value = next(iter(options.items()))
        refused(
            tmp_path, config_class, {**options, **sizes}, f"{name}={value!r}", "2 joint samples", "num_generations=4"
        )
        config_class(output_dir=str(tmp_path), use_cpu=True, **sizes)
        config_class(output_dir=str(tmp_path), use_cpu=True, **{**options, **sizes, "num_generations": 2})

    def test_a_chain_of_one_turn_may_be_crossed(self, tmp_path):
        MAGRPOConfig(output_dir=str(tmp_path), use_cpu=True, joint_mode="cross", rollout_mode="chain")

    def test_another_word_for_the_baseline_of_remax(self, tmp_path):
        refused(tmp_path, MAReMaxConfig, {"remax_baseline": "mean"}, "remax_baseline='mean'", "'max'", "'greedy'")

    @pytest.mark.parametrize(
        ("options", "got"),
        [
            ({"advantage_mode": "mean"}, "'mean'"),
            ({"advantage_mode": "raw"}, "'raw'"),
            ({"advantage_groups": "role"}, "'role'"),
            ({"advantage_groups": "actor", "advantage_mode": "mean"}, "'actor'"),
        ],
    )
    def test_a_greedy_baseline_beside_another(self, tmp_path, options, got):
        refused(tmp_path, MAReMaxConfig, {"remax_baseline": "greedy", **options}, "remax_baseline='greedy'", got)


TRAINERS = {
    MAGRPOConfig: MAGRPOTrainer,
    MAREINFORCEConfig: MAREINFORCETrainer,
    MARLOOConfig: MARLOOTrainer,
    MAReMaxConfig: MAReMaxTrainer,
    MAACConfig: MAACTrainer,
    IACConfig: IACTrainer,
}
# One of each family: what the team does for all of them
EACH_FAMILY = pytest.mark.parametrize("config_class", [MAGRPOConfig, *CRITICS])


def repeat(prompt, agent_completions, num_agents):
    """An environment that asks the same again."""
    return [prompt] * num_agents


def by_turn(*values):
    """A reward that depends on the turn alone."""

    def turn_reward(first, second, turn):
        return [values[turn - 1]] * len(first)

    return turn_reward


class TestOwnOptions:
    """Each option of the configs' own by what it does, in a generation batch of two prompts with two samples each."""

    @pytest.fixture
    def build(self, tmp_path):
        def build(config_class=MAGRPOConfig, kwargs=None, **options):
            kwargs = {"agents": [lm(0), lm(1)], "train_dataset": dataset(2), **(kwargs or {})}
            kwargs = {"tokenizer": tok(), "reward_func": word_reward, **kwargs}
            if config_class in CRITICS:
                kwargs.setdefault("critic_model", lm(5))
            if options.get("num_turns", 1) > 1:
                kwargs.setdefault("external_transition", repeat)
            args = team_args(config_class, tmp_path / "out", shuffle_dataset=False, **options)
            return TRAINERS[config_class](args=args, **kwargs)

        return build

    @staticmethod
    def advantages(trainer):
        batches = record_batches(trainer)
        trainer.train()
        return batches[0]["agent_0/advantages"].tolist()

    @staticmethod
    def one_prompt(values, **options):
        """One prompt with these rewards."""
        kwargs = {"train_dataset": dataset(1), "reward_func": lambda first, second: list(values)}
        size = len(values)
        return {"kwargs": kwargs, "num_generations": size, "per_device_train_batch_size": size, **options}

    @EACH_FAMILY
    def test_num_agents(self, build, config_class):
        trainer = build(config_class, kwargs={"agents": None, "agent_model": lm(0)}, num_agents=2)
        assert len(trainer.agents) == 2

    @EACH_FAMILY
    def test_agent_names(self, build, config_class, tmp_path):
        trainer = build(config_class, agent_names=["planner", "coder"], log_completions=True)
        trainer.train()
        entry = trainer.state.log_history[0]
        assert {"planner/grad_norm", "coder/completions/mean_length"} <= set(entry)
        assert not any(name.startswith("agent_") for name in entry)
        frame = pd.read_parquet(next((tmp_path / "out" / "completions").glob("*.parquet")))
        assert {"planner/prompt", "coder/completion"} <= set(frame.columns)
        trainer.save_model()
        assert (tmp_path / "out" / "agent_1" / "config.json").is_file()
        with pytest.raises(ValueError, match="coder: .*NoneType"):
            build(
                config_class,
                kwargs={"formatters": [lambda row: "w1", lambda row: None]},
                agent_names=["planner", "coder"],
            )

    @pytest.mark.parametrize("names", [["planner"], ["a", "b", "c"]])
    def test_agent_names_of_another_number(self, build, names):
        with pytest.raises(ValueError, match=f"agent_names.* {len(names)} entries.*expected 2"):
            build(agent_names=names)

    @EACH_FAMILY
    def test_trainable_agents(self, build, config_class):
        trainer = build(config_class, trainable_agents=[False, True])
        before = [parameters(actor) for actor in trainer.agents]
        trainer.train()
        moved = [not torch.equal(parameters(a), old) for a, old in zip(trainer.agents, before, strict=True)]
        assert moved == [False, True]

    @pytest.mark.parametrize("trainable", [[True], [True] * 3, [False, False]])
    def test_trainable_agents_that_do_not_fit(self, build, trainable):
        with pytest.raises(ValueError, match="trainable"):
            build(trainable_agents=trainable)

    @EACH_FAMILY
    def test_num_turns(self, build, config_class):
        seen = []

        def reward(first, second, turn):
            seen.append(turn)
            return word_reward(first, second)

        trainer = build(config_class, kwargs={"reward_func": reward}, num_turns=3)
        trainer.train()
        assert sorted(set(seen)) == [1, 2, 3]
        assert logged(trainer, "turn_3/reward_mean") and not logged(trainer, "turn_4/reward_mean")

    @EACH_FAMILY
    def test_num_turns_without_an_environment(self, build, config_class):
        with pytest.raises(ValueError, match="num_turns=2 needs `external_transition=`"):
            build(config_class, kwargs={"external_transition": None}, num_turns=2)

    @EACH_FAMILY
    def test_turn_order(self, build, config_class):
        heard = []

        def hearing(row, earlier_completions=None):
            heard.append(earlier_completions)
            return row["prompt"]

        trainer = build(config_class, kwargs={"formatters": hearing}, turn_order="sequential")
        heard.clear()  # what was tried at construction
        trainer.train()
        assert [len(texts) for texts in heard] == [0, 0, 1, 1, 1, 1]
        with pytest.raises(ValueError, match="agent_0 takes `earlier_completions`.*turn_order='simultaneous'"):
            build(config_class, kwargs={"formatters": hearing})

    def test_turn_order_sequential_where_nobody_hears(self, build):
        for formatters in (None, [lambda row, earlier_completions=None: "w1", lambda row: "w1"]):
            with pytest.raises(ValueError, match="turn_order='sequential'.*earlier_completions"):
                build(kwargs={"formatters": formatters}, turn_order="sequential")

    @EACH_FAMILY
    @pytest.mark.parametrize(("mode", "env_steps"), [("tree", 4 + 8 + 16), ("chain", 4 + 4 + 4)])
    def test_rollout_mode(self, build, config_class, mode, env_steps):
        trainer = build(config_class, num_turns=3, rollout_mode=mode)
        trainer.train()
        assert logged(trainer, "env_step")[0] == env_steps

    @EACH_FAMILY
    @pytest.mark.parametrize(("discount", "expected"), [(1.0, 1 + 4 + 16), (0.5, 1 + 2 + 4), (0.0, 1)])
    def test_discount(self, build, config_class, discount, expected):
        trainer = build(config_class, kwargs={"reward_func": by_turn(1.0, 4.0, 16.0)}, num_turns=3, discount=discount)
        trainer.train()
        assert logged(trainer, "turn_1/expected_return") == [expected]
        assert logged(trainer, "turn_2/expected_return") == [4 + discount * 16]
        assert [logged(trainer, f"turn_{k}/reward_mean") for k in (1, 2, 3)] == [[1.0], [4.0], [16.0]]

    @EACH_FAMILY
    @pytest.mark.parametrize(("threshold", "env_steps"), [(None, 12), (3.0, 12), (2.9, 8), (1.0, 8), (0.9, 4)])
    def test_early_termination_threshold(self, build, config_class, threshold, env_steps):
        trainer = build(
            config_class,
            kwargs={"reward_func": by_turn(1.0, 3.0, 0.0)},
            num_turns=3,
            rollout_mode="chain",
            early_termination_threshold=threshold,
        )
        trainer.train()
        assert logged(trainer, "env_step")[0] == env_steps

    @EACH_FAMILY
    @pytest.mark.parametrize("passthrough", [True, False])
    def test_external_prompt_passthrough(self, build, config_class, passthrough, tmp_path):
        trainer = build(
            config_class,
            kwargs={
                "formatters": lambda row: f"{row['prompt']} w9",
                "external_transition": lambda prompt, agent_completions, num_agents: ["w5", "w6"],
            },
            num_turns=2,
            external_prompt_passthrough=passthrough,
            log_completions=True,
        )
        trainer.train()
        frame = pd.read_parquet(next((tmp_path / "out" / "completions").glob("*.parquet")))
        second = frame[frame["turn"] == 2]
        assert set(second["agent_0/prompt"]) == {"w5" if passthrough else "w5 w9"}
        assert set(second["agent_1/prompt"]) == {"w6" if passthrough else "w6 w9"}
        assert all(frame[frame["turn"] == 1]["agent_0/prompt"].str.endswith(" w9"))

    @EACH_FAMILY
    @pytest.mark.parametrize(("steps", "measured"), [(0, 0), (50, 1), (3, 2), (1, 4)])
    def test_influence_steps(self, build, config_class, steps, measured):
        """Both actors are seen to act in the first batch, so that only every k-th one is measured."""
        calls = []

        def reward(first, second):
            calls.append(1)
            return word_reward(first, second)

        trainer = build(config_class, kwargs={"reward_func": reward}, influence_steps=steps, max_steps=4)
        trainer.train()
        assert len(calls) == 4 * 2 + measured * 2 * 2  # one for each prompt; measured, one for each prompt and actor
        for name in ("agent_0", "agent_1"):
            shares = logged(trainer, f"{name}/reward_variance_share")
            assert len(shares) == measured and all(share > 0 for share in shares)

    @EACH_FAMILY
    @pytest.mark.parametrize("batched", [True, False])
    def test_batched_rewards(self, build, config_class, batched):
        sizes = []

        def reward(first, second):
            sizes.append(len(first))
            return [0.0] * len(first)

        build(config_class, kwargs={"reward_func": reward}, batched_rewards=batched, influence_steps=0).train()
        assert sizes == ([4] if batched else [2, 2])

    @pytest.mark.parametrize(
        ("mode", "expected"),
        [
            ("raw", [1, 2, 3, 6]),
            ("mean", [-2, -1, 0, 3]),
            ("rloo", [-8 / 3, -4 / 3, 0, 4]),
            ("max", [-5, -4, -3, 0]),
        ],
    )
    def test_advantage_mode(self, build, mode, expected):
        options = self.one_prompt([1.0, 2.0, 3.0, 6.0], scale_rewards="none")
        own = {"raw": MAREINFORCEConfig, "mean": MAGRPOConfig, "rloo": MARLOOConfig, "max": MAReMaxConfig}[mode]
        assert own.advantage_mode == mode
        for config_class in CRITIC_FREE:
            result = self.advantages(build(config_class, advantage_mode=mode, **options))
            assert result == pytest.approx(expected, abs=1e-5)
        assert self.advantages(build(own, **options)) == pytest.approx(expected, abs=1e-5)

    @pytest.mark.parametrize(
        ("groups", "expected"),
        [
            # 1 and 3, then 4 and 4 in both contexts of the second turn: returns 5, 7; 4, 4, 4, 4
            ("turn", [-1, 1, 0, 0, 0, 0]),
            # against 1/3 of each of 5, 4, 4 and of 7, 4, 4, each trajectory once: the mean is 14/3
            ("actor", [1 / 3, 7 / 3, -2 / 3, -2 / 3, -2 / 3, -2 / 3]),
            # in order, with the decay 0.5: 5 - 0, 7 - 2.5; in the second turn 4 - 0, 4 - 2, 4 - 3, 4 - 3.5
            ("role", [5, 4.5, 4, 2, 1, 0.5]),
        ],
    )
    def test_advantage_groups(self, build, groups, expected):
        def reward(first, second, turn):
            return [1.0, 3.0] if turn == 1 else [4.0] * len(first)

        trainer = build(
            kwargs={"train_dataset": dataset(1), "reward_func": reward},
            per_device_train_batch_size=2,
            num_turns=2,
            advantage_groups=groups,
            role_baseline_decay=0.5,
            scale_rewards="none",
        )
        assert self.advantages(trainer) == pytest.approx(expected, abs=1e-5)

    def test_role_baseline_decay(self, build):
        options = self.one_prompt([1.0, 2.0], scale_rewards="none", advantage_groups="role")
        assert self.advantages(build(role_baseline_decay=0.0, **options)) == [1.0, 1.0]
        assert self.advantages(build(role_baseline_decay=0.75, **options)) == [1.0, 1.75]
        assert self.advantages(build(**options)) == pytest.approx([1.0, 1.95])

    def test_role_baseline_column(self, build):
        options = dict(
            kwargs={"reward_func": lambda first, second: [1.0, 1.0]},
            scale_rewards="none",
            advantage_groups="role",
            role_baseline_decay=0.5,
        )
        assert self.advantages(build(**options)) == [1.0, 0.5, 0.25, 0.125]
        assert self.advantages(build(role_baseline_column="gold", **options)) == [1.0, 0.5, 1.0, 0.5]

    def test_role_baseline_column_that_the_dataset_lacks(self, build):
        """In the tasks of training or of evaluation, before anything is trained."""
        options = dict(scale_rewards="none", advantage_groups="role", role_baseline_column="game")
        with pytest.raises(ValueError, match="role_baseline_column='game'.*'gold'"):
            build(**options)
        games = dataset(2).add_column("game", ["chess", "go"])
        build(kwargs={"train_dataset": games}, **options)
        with pytest.raises(ValueError, match="role_baseline_column='game'.*'gold'"):
            build(kwargs={"train_dataset": games, "eval_dataset": {"games": games, "others": dataset(2)}}, **options)

    def test_joint_mode(self, build):
        trainer = build(joint_mode="cross")
        trainer.train()
        assert logged(trainer, "env_step")[0] == 2 * 2**2

    def test_cross_samples(self, build):
        options = dict(kwargs={"train_dataset": dataset(1)}, num_generations=4)
        env_steps = {}
        for count in (None, 4, 1):
            trainer = build(joint_mode="cross", cross_samples=count, **options)
            trainer.train()
            env_steps[count] = logged(trainer, "env_step")[0]
        assert env_steps[None] == env_steps[4] == 16
        assert env_steps[1] == 4 + 4 - 1  # one row and one column of the table, which meet in one place

    def test_remax_baseline(self, build, monkeypatch):
        calls = []

        def reward(first, second):
            calls.append(len(first))
            return [2.5] if len(first) == 1 else [1.0, 4.0]

        trainer = build(MAReMaxConfig, kwargs={"reward_func": reward}, remax_baseline="greedy", influence_steps=0)
        assert self.advantages(trainer) == [-1.5, 1.5, -1.5, 1.5]
        assert calls == [2, 2, 1, 1] and logged(trainer, "env_step")[0] == 6
        calls.clear()
        trainer = build(MAReMaxConfig, kwargs={"reward_func": reward}, influence_steps=0)
        assert self.advantages(trainer) == [-3.0, 0.0, -3.0, 0.0]
        assert calls == [2, 2] and logged(trainer, "env_step")[0] == 4

    @pytest.mark.parametrize("config_class", [MAGRPOConfig, MARLOOConfig, MAReMaxConfig])
    def test_scale_rewards_divides_and_does_not_centre_again(self, build, config_class):
        """The deviation of 1, 2, 6 is the root of 7."""
        unscaled = {
            MAGRPOConfig: [-2, -1, 3],
            MARLOOConfig: [-3, -1.5, 4.5],
            MAReMaxConfig: [-5, -4, 0],
        }[config_class]
        for scale in ("group", "batch"):
            trainer = build(config_class, **self.one_prompt([1.0, 2.0, 6.0], scale_rewards=scale))
            expected = [value / (math.sqrt(7) + 1e-4) for value in unscaled]
            assert self.advantages(trainer) == pytest.approx(expected, abs=1e-5)
        trainer = build(config_class, **self.one_prompt([1.0, 2.0, 6.0], scale_rewards="none"))
        assert self.advantages(trainer) == pytest.approx(unscaled, abs=1e-5)
