# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""With one actor and one turn, the advantages of a team are those of TRL's trainers, to the bit."""

import pytest
import torch
from tiny import dataset, lm, record_batches, tok
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from trl_multiagent import MAGRPOConfig, MAGRPOTrainer, MARLOOConfig, MARLOOTrainer


# Rewards of the four samples of each of the two prompts. No group is equal up to rounding only: there the team's
# advantages are 0 on purpose
REWARDS = {
    "whole numbers": {"w0": [1.0, 2.0, 3.0, 6.0], "w1": [0.0, 1.0, 0.0, 0.0]},
    "fractions": {"w0": [0.1, -0.7, 1 / 3, 2.2], "w1": [1e-3, 123.456, -7.1, 0.3]},
    "one missing": {"w0": [None, 1.1, 2.2, 3.7], "w1": [0.3, 0.1, None, 0.9]},
    "one left": {"w0": [None, None, None, 0.7], "w1": [0.3, 0.1, 0.2, 0.9]},
    "none left": {"w0": [None] * 4, "w1": [0.3, 0.1, 0.2, 0.9]},
    "equal": {"w0": [0.1, 0.1, 0.1, 0.1], "w1": [0.3, 0.1, 0.2, 0.9]},
}


def functions(tables, for_team):
    """Reward functions that give each prompt's samples the rewards of a table."""

    def function(number, table):
        def from_table(completions, gold=None, batch_items=None, **kwargs):
            golds = [row["gold"] for row in batch_items] if for_team else gold
            seen = dict.fromkeys(golds, 0)
            values = []
            for name in golds:
                values.append(table[name][seen[name]])
                seen[name] += 1
            return values

        def of_team(completions, batch_items):
            return from_table(completions, batch_items=batch_items)

        chosen = of_team if for_team else from_table
        chosen.__name__ = f"table_{number}"
        return chosen

    return [function(number, table) for number, table in enumerate(tables)]


def trained_advantages(trainer_class, config_class, tables, tmp_path, monkeypatch, **options):
    """The advantages of one step."""
    args = config_class(
        output_dir=str(tmp_path / trainer_class.__name__),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=4,
        max_steps=1,
        beta=0.0,
        shuffle_dataset=False,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        **options,
    )
    if issubclass(trainer_class, (MAGRPOTrainer, MARLOOTrainer)):
        trainer = trainer_class(
            agents=[lm(0)],
            reward_func=functions(tables, for_team=True),
            args=args,
            tokenizer=tok(),
            train_dataset=dataset(2),
        )
        batches = record_batches(trainer)
        trainer.train()
        return batches[0]["agent_0/advantages"]
    monkeypatch.setattr(trainer_class, "_send_telemetry", lambda self: None)
    trainer = trainer_class(
        model=lm(0),
        reward_funcs=functions(tables, for_team=False),
        args=args,
        processing_class=tok(),
        train_dataset=dataset(2),
    )
    outputs, scored = [], trainer._generate_and_score_completions

    def generate_and_score(inputs):
        outputs.append(scored(inputs))
        return outputs[-1]

    trainer._generate_and_score_completions = generate_and_score
    trainer.train()
    return outputs[0]["advantages"]


def assert_equal(theirs, ours):
    assert theirs.shape == ours.shape == (8,)
    assert theirs.any(), "the comparison is worth something"
    assert torch.equal(theirs, ours), f"{ours.tolist()}, in TRL {theirs.tolist()}"


@pytest.mark.parametrize("rewards", REWARDS)
def test_marloo_has_the_advantages_of_rloo(rewards, tmp_path, monkeypatch):
    """B24 among them: rewards that are missing."""
    tables = [REWARDS[rewards]]
    theirs = trained_advantages(RLOOTrainer, RLOOConfig, tables, tmp_path, monkeypatch)
    ours = trained_advantages(MARLOOTrainer, MARLOOConfig, tables, tmp_path, monkeypatch)
    assert_equal(theirs, ours)


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
@pytest.mark.parametrize("rewards", REWARDS)
def test_magrpo_has_the_advantages_of_grpo(rewards, scale_rewards, tmp_path, monkeypatch):
    """B24 among them: rewards that are missing."""
    tables, options = [REWARDS[rewards]], {"scale_rewards": scale_rewards}
    theirs = trained_advantages(GRPOTrainer, GRPOConfig, tables, tmp_path, monkeypatch, **options)
    ours = trained_advantages(MAGRPOTrainer, MAGRPOConfig, tables, tmp_path, monkeypatch, **options)
    assert_equal(theirs, ours)


WEIGHTED = {"reward_weights": [0.3, -1.7]}
TWO = [REWARDS["fractions"], REWARDS["one missing"]]


def test_marloo_weighs_reward_functions_as_rloo(tmp_path, monkeypatch):
    theirs = trained_advantages(RLOOTrainer, RLOOConfig, TWO, tmp_path, monkeypatch, **WEIGHTED)
    ours = trained_advantages(MARLOOTrainer, MARLOOConfig, TWO, tmp_path, monkeypatch, **WEIGHTED)
    assert_equal(theirs, ours)


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_magrpo_weighs_reward_functions_as_grpo(aggregation, tmp_path, monkeypatch):
    options = {**WEIGHTED, "multi_objective_aggregation": aggregation}
    theirs = trained_advantages(GRPOTrainer, GRPOConfig, TWO, tmp_path, monkeypatch, **options)
    ours = trained_advantages(MAGRPOTrainer, MAGRPOConfig, TWO, tmp_path, monkeypatch, **options)
    assert_equal(theirs, ours)
