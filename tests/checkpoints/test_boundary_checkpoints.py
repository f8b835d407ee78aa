# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Checkpoints at the ends of epochs: where they are, what they say of themselves, and how a run goes on from one."""

import json
import os

import pytest
import torch
import trl
from critic_teams import PLACES, team_with_critics
from known_values import next_words
from tiny import dataset, lm, logged, record_batches, team_args, tok, weights_hash, word_reward
from transformers import TrainerCallback

from trl_multiagent import (
    CheckpointError,
    MAACConfig,
    MAACTrainer,
    MAGRPOConfig,
    MAGRPOTrainer,
    MAREINFORCEConfig,
    MAREINFORCETrainer,
    read_checkpoint_metadata,
)
from trl_multiagent.models.value_head import ValueHead


def build(tmp_path, epochs, external_transition=None, **changed):
    changed = {"max_steps": -1, "num_train_epochs": epochs, "lr_scheduler_type": "constant", **changed}
    return MAGRPOTrainer(
        agents=[lm(0), lm(1)],
        tokenizer=tok(),
        reward_func=word_reward,
        external_transition=external_transition,
        train_dataset=dataset(6),  # three generation batches of two prompts
        args=team_args(MAGRPOConfig, tmp_path / "run", **changed),
    )


def saved(directory):
    return sorted(path.name for path in directory.iterdir())


def test_a_checkpoint_for_each_epoch(tmp_path):
    build(tmp_path, 2).train(checkpoint_dir=tmp_path / "saved")
    assert saved(tmp_path / "saved") == ["checkpoint-1", "checkpoint-2"]
    assert {"agent_0", "agent_1"} <= set(saved(tmp_path / "saved" / "checkpoint-1"))


def test_every_second_epoch_and_the_end(tmp_path):
    build(tmp_path, 3).train(checkpoint_dir=tmp_path / "saved", checkpoint_interval=2)
    assert saved(tmp_path / "saved") == ["checkpoint-2", "checkpoint-3"]


def test_the_end_within_an_epoch_is_saved_under_the_number_of_that_epoch(tmp_path):
    build(tmp_path, 1, max_steps=4).train(checkpoint_dir=tmp_path / "saved")
    assert saved(tmp_path / "saved") == ["checkpoint-1", "checkpoint-2"]
    state = json.loads((tmp_path / "saved" / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["global_step"] == 4


def test_without_a_directory_nothing_is_saved(tmp_path):
    build(tmp_path, 1).train()
    assert not list(tmp_path.rglob("checkpoint-*"))


def test_a_later_training_without_a_directory_saves_nothing(tmp_path):
    trainer = build(tmp_path, 1)
    trainer.train(checkpoint_dir=tmp_path / "saved")
    (tmp_path / "saved").rename(tmp_path / "moved")
    trainer.train()
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("interval", [0, -1])
def test_an_interval_below_one_is_an_error(tmp_path, interval):
    with pytest.raises(ValueError, match=f"checkpoint_interval={interval}, expected 1 or more"):
        build(tmp_path, 1).train(checkpoint_dir=tmp_path / "saved", checkpoint_interval=interval)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"num_turns": 2, "rollout_mode": "chain"},
        {"num_iterations": 2},
        {"steps_per_generation": 2, "per_device_train_batch_size": 2},
        {"num_iterations": 2, "steps_per_generation": 4, "gradient_accumulation_steps": 2},
        {"steps_per_generation": 3, "gradient_accumulation_steps": 2},
    ],
    ids=[
        "one turn",
        "two turns",
        "two iterations",
        "two updates for each batch",
        "two iterations of two updates",
        "an epoch that ends within an accumulation",
    ],
)
def test_a_run_goes_on_from_an_epoch_as_if_it_had_never_stopped(tmp_path, changed):
    """B02, B06: the same prompts, the same samples, the same counters, to the bit."""

    def transition(prompt, agent_completions, num_agents, **history):
        return [f"{prompt} {said}" for said in agent_completions]

    def make(epochs, name):
        return build(tmp_path / name, epochs, transition if "num_turns" in changed else None, **changed)

    whole = make(3, "whole")
    whole.train()
    make(1, "first").train(checkpoint_dir=tmp_path / "saved")
    second = make(3, "second")
    second.train(resume_from_checkpoint=str(tmp_path / "saved" / "checkpoint-1"), checkpoint_dir=tmp_path / "saved")
    assert saved(tmp_path / "saved") == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    assert [weights_hash(agent) for agent in second.agents] == [weights_hash(agent) for agent in whole.agents]
    for name in ("reward", "num_tokens", "env_step", "loss"):
        assert logged(second, name) == logged(whole, name)


