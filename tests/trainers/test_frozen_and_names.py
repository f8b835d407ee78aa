# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Frozen members, names of actors, turns in which actors hear each other, and rewards of their own."""

import pandas as pd
import pytest
import torch
from peft import LoraConfig
from tiny import (
    RecordGradients,
    dataset,
    lm,
    logged,
    parameters,
    record_batches,
    stub_rollouts,
    team_args,
    tok,
    weights_hash,
    word_reward,
)
from transformers import AutoModelForCausalLM, TrainerCallback

from trl_multiagent import MAACConfig, MAACTrainer, MAGRPOConfig, MAGRPOTrainer


NAMES = ["planner", "coder"]


@pytest.fixture
def build(tmp_path):
    """A team of two actors; options of the config by name, arguments of the trainer in `kwargs`."""

    def build(reward_func=word_reward, kwargs=None, **options):
        kwargs = {"agents": [lm(0), lm(1)], "tokenizer": tok(), "train_dataset": dataset(4), **(kwargs or {})}
        return MAGRPOTrainer(reward_func=reward_func, args=team_args(MAGRPOConfig, tmp_path, **options), **kwargs)

    return build


def number(text):
    """The sum of the words' numbers."""
    return sum(int(word[1:]) for word in text.split() if word.startswith("w"))


def listen(trainer):
    """Lists that will hold what each actor was asked and answered, in order."""
    heard = [[] for _ in trainer.agent_trainers]
    for agent, rows in zip(trainer.agent_trainers, heard, strict=True):

        def sample(prompts, num_kept=None, greedy=False, rows=rows, original=agent.sample):
            texts = original(prompts, num_kept=num_kept, greedy=greedy)
            rows += zip(prompts, texts, strict=False)
            return texts

        agent.sample = sample
    return heard


def tell_all(prompt, agent_completions, num_agents, turn):
    return [f"{prompt} w{turn} {' '.join(agent_completions)}"] * num_agents


# Frozen members


class LastGradients(TrainerCallback):
    """Keeps which parameters of each actor have a gradient, right before each step."""

    def __init__(self):
        self.with_gradient = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.with_gradient.append([sum(p.grad is not None for p in agent.parameters()) for agent in model.agents])


