# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Iterative MADPO: comparators, replay, and where its files and checkpoints are."""

import pytest
import torch
from datasets import Dataset
from tiny import dataset, llama, lm, parameters, preference_args, tok, weights_hash, word_reward
from transformers import TrainerCallback

from trl_multiagent import MADPOIterConfig, MADPOIterTrainer
from trl_multiagent.rollouts.preferences import read_pairs


def build(output_dir, reward=word_reward, callbacks=(), train_dataset=None, **kwargs) -> MADPOIterTrainer:
    return MADPOIterTrainer(
        agents=[lm(0), llama(1)],
        tokenizer=[tok(), tok()],
        reward_func=reward,
        train_dataset=dataset() if train_dataset is None else train_dataset,
        args=preference_args(MADPOIterConfig, output_dir, **{"num_iterations": 3, **kwargs}),
        callbacks=list(callbacks),
    )


def pairs_of(output_dir, iteration: int):
    return read_pairs(output_dir / "preferences" / f"iteration-{iteration}.jsonl")


class AtIterations(TrainerCallback):
    """Hashes of the weights before the first step of each epoch."""

    def __init__(self):
        self.weights = []

    def on_epoch_begin(self, args, state, control, model=None, **kwargs):
        self.weights.append(weights_hash(model))


def test_every_iteration_answers_with_the_team_that_has_learned(tmp_path):
    watch = AtIterations()
    trainer = build(tmp_path, callbacks=[watch])
    trainer.train()
    assert len(set(watch.weights)) == 3
    assert [len(pairs_of(tmp_path, i)) for i in range(3)] == [16, 16, 16]
    assert trainer.env_step == 3 * 8 * (4 + 4)
    assert trainer.state.global_step == trainer.state.max_steps == 6
    for pair in pairs_of(tmp_path, 1):
        assert {pair.winner_source, pair.loser_source} == {"current", "comparator"}
        assert pair.winner_reward > pair.loser_reward


def test_each_iteration_has_an_equal_share_of_the_schedule(tmp_path):
    """Iterations with 4, 1 and 2 steps of a linear schedule from 1: planned by the first as 12 steps."""
    counts = iter([4, 1, 2])
    trainer = build(tmp_path, learning_rate=1.0, per_device_train_batch_size=1, optim="sgd", max_grad_norm=1e-6)
    collect = trainer._collect_pairs
    trainer._collect_pairs = lambda iteration: collect(iteration)[: next(counts)]
    trainer.train()
    rates = [row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row]
    done = [0, 1, 2, 3, 4, 8, 10]  # of 12: a step of the second iteration counts for four, one of the third for two
    assert rates == pytest.approx([1 - step / 12 for step in done])
    assert trainer.state.max_steps == 7


def test_an_iteration_without_pairs_is_passed_over(tmp_path):
    trainer = build(tmp_path)
    collect = trainer._collect_pairs
    trainer._collect_pairs = lambda iteration: [] if iteration == 1 else collect(iteration)
    trainer.train()
    assert trainer.state.global_step == 4
    assert pairs_of(tmp_path, 1) == []


def test_history_compares_with_the_policy_of_the_iteration_before(tmp_path):
    watch, seen = AtIterations(), []
    trainer = build(tmp_path, callbacks=[watch], comparator_policy="history", comparator_history_k=1)
    collect = trainer._collect_pairs

    def frozen(sources):
        actors = type(trainer)._frozen(trainer, sources)
        module = torch.nn.ModuleList(actor.model for actor in actors)
        seen.append(parameters(module))
        return actors

    before = [parameters(trainer.model)]
    trainer._frozen = frozen

    def collected(iteration):
        if iteration:
            before.append(parameters(trainer.model))
        return collect(iteration)

    trainer._collect_pairs = collected
    trainer.train()
    for found, expected in zip(seen, [before[0], before[0], before[1]], strict=True):
        torch.testing.assert_close(found, expected, atol=0, rtol=0)
    assert sorted(path.name for path in (tmp_path / "policies").iterdir()) == ["iteration-1", "iteration-2"]