class Snapshots(TrainerCallback):
    """What a team is when training begins, and after each step: weights, moments of its heads, optimizer's state."""

    def __init__(self):
        self.at = {}

    def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.at[state.global_step] = {
            "weights": {name: weights_hash(module) for name, module in model.entities()},
            "moments": [head.get_extra_state().tolist() for head in model.modules() if isinstance(head, ValueHead)],
            "optimizer": {
                number: {name: torch.as_tensor(value).tolist() for name, value in own.items()}
                for number, own in optimizer.state_dict()["state"].items()
            },
        }

    on_train_begin = on_step_end


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("IAC separate", {}),
        ("IAC separate", {"save_strategy": "epoch", "lora": True, "critic_warmup_steps": 4}),
        ("IAC separate", {"advantage_level": "token", "weight_decay": 0.1}),
        ("IAC shared", {"save_strategy": "epoch"}),
        ("IAC shared", {"critic_warmup_steps": 4, "num_iterations": 2}),
        ("IAC shared", {"lora": True}),
        ("IAC shared", {"lora": True, "advantage_level": "token", "critic_warmup_steps": 4}),
        ("IAC shared", {"trainable_agents": [True, False], "value_head_hidden_dim": 4}),
        ("MAAC", {"save_strategy": "epoch", "critic_warmup_steps": 4}),
        ("MAAC", {"lora": True, "critic_value_head_hidden_dim": 4}),
        ("MAAC", {"num_iterations": 2, "individual_rewards": True, "weight_decay": 0.1}),
    ],
    ids=str,
)
def test_critics_go_on_from_an_epoch_as_if_they_had_never_stopped(kind, changed, tmp_path):
    """Two turns; the actors begin to move before the first epoch ends, or after it."""

    def make(name):
        snapshots = Snapshots()
        kwargs = {"external_transition": next_words, "train_dataset": dataset(6), "callbacks": [snapshots]}
        options = {"max_steps": -1, "num_train_epochs": 2, "num_turns": 2, "critic_warmup_steps": 2, **changed}
        return team_with_critics(kind, tmp_path / name, kwargs=kwargs, **options), snapshots.at

    whole, whole_at = make("whole")
    whole.train(checkpoint_dir=None if "save_strategy" in changed else tmp_path / "saved")
    half = max(whole_at) // 2  # steps of an epoch
    checkpoint = "saved/checkpoint-1" if "save_strategy" not in changed else f"whole/checkpoint-{half}"
    second, second_at = make("second")
    second.train(resume_from_checkpoint=str(tmp_path / checkpoint))
    assert list(second_at) == list(range(half, 2 * half + 1))
    for step, snapshot in second_at.items():
        assert snapshot == whole_at[step], f"step {step}"
    middle, end = whole_at[half], whole_at[2 * half]
    still = {name for name in middle["weights"] if middle["weights"][name] == end["weights"][name]}
    assert still == ({"agent_1"} if "trainable_agents" in changed else set())
    assert all(late[0] > early[0] > 0 for early, late in zip(middle["moments"], end["moments"], strict=True))
    critic = "critic" if kind == "MAAC" and "individual_rewards" not in changed else "agent_0/critic"
    for name in ("reward", "num_tokens", "env_step", "loss", f"{critic}/value_error", f"{critic}/loss"):
        assert logged(second, name) == logged(whole, name) != []


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A checkpoint of each kind of team with value heads."""
    directory = tmp_path_factory.mktemp("checkpoints")
    for kind in PLACES:
        team_with_critics(kind, directory / "run").train(checkpoint_dir=directory / kind)
    return {kind: directory / kind / "checkpoint-1" for kind in PLACES}


ANOTHER_KIND = "was written by another kind of trainer, {}; this is a {}. Resume it with the trainer that wrote it"
OTHER_PLACES = r"(?s)set up otherwise .*options\.use_separate_critic: {} -> {}\n"


@pytest.mark.parametrize(
    ("wrote", "resumes", "message"),
    [
        ("MAAC", "IAC separate", ANOTHER_KIND.format("MAACTrainer", "IACTrainer")),
        ("MAAC", "IAC shared", ANOTHER_KIND.format("MAACTrainer", "IACTrainer")),
        ("IAC separate", "IAC shared", OTHER_PLACES.format(True, False)),
        ("IAC separate", "MAAC", ANOTHER_KIND.format("IACTrainer", "MAACTrainer")),
        ("IAC shared", "IAC separate", OTHER_PLACES.format(False, True)),
        ("IAC shared", "MAAC", ANOTHER_KIND.format("IACTrainer", "MAACTrainer")),
    ],
)
def test_a_checkpoint_with_heads_in_other_places_is_refused_before_anything_is_loaded(
    wrote, resumes, message, checkpoints, tmp_path
):
    trainer = team_with_critics(resumes, tmp_path / "out", max_steps=2)
    before = weights_hash(trainer.model)
    with pytest.raises(CheckpointError, match=message):
        trainer.train(resume_from_checkpoint=str(checkpoints[wrote]))
    assert weights_hash(trainer.model) == before and trainer.env_step == 0


def test_what_an_earlier_training_left_of_a_batch_is_not_used(tmp_path):
    """The first training ends after one of the two micro-steps of its batch."""
    trainer = build(tmp_path, 1, max_steps=1, steps_per_generation=2)
    batches = record_batches(trainer)
    trainer.train()
    trainer.train()
    assert len(batches) == 2


def test_the_teams_state_is_there_when_a_checkpoint_is_pushed(tmp_path, monkeypatch):
    trainer = build(tmp_path, 1, max_steps=1, save_strategy="steps", save_steps=1)
    pushed = []
    trainer.args.push_to_hub = True  # set late: at construction it would make a repository
    monkeypatch.setattr(trainer, "_push_from_checkpoint", lambda folder: pushed.append(sorted(os.listdir(folder))))
    trainer.train()
    (names,) = pushed
    assert {"agent_0", "agent_1", "run.json", "trainer_state.json", "process_0.pt", "manifest.json"} <= set(names)


def test_an_export_in_the_middle_of_a_training_holds_no_state(tmp_path):
    trainer = build(tmp_path, 1, max_steps=1, save_strategy="steps", save_steps=1)
    trainer.train()
    assert {"run.json", "process_0.pt"} <= set(saved(tmp_path / "run" / "checkpoint-1"))
    trainer.save_model(str(tmp_path / "export"))
    assert saved(tmp_path / "export") == ["agent_0", "agent_1"]


def of_kind(kind, directory, **options):
    """A short training of `kind`, which saves after every step."""
    config_class, trainer_class, more = {
        "MAGRPO": (MAGRPOConfig, MAGRPOTrainer, {}),
        "MAREINFORCE": (MAREINFORCEConfig, MAREINFORCETrainer, {}),
        "MAAC": (MAACConfig, MAACTrainer, {"critic_model": lm(5)}),
    }[kind]
    return trainer_class(
        agents=[lm(0), lm(1)],
        tokenizer=tok(),
        reward_func=word_reward,
        train_dataset=dataset(6),
        args=team_args(config_class, directory, save_strategy="steps", save_steps=1, **options),
        **more,
    )


@pytest.mark.parametrize(
    ("wrote", "resumes"),
    [("MAGRPO", "MAAC"), ("MAAC", "MAGRPO"), ("MAGRPO", "MAREINFORCE"), ("MAREINFORCE", "MAGRPO")],
)
def test_a_checkpoint_of_another_kind_of_trainer_is_refused_with_both_named(tmp_path, wrote, resumes):
    """Another estimator on the same entities too: its run would be neither of the two."""
    of_kind(wrote, tmp_path / "first").train()
    later = of_kind(resumes, tmp_path / "second", max_steps=2)
    with pytest.raises(CheckpointError, match=ANOTHER_KIND.format(f"{wrote}Trainer", f"{resumes}Trainer")):
        later.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-1"))
    assert later.env_step == 0 and not (tmp_path / "second" / "checkpoint-2").exists()


def test_metadata_is_read_without_a_trainer(tmp_path):
    """Six prompts with two joint samples each, in batches of four."""
    trainer = build(tmp_path, 1)
    trainer.train(checkpoint_dir=tmp_path / "saved")
    metadata = read_checkpoint_metadata(tmp_path / "saved" / "checkpoint-1")
    versions = metadata.pop("versions")
    assert metadata == {"wandb": None, "env_step": 12, "step": 3} and trainer.env_step == 12
    assert {name: versions[name] for name in ("torch", "trl")} == {"torch": torch.__version__, "trl": trl.__version__}


def test_a_directory_that_is_no_checkpoint_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}' is no checkpoint of a team: it has no run.json"):
        read_checkpoint_metadata(tmp_path)
