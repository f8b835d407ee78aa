# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Value heads that are written while a team trains: when, where, and which."""

import pytest
import torch
from critic_teams import PLACES, head_states, is_same_head, team_with_critics
from datasets import Dataset
from tiny import dataset, lm, team_args, tok, weights_hash, word_reward
from transformers import Trainer, TrainerCallback, TrainingArguments

from trl_multiagent import (
    MAGRPOConfig,
    MAGRPOTrainer,
    MAREINFORCEConfig,
    MAREINFORCETrainer,
    ValueHeadExportCallback,
)


FILES = {"value_head.pt", "value_head_config.json"}


class Heads(TrainerCallback):
    """What each head is after each step."""

    def __init__(self):
        self.trainer, self.after = None, {}

    def on_step_end(self, args, state, control, **kwargs):
        self.after[state.global_step] = head_states(self.trainer)


def watched(kind, output_dir, callback, callbacks=(), kwargs=None, **options):
    """A team with the callback, and its heads after each step once it is trained."""
    watch = Heads()
    kwargs = {"callbacks": [callback, *callbacks, watch], **(kwargs or {})}
    watch.trainer = team_with_critics(kind, output_dir, kwargs=kwargs, **options)
    return watch.trainer, watch.after


def files(directory):
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def steps(directory):
    return sorted(path.name for path in directory.iterdir())


def assert_heads_are_those_after(after, step, directory, places):
    for place, head in zip(places, after[step], strict=True):
        saved = torch.load(directory / f"step-{step}" / place / "value_head.pt", weights_only=True)
        assert is_same_head(saved, head)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "LoRA"])
@pytest.mark.parametrize("kind", PLACES)
def test_the_heads_alone_are_written_as_they_are_after_the_step(kind, lora, tmp_path):
    trainer, after = watched(kind, tmp_path, ValueHeadExportCallback(tmp_path / "heads", 2), lora=lora, max_steps=4)
    trainer.train()
    expected = {f"step-{step}/{place}/{name}" for step in (2, 4) for place in PLACES[kind] for name in FILES}
    assert files(tmp_path / "heads") == expected
    for step in (2, 4):
        assert_heads_are_those_after(after, step, tmp_path / "heads", PLACES[kind])
    for early, late in zip(after[2], after[4], strict=True):  # weights and moments: they do tell the steps apart
        assert all(not torch.equal(early[name], late[name]) for name in early)


@pytest.mark.parametrize(
    ("export_steps", "options", "expected"),
    [
        (1, {}, [1, 2, 3, 4, 5]),
        (2, {}, [2, 4, 5]),
        (5, {}, [5]),
        (7, {}, [5]),
        (None, {}, [5]),
        (None, {"save_strategy": "steps", "save_steps": 3}, [3, 5]),
        (2, {"save_strategy": "steps", "save_steps": 3}, [2, 4, 5]),
        (None, {"save_strategy": "epoch"}, [2, 4, 5]),  # an epoch has two batches of two prompts
        (2, {"gradient_accumulation_steps": 2}, [2, 4, 5]),  # steps of the optimizer
    ],
    ids=str,
)
def test_heads_are_written_at_these_steps_and_at_the_end(export_steps, options, expected, tmp_path):
    options = {"max_steps": 5, "steps_per_generation": 1, **options}
    trainer, _ = watched("IAC shared", tmp_path / "out", ValueHeadExportCallback(export_steps=export_steps), **options)
    trainer.train()
    assert steps(tmp_path / "out" / "value_heads") == [f"step-{step}" for step in expected]


def test_writing_heads_changes_nothing(tmp_path):
    hashes = set()
    for number, callbacks in enumerate(([], [ValueHeadExportCallback(export_steps=1)])):
        trainer = team_with_critics("IAC shared", tmp_path / str(number), kwargs={"callbacks": callbacks}, max_steps=3)
        trainer.train()
        hashes.add(weights_hash(trainer.model))
    assert (tmp_path / "1" / "value_heads" / "step-3").is_dir() and len(hashes) == 1


def test_a_frozen_actor_has_no_head_to_write(tmp_path):
    callback = ValueHeadExportCallback(tmp_path / "heads", 1)
    team_with_critics("IAC shared", tmp_path, kwargs={"callbacks": [callback]}, trainable_agents=[False, True]).train()
    assert files(tmp_path / "heads") == {f"step-1/agent_1/{name}" for name in FILES}