class TestFrozen:
    @pytest.mark.parametrize("num_turns", [1, 2])
    def test_it_does_not_move_and_costs_neither_gradient_nor_state_nor_reference(self, num_turns, build):
        gradients = LastGradients()
        trainer = build(
            trainable_agents=[True, False],
            beta=0.1,
            weight_decay=0.1,
            max_steps=2,
            num_turns=num_turns,
            kwargs={"callbacks": [gradients], "external_transition": tell_all},
        )
        before = [weights_hash(agent) for agent in trainer.agents]
        trainer.train()
        assert weights_hash(trainer.agents[1]) == before[1]
        assert weights_hash(trainer.agents[0]) != before[0]
        assert not any(p.requires_grad for p in trainer.agents[1].parameters())
        assert len(gradients.with_gradient) == 2
        assert all(learning > 0 and frozen == 0 for learning, frozen in gradients.with_gradient)
        frozen = {id(p) for p in trainer.agents[1].parameters()}
        assert not any(id(p) in frozen for group in trainer.optimizer.param_groups for p in group["params"])
        assert trainer.optimizer.state and not any(id(p) in frozen for p in trainer.optimizer.state)
        assert trainer.agent_trainers[0].ref_model is not None
        assert trainer.agent_trainers[1].ref_model is None

    def test_no_norm_of_its_gradient_is_logged(self, build):
        trainer = build(trainable_agents=[True, False], agent_names=NAMES)
        trainer.train()
        entry = trainer.state.log_history[0]
        assert entry["planner/grad_norm"] > 0 and "coder/grad_norm" not in entry

    def test_it_samples_and_is_heard_by_the_reward(self, build):
        seen = []

        def reward(first, second):
            seen.extend(zip(first, second, strict=True))
            return [float(number(a) + number(b)) for a, b in zip(first, second, strict=True)]

        trainer = build(reward, trainable_agents=[True, False], influence_steps=0)
        heard = listen(trainer)
        trainer.train()
        texts = [[text for _, text in rows] for rows in heard]
        assert len(texts[1]) == 4 and seen == list(zip(*texts, strict=True))
        entry = trainer.state.log_history[0]
        assert entry["agent_1/completions/mean_length"] > 0
        assert "agent_1/grad_norm" not in entry or entry["agent_1/grad_norm"] == 0.0
        assert "agent_1/kl" not in entry

    @pytest.mark.parametrize("frozen", [0, 1])
    def test_the_other_one_gets_the_gradient_that_it_has_beside_a_learning_one(self, frozen, build, monkeypatch):
        """What an actor learns in a step depends on what the others said, and not on whether they learn."""
        steps = []
        for trainable in ([True, True], [index != frozen for index in range(2)]):
            recorder = RecordGradients()
            trainer = build(trainable_agents=trainable, kwargs={"callbacks": [recorder]}, beta=0.1)
            stub_rollouts(monkeypatch, trainer, [[[5, 6, 2], [7]], [[8, 9], [10, 11, 12, 2]]])
            trainer.train()
            steps.append(recorder.steps[0])
        learning = f"agent_{1 - frozen}"
        assert torch.equal(steps[0][learning], steps[1][learning])
        assert steps[1][learning].any() and not steps[1][f"agent_{frozen}"].any()

    def test_a_model_without_trainable_parameters_is_frozen_by_default(self, build):
        agents = [lm(0), lm(1)]
        agents[0].requires_grad_(False)
        trainer = build(kwargs={"agents": agents})
        before = weights_hash(trainer.agents[0])
        assert trainer.trainable == [False, True]
        trainer.train()
        assert weights_hash(trainer.agents[0]) == before

    def test_by_default_all_learn(self, build):
        assert build().trainable == [True, True]

    def test_both_are_exported(self, build, tmp_path):
        trainer = build(trainable_agents=[True, False], agent_names=NAMES)
        trainer.train()
        trainer.save_model(str(tmp_path / "export"))
        for index, agent in enumerate(trainer.agents):
            loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export" / f"agent_{index}")
            assert torch.equal(parameters(loaded), parameters(agent))
        assert not (tmp_path / "export" / "coder").exists()

    def test_a_frozen_one_resumes_frozen(self, build, tmp_path):
        """B03: the optimizer's state of the other one is found again."""
        options = {"trainable_agents": [True, False], "save_strategy": "steps", "save_steps": 1}
        whole = build(**options, max_steps=2)
        whole.train()
        resumed = build(**options, max_steps=2)
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
        for got, expected in zip(resumed.agents, whole.agents, strict=True):
            assert torch.equal(parameters(got), parameters(expected))

    def test_beside_a_critic(self, tmp_path):
        trainer = MAACTrainer(
            agents=[lm(0), lm(1)],
            tokenizer=tok(),
            critic_model=lm(5),
            reward_func=word_reward,
            args=team_args(MAACConfig, tmp_path, trainable_agents=[False, True]),
            train_dataset=dataset(4),
        )
        before = [parameters(module) for _, module in trainer.model.entities()]
        trainer.train()
        after = [parameters(module) for _, module in trainer.model.entities()]
        moved = [not torch.equal(old, new) for old, new in zip(before, after, strict=True)]
        assert moved == [False, True, True]

    def test_it_has_no_advantage_in_the_table_of_completions(self, build, tmp_path):
        trainer = build(trainable_agents=[True, False], log_completions=True)
        trainer.train()
        columns = set(completions_table(tmp_path))
        assert "agent_0/advantage" in columns and "agent_1/advantage" not in columns
        assert "agent_1/completion" in columns

    @pytest.mark.parametrize(
        ("trainable", "message"),
        [
            ([True], r"`trainable_agents` has 1 entries, expected 2"),
            ([True, True, False], r"`trainable_agents` has 3 entries, expected 2"),
            ([False, False], r"No parameter of the team is trainable"),
        ],
    )
    def test_lists_that_do_not_fit_are_errors(self, trainable, message, build):
        with pytest.raises(ValueError, match=message):
            build(trainable_agents=trainable)

    def test_an_adapter_for_a_frozen_one_is_an_error_that_names_it(self, build):
        with pytest.raises(ValueError, match=r"coder is frozen, but it gets a `peft_config`"):
            build(
                trainable_agents=[True, False],
                agent_names=NAMES,
                kwargs={"peft_config": LoraConfig(task_type="CAUSAL_LM")},
            )

    def test_an_adapter_for_the_other_one_alone_is_fine(self, build):
        config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
        trainer = build(trainable_agents=[True, False], kwargs={"peft_config": [config, None]})
        before = [weights_hash(agent) for agent in trainer.agents]
        trainer.train()
        assert [weights_hash(agent) != old for agent, old in zip(trainer.agents, before, strict=True)] == [True, False]

    def test_one_that_cannot_learn_is_an_error_that_names_it(self, build):
        agents = [lm(0), lm(1)]
        agents[1].requires_grad_(False)
        with pytest.raises(ValueError, match=r"coder learns, but none of its parameters requires a gradient"):
            build(trainable_agents=[True, True], agent_names=NAMES, kwargs={"agents": agents})


