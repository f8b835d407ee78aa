# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Every option that the configs inherit: who honours it, or the reason why it is refused."""

import dataclasses
import math

import pandas as pd
import pytest
import torch
from tiny import dataset, lm, logged, parameters, record_batches, team_args, tok, word_reward
from transformers import HfArgumentParser
from trl import GRPOConfig

from trl_multiagent import MAACConfig, MAACTrainer, MAGRPOConfig, MAGRPOTrainer, MultiAgentConfig
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
    "ignore_data_skip": TRAINER,
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
    "scale_rewards": ACTORS,
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
CONFIGS = [MAGRPOConfig, MAACConfig]


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

    @pytest.mark.parametrize("config_class", CONFIGS)
    @pytest.mark.parametrize("name", sorted(set(REFUSED_OPTIONS) & set(INHERITED)))
    def test_a_refused_one_raises_with_its_name_and_the_reason(self, tmp_path, config_class, name):
        value = another_value(default_of(INHERITED[name]))
        with pytest.raises(ValueError) as caught:
            config_class(output_dir=str(tmp_path), use_cpu=True, **{name: value})
        message = str(caught.value)
        assert name in message and repr(value) in message and REFUSED_OPTIONS[name] in message
        assert config_class.__name__ in message

    @pytest.mark.parametrize("name", ["scale_rewards", "multi_objective_aggregation"])
    def test_a_critic_refuses_what_compares_rewards_in_a_group(self, tmp_path, name):
        value = {"scale_rewards": "none", "multi_objective_aggregation": "normalize_then_sum"}[name]
        with pytest.raises(ValueError, match=f"{name}.*critic"):
            MAACConfig(output_dir=str(tmp_path), use_cpu=True, **{name: value})
        MAGRPOConfig(output_dir=str(tmp_path), use_cpu=True, **{name: value})

    @pytest.mark.parametrize("config_class", CONFIGS)
    def test_defaults_may_be_spelled_out(self, tmp_path, config_class):
        values = {name: default_of(INHERITED[name]) for name in REFUSED_OPTIONS if name in INHERITED}
        config_class(output_dir=str(tmp_path), use_cpu=True, **values)

    def test_auto_find_batch_size_is_refused_by_trl(self, tmp_path):
        with pytest.raises(ValueError, match="auto_find_batch_size"):
            MAGRPOConfig(output_dir=str(tmp_path), use_cpu=True, auto_find_batch_size=True)

    @pytest.mark.parametrize("config_class", CONFIGS)
    def test_every_own_option_has_help(self, config_class):
        for field in dataclasses.fields(config_class):
            if field.name not in INHERITED or INHERITED[field.name] is not field:
                assert field.metadata.get("help"), field.name

    @pytest.mark.parametrize("config_class", CONFIGS)
    def test_a_command_line_works(self, tmp_path, config_class):
        words = ["--output_dir", str(tmp_path), "--use_cpu", "--agent_learning_rate", "3e-5", "--num_generations", "3"]
        (config,) = HfArgumentParser(config_class).parse_args_into_dataclasses(words)
        assert config.learning_rate == 3e-5 and config.num_generations == 3


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

    @pytest.mark.parametrize("config_class", CONFIGS)
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

    @pytest.mark.parametrize("config_class", CONFIGS)
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

    def test_learning_rates_are_each_entitys_own(self, tmp_path):
        trainer = MAACTrainer(
            agents=[lm(0), lm(1)],
            critic_model=lm(5),
            tokenizer=tok(),
            reward_func=word_reward,
            args=team_args(
                MAACConfig, tmp_path, learning_rate=0.0, critic_learning_rate=1e-2, lr_scheduler_type="constant"
            ),
            train_dataset=dataset(4),
        )
        actors, critic = [parameters(actor) for actor in trainer.agents], parameters(trainer.critics[0])
        trainer.train()
        assert all(torch.equal(parameters(a), old) for a, old in zip(trainer.agents, actors, strict=True))
        assert not torch.equal(parameters(trainer.critics[0]), critic)

    def test_log_completions_writes_a_table(self, build, tmp_path):
        trainer = build(log_completions=True, max_steps=2)
        trainer.train()
        files = sorted((tmp_path / "out" / "completions").glob("*.parquet"))
        assert len(files) == 2
        frame = pd.read_parquet(files[0])
        assert len(frame) == 4
        assert {"agent_0/prompt", "agent_1/completion", "agent_1/advantage", "word_reward"} <= set(frame.columns)

    def test_without_it_none_is_written(self, build, tmp_path):
        build().train()
        assert not (tmp_path / "out" / "completions").exists()

    @pytest.mark.parametrize("critic_type", ["v", "q"])
    def test_the_table_of_completions_has_the_advantages_that_teach(self, tmp_path, critic_type):
        trainer = MAACTrainer(
            agents=[lm(0), lm(1)],
            critic_model=lm(5),
            tokenizer=tok(),
            reward_func=word_reward,
            args=team_args(MAACConfig, tmp_path, critic_type=critic_type, log_completions=True),
            train_dataset=dataset(4),
        )
        batches = record_batches(trainer)
        trainer.train()
        frame = pd.read_parquet(next((tmp_path / "completions").glob("*.parquet")))
        for index in range(2):
            expected = batches[0][f"agent_{index}/advantages"].tolist()
            assert frame[f"agent_{index}/advantage"].tolist() == pytest.approx(expected, abs=1e-6)

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

        trainer = build({"reward_func": reward, "eval_dataset": dataset(2)}, num_generations_eval=1)
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


@pytest.mark.parametrize("config_class", [*CONFIGS, MultiAgentConfig])
def test_num_turns_other_than_one_is_an_error(tmp_path, config_class):
    with pytest.raises(ValueError, match="num_turns=2"):
        config_class(output_dir=str(tmp_path), use_cpu=True, num_turns=2)