def test_one_callback_in_two_trainings_writes_the_second_ones_heads(tmp_path):
    """Both end after the same step."""
    callback = ValueHeadExportCallback(tmp_path / "heads", 2)
    for seed in (1, 2):
        trainer, after = watched("MAAC", tmp_path, callback, seed=seed, max_steps=2)
        trainer.train()
        assert_heads_are_those_after(after, 2, tmp_path / "heads", ["critic"])


def test_a_second_training_of_a_trainer_writes_its_heads_again(tmp_path):
    trainer, after = watched("MAAC", tmp_path, ValueHeadExportCallback(tmp_path / "heads", 2), max_steps=2)
    trainer.train()
    first = after[2]
    trainer.train()
    assert not is_same_head(first[0], after[2][0])
    assert_heads_are_those_after(after, 2, tmp_path / "heads", ["critic"])


def test_a_resumed_training_goes_on_with_the_steps_numbers(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 3, "max_steps": 5}
    trainer, _ = watched("IAC shared", tmp_path / "out", ValueHeadExportCallback(tmp_path / "first", 2), **options)
    trainer.train()
    resumed, after = watched(
        "IAC shared", tmp_path / "out", ValueHeadExportCallback(tmp_path / "second", 2), **options
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    assert steps(tmp_path / "second") == ["step-4", "step-5"]
    for step in (4, 5):
        assert_heads_are_those_after(after, step, tmp_path / "second", PLACES["IAC shared"])


class StopAfterEvaluation(TrainerCallback):
    """Ends a training after step 3, as early stopping does."""

    def on_evaluate(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == 3


@pytest.mark.parametrize(
    ("export_steps", "max_steps", "expected"),
    [(2, 3, [2, 3]), (2, 9, [2, 3]), (None, 3, [1, 2, 3])],
    ids=["by steps", "stopped early", "with checkpoints"],
)
def test_the_last_heads_are_those_of_their_step_where_the_best_model_is_loaded_at_the_end(
    export_steps, max_steps, expected, tmp_path
):
    trainer, after = watched(
        "MAAC",
        tmp_path / "out",
        ValueHeadExportCallback(tmp_path / "heads", export_steps),
        callbacks=[StopAfterEvaluation()],
        kwargs={"eval_dataset": Dataset.from_dict({"prompt": ["w1 w2"]})},
        max_steps=max_steps,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_step_number",
        greater_is_better=False,
    )
    evaluate = trainer.evaluate
    trainer.evaluate = lambda *args, **kwargs: {
        **evaluate(*args, **kwargs),
        "eval_step_number": float(trainer.state.global_step),
    }
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")
    assert is_same_head(head_states(trainer)[0], after[1][0])
    assert steps(tmp_path / "heads") == [f"step-{step}" for step in expected]
    for step in expected:
        assert_heads_are_those_after(after, step, tmp_path / "heads", ["critic"])


@pytest.mark.parametrize("export_steps", [0, -1])
def test_less_than_one_step_is_an_error(export_steps):
    with pytest.raises(ValueError, match=f"export_steps={export_steps}, expected 1 or more, or None"):
        ValueHeadExportCallback(export_steps=export_steps)


def without_critics(kind, directory, callbacks):
    if kind == "transformers":
        args = TrainingArguments(str(directory), use_cpu=True, report_to="none", max_steps=1)
        return Trainer(lm(0), args, train_dataset=Dataset.from_dict({"input_ids": [[1]]}), callbacks=callbacks)
    config_class, trainer_class = {
        "MAGRPO": (MAGRPOConfig, MAGRPOTrainer),
        "MAREINFORCE": (MAREINFORCEConfig, MAREINFORCETrainer),
    }[kind]
    return trainer_class(
        agents=[lm(0), lm(1)],
        tokenizer=tok(),
        reward_func=word_reward,
        train_dataset=dataset(),
        args=team_args(config_class, directory),
        callbacks=callbacks,
    )


@pytest.mark.parametrize("kind", ["MAGRPO", "MAREINFORCE", "transformers"])
def test_a_trainer_without_heads_is_an_error_before_any_step(kind, tmp_path):
    trainer = without_critics(kind, tmp_path / "out", [ValueHeadExportCallback(tmp_path / "heads")])
    with pytest.raises(ValueError, match="needs a trainer whose models have value heads: IACTrainer or MAACTrainer"):
        trainer.train()
    assert trainer.state.global_step == 0 and not (tmp_path / "heads").exists()