# Names


def completions_table(tmp_path):
    return pd.read_parquet(next(tmp_path.rglob("completions_00001.parquet")))


class TestNames:
    def test_metrics_carry_them(self, build):
        trainer = build(lambda a, b: [[1.0 * number(x) for x in a], [2.0 * number(x) for x in b]], agent_names=NAMES)
        trainer.train()
        entry = trainer.state.log_history[0]
        for name in NAMES:
            for metric in ("grad_norm", "completions/mean_length", "entropy", "reward", "advantage_second_moment"):
                assert f"{name}/{metric}" in entry
        assert not any(metric.startswith("agent_") for metric in entry)

    def test_the_table_of_completions_carries_them(self, build, tmp_path):
        trainer = build(
            lambda a, b: [[1.0 * number(x) for x in a], [2.0 * number(x) for x in b]],
            agent_names=NAMES,
            log_completions=True,
        )
        heard = listen(trainer)
        trainer.train()
        frame = completions_table(tmp_path)
        columns = {f"{name}/{column}" for name in NAMES for column in ("prompt", "completion", "advantage")}
        rewards = {f"{name}/rewards/reward_func" for name in NAMES}
        assert set(frame) == columns | rewards | {"step", "turn"}
        for name, rows in zip(NAMES, heard, strict=True):
            assert list(zip(frame[f"{name}/prompt"], frame[f"{name}/completion"], strict=True)) == rows
        for factor, (name, rows) in enumerate(zip(NAMES, heard, strict=True), start=1):
            assert frame[f"{name}/rewards/reward_func"].tolist() == [float(factor * number(text)) for _, text in rows]

    @pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
    def test_a_reward_function_may_be_called_as_a_column_of_the_table(self, own, build, tmp_path):
        def step(first, second):
            values = [float(number(text)) for text in first]
            return [values, [-value for value in values]] if own else values

        def turn(first, second):
            return [float(len(text)) for text in second]

        trainer = build([step, turn], agent_names=NAMES, log_completions=True)
        heard = listen(trainer)
        trainer.train()
        frame = completions_table(tmp_path)
        assert frame["step"].tolist() == frame["turn"].tolist() == [1] * 4
        prefixes = {"planner/": 1, "coder/": -1} if own else {"": 1}
        assert {column for column in frame if "rewards/" in column} == {
            f"{prefix}rewards/{function}" for prefix in prefixes for function in ("step", "turn")
        }
        for prefix, sign in prefixes.items():
            assert frame[f"{prefix}rewards/step"].tolist() == [sign * float(number(text)) for _, text in heard[0]]
            assert frame[f"{prefix}rewards/turn"].tolist() == [float(len(text)) for _, text in heard[1]]

    def test_an_error_of_a_formatter_carries_the_name(self, build):
        with pytest.raises(ValueError, match=r"coder: the prompt is a int \('7'\)"):
            build(agent_names=NAMES, kwargs={"formatters": [lambda row: row["prompt"], lambda row: 7]})

    def test_an_error_of_the_environment_carries_the_name(self, build):
        trainer = build(
            agent_names=NAMES,
            num_turns=2,
            kwargs={"external_transition": lambda prompt, agent_completions, num_agents: ["w1", None]},
        )
        with pytest.raises(ValueError, match=r"for coder: the prompt is a NoneType"):
            trainer.train()

    def test_directories_do_not(self, build, tmp_path):
        trainer = build(agent_names=NAMES, save_strategy="steps", save_steps=1)
        trainer.train()
        for parent in (tmp_path / "checkpoint-1",):
            assert {"agent_0", "agent_1"} <= {path.name for path in parent.iterdir()}
            assert not {"planner", "coder"} & {path.name for path in parent.iterdir()}

    def test_they_do_not_change_what_is_learned(self, build):
        weights = []
        for names in (None, NAMES):
            trainer = build(agent_names=names)
            trainer.train()
            weights.append([weights_hash(agent) for agent in trainer.agents])
        assert weights[0] == weights[1]

    @pytest.mark.parametrize("names", [["planner"], ["a", "b", "c"], []])
    def test_a_wrong_number_of_them_is_an_error(self, names, build):
        with pytest.raises(ValueError, match=rf"`agent_names` has {len(names)} entries .*expected 2"):
            build(agent_names=names)

    @pytest.mark.parametrize(
        "names",
        [["a", "a"], ["a", "b/c"], ["a", ""], ["a", 1], ["a", None]],
    )
    def test_names_that_are_no_different_texts_are_errors(self, names, tmp_path):
        with pytest.raises(ValueError, match="expected different, non-empty texts without '/'"):
            team_args(MAGRPOConfig, tmp_path, agent_names=names)

    @pytest.mark.parametrize(
        ("names", "mistaken"),
        [
            (["critic", "a"], "critic"),
            (["a", "critic_0"], "critic_0"),
            (["turn_1", "a"], "turn_1"),
            (["eval", "a"], "eval"),
            (["train", "a"], "train"),
            (["rewards", "a"], "rewards"),
            (["agent_1", "agent_0"], "agent_1"),
            (["a", "agent_0"], "agent_0"),
        ],
    )
    def test_names_that_would_be_mistaken_are_errors(self, names, mistaken, tmp_path):
        with pytest.raises(ValueError, match=f"'{mistaken}' would be taken for something else"):
            team_args(MAGRPOConfig, tmp_path, agent_names=names)

    def test_an_actor_may_have_the_name_of_its_own_place(self, tmp_path):
        assert team_args(MAGRPOConfig, tmp_path, agent_names=["planner", "agent_1"]).agent_names[1] == "agent_1"


