# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Which W&B run a training logs to, with a recorder in the place of W&B."""

import logging
from types import SimpleNamespace

import pytest
import wandb
from tiny import dataset, lm, team_args, tok, word_reward

from trl_multiagent import MAGRPOConfig, MAGRPOTrainer, WandbRunCallback, read_checkpoint_metadata
from trl_multiagent.callbacks import wandb_run


@pytest.fixture
def inits(monkeypatch):
    """What `wandb.init` was called with; runs get the ids run-0, run-1, ... unless they are given one."""
    calls = []

    def init(**kwargs):
        number = len(calls)
        calls.append(kwargs)
        run = SimpleNamespace(
            id=kwargs.get("id", f"run-{number}"),
            project=kwargs.get("project", "huggingface"),
            entity="",
            _label=lambda **_: None,
            summary={},
        )
        monkeypatch.setattr(wandb, "run", run)
        return run

    monkeypatch.setattr(wandb_run, "_started", set())
    monkeypatch.setattr(wandb, "run", None)
    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setattr(wandb, "finish", lambda: monkeypatch.setattr(wandb, "run", None))
    monkeypatch.setattr(wandb, "log", lambda *args, **kwargs: None)
    monkeypatch.setattr(wandb, "define_metric", lambda *args, **kwargs: None)
    config = type("Config", (dict,), {"update": lambda self, *args, **kwargs: None})
    monkeypatch.setattr(wandb, "config", config())
    return calls


def train(tmp_path, wandb_config, **kwargs):
    trainer = MAGRPOTrainer(
        agents=[lm(0), lm(1)],
        tokenizer=tok(),
        reward_func=word_reward,
        train_dataset=dataset(4),
        args=team_args(MAGRPOConfig, tmp_path / "run"),
        wandb_config=wandb_config,
    )
    trainer.train(**kwargs)
    return trainer


def test_one_run_is_started_with_the_given_settings(inits, tmp_path):
    trainer = train(tmp_path, {"project": "p", "name": "n", "tags": ["t"]})
    assert inits == [{"project": "p", "name": "n", "tags": ["t"]}]
    assert trainer.args.report_to == ["wandb"]


def test_without_settings_no_run_is_started(inits, tmp_path):
    trainer = train(tmp_path, None)
    assert inits == [] and trainer.args.report_to == []


def test_a_second_training_starts_a_run_of_its_own(inits, tmp_path):
    train(tmp_path, {"project": "p"})
    train(tmp_path, {"project": "p"})
    assert inits == [{"project": "p"}] * 2 and wandb.run.id == "run-1"


def test_a_run_is_continued_by_the_identity_in_the_checkpoint(inits, tmp_path, monkeypatch):
    """B08: a resumed training opens no new run."""
    train(tmp_path, {"project": "p", "name": "n"}, checkpoint_dir=tmp_path / "checkpoints")
    identity = read_checkpoint_metadata(tmp_path / "checkpoints" / "checkpoint-1")["wandb"]
    assert identity == {"id": "run-0", "project": "p", "entity": None}
    monkeypatch.setattr(wandb, "run", None)  # as in a new process
    train(tmp_path, {"project": "p", "name": "n", **identity, "resume": "allow"})
    assert inits[1] == {"project": "p", "name": "n", "id": "run-0", "entity": None, "resume": "allow"}


def test_a_run_that_goes_on_in_the_same_process_is_not_started_again(inits, tmp_path):
    train(tmp_path, {"project": "p"})
    train(tmp_path, {"project": "p", "id": "run-0", "resume": "allow"})
    assert len(inits) == 1 and wandb.run.id == "run-0"


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.name == wandb_run.__name__]


@pytest.mark.parametrize("config", [{"project": "p"}, {"project": "p", "id": "another"}])
def test_a_run_that_the_user_started_is_used_with_a_warning(inits, tmp_path, caplog, config):
    own = wandb.init(project="mine")
    with caplog.at_level(logging.WARNING):
        train(tmp_path, config)
    assert inits == [{"project": "mine"}] and wandb.run is own
    (message,) = warnings(caplog)
    assert "run-0" in message and "`wandb_config`" in message


def test_a_run_of_the_settings_own_id_is_no_reason_for_a_warning(inits, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        train(tmp_path, {"project": "p"})
        train(tmp_path, {"project": "p"})  # ends the first run
        train(tmp_path, {"project": "p", "id": "run-1", "resume": "allow"})
        wandb.init(id="mine")
        train(tmp_path, {"project": "p", "id": "mine"})
    assert warnings(caplog) == []


def test_only_the_main_process_starts_a_run(inits):
    WandbRunCallback({"project": "p"}).on_train_begin(None, SimpleNamespace(is_world_process_zero=False), None)
    assert inits == []