def test_other_models_may_be_the_comparator(tmp_path):
    for name, model, tokenizer in (("a", lm(5), tok(reverse=True)), ("b", llama(6), tok())):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    trainer = build(
        tmp_path,
        num_iterations=1,
        comparator_policy="model",
        comparator_agents=[str(tmp_path / "a"), str(tmp_path / "b")],
        comparator_num_candidates=2,
        preference_pairs_per_sample=None,
    )
    trainer.train()
    assert trainer.env_step == 8 * (4 + 2)
    for pair in trainer._pairs:
        if pair.loser_source == "comparator":  # it ends as the actor would end it, unless it is too long
            assert all(ids[-1] == 2 or len(ids) == 6 for ids in pair.loser_ids)
    assert 0 < len(pairs_of(tmp_path, 0)) <= 8 * 2
    for pair in trainer._pairs:  # their texts, in the tokens of the actor that learns
        for index, tokenizer in enumerate(trainer.tokenizers):
            assert tokenizer.decode(pair.winner_ids[index], skip_special_tokens=True) == pair.winner_completions[index]


def test_replay_trains_on_earlier_pairs_too(tmp_path):
    trainer = build(tmp_path, preference_replay_mode="all_history", preference_replay_sample_size=40)
    trainer.train()
    logged = [row for row in trainer.state.log_history if "preferences/num_replayed_pairs" in row]
    assert [row["preferences/num_replayed_pairs"] for row in logged] == [40, 40, 40]
    assert [row["preferences/num_pairs"] for row in logged] == [16, 16, 16]
    texts = [
        {(pair.task, *pair.winner_completions, *pair.loser_completions) for pair in pairs_of(tmp_path, i)}
        for i in range(3)
    ]
    drawn = {(pair.task, *pair.winner_completions, *pair.loser_completions) for pair in trainer._pairs}
    assert all(drawn & of_iteration for of_iteration in texts)


def test_boundary_checkpoints_are_iterations_and_a_resume_writes_beside_what_is_there(tmp_path):
    options = dict(num_train_epochs=2, comparator_policy="history", comparator_history_k=2)
    whole = build(tmp_path / "whole", **options)
    whole.train(checkpoint_dir=tmp_path / "saved")
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [f"checkpoint-{i}" for i in (1, 2, 3)]
    again = build(tmp_path / "whole", **options)
    again.train(resume_from_checkpoint=tmp_path / "saved" / "checkpoint-1")
    assert weights_hash(again.model) == weights_hash(whole.model)
    directory = tmp_path / "whole" / "preferences"
    assert sorted(path.name for path in directory.iterdir()) == [
        *(f"iteration-{i}.jsonl" for i in range(3)),
        "resume-1",
    ]
    for i in (1, 2):
        assert read_pairs(directory / "resume-1" / f"iteration-{i}.jsonl") == pairs_of(tmp_path / "whole", i)


def test_a_run_may_get_more_iterations_but_not_longer_ones(tmp_path):
    def run(**kwargs):
        return build(tmp_path, lr_scheduler_type="constant", **kwargs)

    short = run(num_iterations=2)
    short.train(checkpoint_dir=tmp_path / "saved")
    longer = run(num_iterations=3)
    longer.train(resume_from_checkpoint=tmp_path / "saved" / "checkpoint-2")
    whole = build(tmp_path / "whole", lr_scheduler_type="constant", num_iterations=3)
    whole.train()
    assert weights_hash(longer.model) == weights_hash(whole.model)
    with pytest.raises(ValueError, match="epochs_of_an_iteration"):
        run(num_iterations=3, num_train_epochs=2).train(resume_from_checkpoint=tmp_path / "saved" / "checkpoint-2")


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(comparator_policy="history"), "comparator_history_k"),
        (dict(comparator_history_k=1), "comparator_policy='history' only"),
        (dict(comparator_policy="model"), "either `comparator_model_name` or `comparator_agents`"),
        (dict(comparator_model_name="m"), "comparator_policy='model' only"),
        (dict(comparator_policy="api"), "comparator_api_model"),
        (dict(comparator_api_url="http://x"), "comparator_policy='api' only"),
        (dict(preference_replay_mode="nearest_k"), "preference_replay_k"),
        (dict(preference_replay_lambda=0.5), "preference_replay_lambda"),
        (dict(num_iterations=0), "num_iterations"),
        (dict(max_steps=5), "num_iterations"),
        (dict(num_train_epochs=1.5), "num_iterations"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        MADPOIterConfig(output_dir=str(tmp_path), use_cpu=True, **options)


def test_a_dataset_of_pairs_has_no_iterations(tmp_path):
    rows = Dataset.from_list(
        [{"prompts": ["w1", "w1"], "winner_completions": ["w2", "w2"], "loser_completions": ["w3", "w3"]}]
    )
    with pytest.raises(ValueError, match="samples its pairs anew"):
        build(tmp_path, train_dataset=rows)