# Sequential turns


def plain(row):
    return row["prompt"]


def hears(row, earlier_completions):
    return " ".join([row["prompt"], "w27", *earlier_completions])


def may_hear(row, earlier_completions=None):
    return f"{row['prompt']} w27 {' '.join(earlier_completions or ['w28'])}"


def takes_anything(row, **context):
    return f"{row['prompt']} w27 {' '.join(context.get('earlier_completions', ['w28']))}"


class TestSequential:
    def test_each_sample_hears_the_one_of_its_own_number(self, build):
        trainer = build(turn_order="sequential", kwargs={"formatters": [plain, hears]})
        heard, batches = listen(trainer), record_batches(trainer)
        trainer.train()
        first, second = heard
        assert len({text for _, text in first}) > 1
        assert [prompt for prompt, _ in second] == [f"{prompt} w27 {text}" for prompt, text in first]
        encode = tok()
        asked = [
            ids[mask.bool()].tolist()
            for ids, mask in zip(batches[0]["agent_1/prompt_ids"], batches[0]["agent_1/prompt_mask"], strict=True)
        ]
        assert asked == [encode(prompt)["input_ids"] for prompt, _ in second]

    def test_a_pipeline_of_three_passes_everything_on(self, build):
        rewarded = []

        def reward(a, b, c):
            rewarded.extend(zip(a, b, c, strict=True))
            return [float(number(text)) for text in c]

        trainer = build(
            reward,
            turn_order="sequential",
            agent_names=["planner", "coder", "reviewer"],
            influence_steps=0,
            kwargs={"agents": [lm(0), lm(1), lm(2)], "formatters": [plain, hears, hears]},
        )
        before = [weights_hash(agent) for agent in trainer.agents]
        heard = listen(trainer)
        trainer.train()
        planner, coder, reviewer = heard
        for sample in range(4):
            task, plan = planner[sample]
            assert coder[sample][0] == f"{task} w27 {plan}"
            assert reviewer[sample][0] == f"{task} w27 {plan} {coder[sample][1]}"
            assert rewarded[sample] == (plan, coder[sample][1], reviewer[sample][1])
        assert all(weights_hash(agent) != old for agent, old in zip(trainer.agents, before, strict=True))

    @pytest.mark.parametrize("rollout_mode", ["tree", "chain"])
    def test_over_several_turns_each_hears_those_of_its_turn_and_branch(self, rollout_mode, build):
        trainer = build(
            turn_order="sequential",
            num_turns=2,
            rollout_mode=rollout_mode,
            kwargs={"formatters": [plain, hears], "external_transition": tell_all},
        )
        heard = listen(trainer)
        trainer.train()
        first, second = heard
        assert len(first) == len(second) == (12 if rollout_mode == "tree" else 8)
        for (prompt, said), (asked, _) in zip(first, second, strict=True):
            assert asked == f"{prompt} w27 {said}"
        # The environment told of joint responses of the first turn
        told = {f"{first[j][0]} w1 {first[j][1]} {second[j][1]}" for j in range(4)}
        assert {prompt for prompt, _ in first[4:]} == told

    def test_a_simultaneous_actor_that_wants_to_hear_is_an_error_that_names_it(self, build):
        with pytest.raises(ValueError, match=r"coder takes `earlier_completions`, but turn_order='simultaneous'"):
            build(agent_names=NAMES, kwargs={"formatters": [plain, may_hear]})

    def test_simultaneous_actors_hear_nothing(self, build):
        trainer = build(kwargs={"formatters": [plain, takes_anything]})
        heard = listen(trainer)
        trainer.train()
        assert [prompt for prompt, _ in heard[1]] == [f"{prompt} w27 w28" for prompt, _ in heard[0]]

    def test_the_first_actor_hears_an_empty_list(self, build):
        seen = []

        def first(row, earlier_completions):
            seen.append(earlier_completions)
            return row["prompt"]

        build(turn_order="sequential", kwargs={"formatters": [first, hears]}).train()
        assert seen and all(earlier == [] for earlier in seen)

    def test_evaluation_is_sequential_too(self, build):
        trainer = build(
            turn_order="sequential",
            kwargs={"formatters": [plain, hears], "eval_dataset": dataset(3)},
            num_generations_eval=1,
        )
        heard = listen(trainer)
        trainer.evaluate()
        assert [prompt for prompt, _ in heard[1]] == [f"{prompt} w27 {text}" for prompt, text in heard[0]]

    @pytest.mark.parametrize("formatters", [None, [plain, plain], [hears, plain]])
    def test_where_nobody_would_hear_it_is_an_error(self, formatters, build):
        with pytest.raises(ValueError, match=r"turn_order='sequential', but no formatter .*`earlier_completions`"):
            build(turn_order="sequential", kwargs={"formatters": formatters})

    def test_prompts_of_the_environment_that_nobody_formats_are_an_error(self, build):
        with pytest.raises(ValueError, match=r"turn_order='sequential' and external_prompt_passthrough=True"):
            build(
                turn_order="sequential",
                num_turns=2,
                external_prompt_passthrough=True,
                kwargs={"formatters": [plain, hears], "external_transition": tell_all},
            )


# Rewards of each actor


def zero_sum(first, second):
    values = [float(number(a) - number(b)) for a, b in zip(first, second, strict=True)]
    return [values, [-value for value in values]]


class TestOwnRewards:
    @pytest.mark.parametrize("options", [{}, {"num_turns": 2}, {"num_turns": 2, "rollout_mode": "chain"}])
    @pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
    def test_in_a_zero_sum_game_one_gains_what_the_other_loses(self, scale_rewards, options, build):
        trainer = build(
            zero_sum, scale_rewards=scale_rewards, kwargs={"external_transition": tell_all}, max_steps=2, **options
        )
        before = [weights_hash(agent) for agent in trainer.agents]
        batches = record_batches(trainer)
        trainer.train()
        for batch in batches:
            assert batch["agent_0/advantages"].any()
            assert torch.equal(batch["agent_0/advantages"], -batch["agent_1/advantages"])
        assert all(weights_hash(agent) != old for agent, old in zip(trainer.agents, before, strict=True))
        gains = zip(logged(trainer, "agent_0/reward"), logged(trainer, "agent_1/reward"), strict=True)
        assert all(gain == -loss and gain for gain, loss in gains)

    @pytest.mark.parametrize(
        "options",
        [{}, {"num_turns": 2}, {"num_turns": 2, "rollout_mode": "chain"}, {"joint_mode": "cross"}],
    )
    def test_a_shift_of_the_others_rewards_changes_no_bit_of_an_update(self, options, build):
        """B26: one baseline over the rewards of several actors would mix them."""
        weights = []
        for shift in (0.0, 100.0):

            def reward(first, second, shift=shift):
                return [[float(number(a)) for a in first], [shift + number(b) for b in second]]

            trainer = build(reward, kwargs={"external_transition": tell_all}, max_steps=2, **options)
            start = weights_hash(trainer.agents[0])
            trainer.train()
            weights.append(weights_hash(trainer.agents[0]))
            assert weights[-1] != start
        assert weights[0] == weights[1]

    def test_each_actor_is_taught_by_its_own(self, build, monkeypatch):
        """Rewards 1 and 3 of the first actor, 30 and 10 of the second, by hand."""
        trainer = build(
            lambda first, second: [[1.0, 3.0], [30.0, 10.0]],
            scale_rewards="none",
            kwargs={"train_dataset": dataset(2)},
        )
        stub_rollouts(monkeypatch, trainer, [[[5], [6]], [[7], [8]]])
        batches = record_batches(trainer)
        trainer.train()
        assert batches[0]["agent_0/advantages"].tolist() == [-1.0, 1.0] * 2
        assert batches[0]["agent_1/advantages"].tolist() == [10.0, -10.0] * 2
