# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Which W&B run a training logs to, and that its rows are there once: with a recorder in W&B's place, and offline."""

import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import wandb
from tiny import dataset, lm, team_args, tok, word_reward
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.integrations import WandbCallback, rewrite_logs

from trl_multiagent import MAGRPOConfig, MAGRPOTrainer, WandbResumeCallback, read_checkpoint_metadata
from trl_multiagent.callbacks import wandb_resume
from trl_multiagent.callbacks.wandb_records import offline_files, records, rows


ROOT = Path(__file__).resolve().parents[2]


class Recorder:
    """W&B as the callback sees it; runs get the ids run-0, run-1, ... unless they are given one."""

    def __init__(self, patch):
        self.patch = patch
        self.inits, self.logs, self.metrics, self.config = [], [], [], {}
        self.server = {}  # summaries of runs that W&B can resume
        patch.setattr(wandb_resume, "_started", set())
        patch.setattr(wandb_resume, "_rows_of_runs", {})
        patch.setattr(wandb, "run", None)
        patch.setattr(wandb, "init", self.init)
        patch.setattr(wandb, "finish", lambda: patch.setattr(wandb, "run", None))
        patch.setattr(wandb, "log", lambda *args, **kwargs: self.logs.append((*args, kwargs)))
        patch.setattr(wandb, "define_metric", lambda name, **kwargs: self.metrics.append((name, kwargs)))
        config = type("Config", (dict,), {"update": lambda _, values, **kwargs: self.config.update(values)})
        patch.setattr(wandb, "config", config())
        patch.setattr(wandb, "Table", lambda dataframe: dataframe)
        for name in ("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_PROJECT"):
            patch.delenv(name, raising=False)

    def init(self, **kwargs):
        identity = kwargs.get("id", f"run-{len(self.inits)}")
        self.inits.append(kwargs)
        run = SimpleNamespace(
            id=identity,
            project=kwargs.get("project"),
            entity="",
            _label=lambda **_: None,
            summary=dict(self.server.get(identity, {})),
            resumed=identity in self.server,
            offline=False,
            settings=SimpleNamespace(wandb_dir="", sync_dir=""),
        )
        self.patch.setattr(wandb, "run", run)
        return run

    def new_process(self):
        """As in a new process."""
        for name in ("_started", "_rows_of_runs"):
            self.patch.setattr(wandb_resume, name, type(getattr(wandb_resume, name))())
        self.patch.setattr(wandb, "run", None)

    def steps(self):
        return [row["train/global_step"] for row, _ in self.logs]


@pytest.fixture
def recorder(monkeypatch):
    return Recorder(monkeypatch)


def build(tmp_path, wandb_config=None, callbacks=(), **options):
    return MAGRPOTrainer(
        agents=[lm(0), lm(1)],
        tokenizer=tok(),
        reward_func=word_reward,
        train_dataset=dataset(4),
        eval_dataset=dataset(2),
        args=team_args(MAGRPOConfig, tmp_path / "run", **options),
        wandb_config=wandb_config,
        callbacks=list(callbacks),
    )


def train(tmp_path, wandb_config=None, options=None, **kwargs):
    trainer = build(tmp_path, wandb_config, **(options or {}))
    trainer.train(**kwargs)
    return trainer


class TestWhichRun:
    def test_one_run_is_started_with_the_given_settings(self, recorder, tmp_path):
        trainer = train(tmp_path, {"project": "p", "name": "n", "tags": ["t"], "entity": "e", "dir": "d"})
        assert recorder.inits == [{"project": "p", "name": "n", "tags": ["t"], "entity": "e", "dir": "d"}]
        assert trainer.args.report_to == ["wandb"]

    def test_without_settings_no_run_is_started(self, recorder, tmp_path):
        trainer = train(tmp_path)
        assert recorder.inits == [] and trainer.args.report_to == []

    def test_transformers_words_name_the_run(self, recorder, tmp_path, monkeypatch):
        monkeypatch.setenv("WANDB_PROJECT", "mine")
        train(tmp_path, options={"report_to": "wandb", "run_name": "first"})
        assert recorder.inits == [{"project": "mine", "name": "first"}]

    def test_sections_are_in_the_runs_config(self, recorder, tmp_path):
        train(tmp_path, {"project": "p", "config_sections": {"dataset": {"rows": 4}}})
        assert recorder.config["dataset"] == {"rows": 4} and "config_sections" not in recorder.inits[0]

    def test_sections_that_are_no_dict_are_an_error(self, tmp_path):
        with pytest.raises(TypeError, match=r"config_sections'\] must be a dict of sections, got list"):
            build(tmp_path, {"config_sections": [1]})

    def test_a_second_training_starts_a_run_of_its_own(self, recorder, tmp_path):
        """Also in an output_dir that has the checkpoints of the first."""
        train(tmp_path, {"project": "p"}, {"save_strategy": "steps", "save_steps": 1})
        train(tmp_path, {"project": "p"}, {"save_strategy": "steps", "save_steps": 1})
        assert recorder.inits == [{"project": "p"}] * 2 and wandb.run.id == "run-1"

    def test_an_evaluation_and_the_training_after_it_share_a_run(self, recorder, tmp_path):
        trainer = build(tmp_path, {"project": "p"})
        trainer.evaluate()
        trainer.train()
        assert len(recorder.inits) == 1 and recorder.steps() == [0, 1]

    @pytest.mark.parametrize("config", [None, {"project": "p", "name": "n"}])
    def test_a_resumed_training_goes_on_in_its_checkpoints_run(self, config, recorder, tmp_path):
        """B08"""
        options = {"report_to": "wandb", "save_strategy": "steps", "save_steps": 1}
        train(tmp_path, config, options)
        assert read_checkpoint_metadata(tmp_path / "run" / "checkpoint-1")["wandb"]["id"] == "run-0"
        recorder.new_process()
        train(tmp_path, config, {**options, "max_steps": 2}, resume_from_checkpoint=True)
        assert recorder.inits[1]["id"] == "run-0" and recorder.inits[1]["resume"] == "allow"

    def test_an_evaluation_before_a_resume_is_not_the_run_of_the_checkpoint(self, recorder, tmp_path):
        options = {"save_strategy": "steps", "save_steps": 1}
        train(tmp_path, {"project": "p"}, options)
        recorder.new_process()
        trainer = build(tmp_path, {"project": "p"}, **options, max_steps=2)
        trainer.evaluate()
        trainer.train(resume_from_checkpoint=True)
        assert [init.get("id") for init in recorder.inits] == [None, None, "run-0"] and wandb.run.id == "run-0"

    def test_the_identity_of_a_checkpoint_may_be_given(self, recorder, tmp_path):
        train(tmp_path, {"project": "p", "name": "n"}, checkpoint_dir=tmp_path / "checkpoints")
        identity = read_checkpoint_metadata(tmp_path / "checkpoints" / "checkpoint-1")["wandb"]
        assert identity == {"id": "run-0", "project": "p", "entity": None}
        recorder.new_process()
        train(tmp_path, {"project": "p", "name": "n", **identity, "resume": "allow"})
        assert recorder.inits[1] == {"project": "p", "name": "n", "id": "run-0", "entity": None, "resume": "allow"}

    @pytest.mark.parametrize("explicit", [{"id": "mine"}, {"resume": "never"}])
    def test_what_is_explicit_wins(self, explicit, recorder, tmp_path):
        options = {"save_strategy": "steps", "save_steps": 1}
        train(tmp_path, {"project": "p"}, options)
        recorder.new_process()
        config = {"project": "p", **explicit}
        train(tmp_path, config, {**options, "max_steps": 2}, resume_from_checkpoint=True)
        assert recorder.inits[1] == config

    @pytest.mark.parametrize("variable", ["WANDB_RUN_ID", "WANDB_RESUME"])
    def test_what_the_environment_says_wins(self, variable, recorder, tmp_path, monkeypatch):
        options = {"save_strategy": "steps", "save_steps": 1}
        train(tmp_path, {"project": "p"}, options)
        recorder.new_process()
        monkeypatch.setenv(variable, "must")
        train(tmp_path, {"project": "p"}, {**options, "max_steps": 2}, resume_from_checkpoint=True)
        assert recorder.inits[1] == {"project": "p"}

    def test_a_run_that_goes_on_in_the_same_process_is_not_started_again(self, recorder, tmp_path):
        train(tmp_path, {"project": "p"})
        train(tmp_path, {"project": "p", "id": "run-0", "resume": "allow"})
        assert len(recorder.inits) == 1 and wandb.run.id == "run-0"

    @pytest.mark.parametrize("config", [{"project": "p"}, {"project": "p", "id": "another"}])
    def test_a_run_that_the_user_started_is_used_with_a_warning(self, config, recorder, tmp_path, caplog):
        own = wandb.init(project="mine")
        with caplog.at_level(logging.WARNING):
            train(tmp_path, config)
        assert recorder.inits == [{"project": "mine"}] and wandb.run is own
        assert "run-0" in caplog.text and "`wandb_config`" in caplog.text

    def test_one_callback_logs(self, recorder, tmp_path):
        own = WandbResumeCallback({"project": "p"})
        trainer = build(tmp_path, callbacks=[own], report_to="wandb")
        assert [c for c in trainer.callback_handler.callbacks if isinstance(c, WandbCallback)] == [own]
        with pytest.raises(ValueError, match="Both `wandb_config` and a WandbResumeCallback"):
            build(tmp_path, {"project": "p"}, callbacks=[own])

    def test_only_the_main_process_starts_and_logs(self, recorder, tmp_path):
        """B11"""
        callback = WandbResumeCallback({"project": "p"})
        state = SimpleNamespace(is_world_process_zero=False, is_hyper_param_search=False, global_step=0)
        args = team_args(MAGRPOConfig, tmp_path)
        callback.on_train_begin(args, state, None)
        callback.on_log(args, state, None, logs={"loss": 1.0})
        assert recorder.inits == recorder.logs == [] and callback.identity() is None


class TestRows:
    def test_env_step_is_the_x_axis(self, recorder, tmp_path):
        """B09: the last word for all metrics; and no row is given a step that W&B could find too small."""
        train(tmp_path, {"project": "p"}, {"max_steps": 2})
        axes = [kwargs["step_metric"] for name, kwargs in recorder.metrics if name == "*"]
        assert axes[-1] == "train/env_step"
        assert [row["train/env_step"] for row, _ in recorder.logs] == [4, 8]
        assert all(kwargs == {} for _, kwargs in recorder.logs)

    def test_in_another_trainer_the_x_axis_is_the_optimizer_step(self, recorder, tmp_path):
        rows = [{"input_ids": [3, 4, 5], "labels": [3, 4, 5]}] * 4
        options = TrainingArguments(tmp_path, max_steps=2, logging_steps=1, report_to="none", use_cpu=True)
        callback = WandbResumeCallback({"project": "p", "id": "a", "resume": "allow"})
        Trainer(lm(0), options, train_dataset=rows, callbacks=[callback]).train()
        assert recorder.inits[0]["id"] == "a" and recorder.steps() == [1, 2]
        assert {kwargs["step_metric"] for name, kwargs in recorder.metrics if name == "*"} == {"train/global_step"}

    def test_a_table_of_completions_is_in_the_row_of_its_step(self, recorder, tmp_path):
        """B11: one `log` a step."""
        train(tmp_path, {"project": "p"}, {"log_completions": True, "max_steps": 2})
        assert recorder.steps() == [1, 2]
        assert [len(row["train/completions"]) for row, _ in recorder.logs] == [4, 4]

    def test_the_numbers_of_the_whole_run_are_no_row(self, recorder, tmp_path):
        train(tmp_path, {"project": "p"})
        assert recorder.steps() == [1] and wandb.run.summary["train_runtime"] > 0

    @pytest.mark.parametrize(("known", "logged"), [(1, [2, 3, 4]), (2, [3, 4]), (3, [4]), (4, [])])
    def test_a_run_that_wandb_resumed_gets_the_rows_after_those_that_it_has(self, known, logged, recorder, tmp_path):
        """The checkpoint is of step 2: rows before it come from the checkpoint, those after it are done again."""
        options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
        history = train(tmp_path, {"project": "p"}, options).state.log_history
        recorder.new_process()
        recorder.server["run-0"] = {"train/global_step": known, **rewrite_logs(history[known - 1])}
        recorder.logs.clear()
        train(tmp_path, {"project": "p"}, options, resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
        assert recorder.steps() == logged

    @pytest.mark.parametrize("evaluated", [True, False])
    def test_a_run_killed_in_an_evaluation_gets_its_row(self, evaluated, recorder, tmp_path):
        """The summary has the training's row of step 2, and that step's evaluation or not."""
        options = {
            "save_strategy": "steps",
            "save_steps": 2,
            "max_steps": 3,
            "eval_strategy": "steps",
            "eval_steps": 2,
        }
        history = train(tmp_path, {"project": "p"}, options).state.log_history
        first, second, evaluation = map(rewrite_logs, history[:3])
        recorder.new_process()
        before = {} if not evaluated else evaluation
        recorder.server["run-0"] = {"train/global_step": 2, **first, **second, **before}
        recorder.logs.clear()
        train(tmp_path, {"project": "p"}, options, resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
        kinds = ["eval" if "eval/reward" in row else "train" for row, _ in recorder.logs]
        assert recorder.steps() == ([] if evaluated else [2]) + [3, 3]
        assert kinds == ([] if evaluated else ["eval"]) + ["train", "eval"]

    def test_every_row_of_a_step_is_logged(self, recorder, tmp_path):
        """A callback's own, one evaluation after another, and a second training in the user's run."""

        class Own(TrainerCallback):
            def on_step_begin(self, args, state, control, **kwargs):
                trainer.log({"own": 1.0})

        wandb.init(project="mine")
        trainer = build(tmp_path, {"project": "p"}, callbacks=[Own()], max_steps=2)
        trainer.train()
        assert recorder.steps() == [0, 1, 1, 2]
        trainer.evaluate()
        trainer.evaluate(dataset(3))
        assert recorder.steps()[4:] == [2, 2]
        trainer.train()
        assert recorder.steps()[6:] == [0, 1, 1, 2]

    def test_other_callbacks_see_the_same_logs_and_tables(self, tmp_path):
        class Seen(TrainerCallback):
            def __init__(self):
                self.events = []

            def on_log(self, args, state, control, logs=None, **kwargs):
                self.events.append(("log", logs.get("env_step")))

            def on_completions(self, args, state, control, table):
                self.events.append(("table", len(table)))

        seen = Seen()
        build(tmp_path, callbacks=[seen], log_completions=True, max_steps=2).train()
        assert seen.events[:4] == [("table", 4), ("log", 4), ("table", 4), ("log", 8)]


# Offline, each part in a process of its own: `python <this file> <directory> <resume> <kill at step>`


def environment():
    """Of a process that has nothing to do with this one's W&B."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    return {**inherited, "WANDB_MODE": "offline", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}


def part(directory, *, resume=False, kill=0, epochs=3):
    """Train a part of a run; return its exit status."""
    command = [sys.executable, __file__, str(directory), str(int(resume)), str(kill), str(epochs)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == (-9 if kill else 0), done.stderr[-3000:]


def train_part(directory, resume, kill, epochs):
    class Kill(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == int(kill):
                os.kill(os.getpid(), 9)

    directory = Path(directory)
    trainer = MAGRPOTrainer(
        agents=[lm(0), lm(1)],
        tokenizer=tok(),
        reward_func=word_reward,
        train_dataset=dataset(4),  # two steps an epoch
        eval_dataset=dataset(2),
        args=team_args(
            MAGRPOConfig,
            directory / "run",
            max_steps=-1,
            num_train_epochs=int(epochs),
            lr_scheduler_type="constant",
            eval_strategy="steps",
            eval_steps=2,
            log_completions=True,
        ),
        wandb_config={"project": "p", "dir": str(directory), "tags": ["t"]},
        callbacks=[Kill()],
    )
    trainer.train(resume_from_checkpoint=bool(int(resume)), checkpoint_dir=directory / "checkpoints")


def numbers(directory):
    """Kind, step, env_step and reward of every row of all parts, in order of the parts."""
    found = []
    for file in offline_files(directory / "wandb"):
        for row in rows(file):
            kind = "eval" if "eval/reward" in row else "train"
            found.append((kind, row["train/global_step"], row["train/env_step"], row[f"{kind}/reward"]))
    return found


@pytest.mark.parametrize("first", [{"kill": 5}, {"epochs": 2}], ids=["killed", "made longer"])
def test_the_parts_of_an_offline_run_have_each_row_once(first, tmp_path):
    """W&B buffers what it writes, so a killed part lacks its last rows: they are logged from the checkpoint."""
    part(tmp_path / "whole")
    part(tmp_path / "parts", **first)
    part(tmp_path / "parts", resume=True)
    files = offline_files(tmp_path / "parts" / "wandb")
    assert len(files) == 2 and len({file.name for file in files}) == 1
    expected = numbers(tmp_path / "whole")
    assert [row[:3] for row in expected if row[0] == "train"] == [("train", s, 4 * s) for s in range(1, 7)]
    assert numbers(tmp_path / "parts") == expected
    for file in files:
        axes = [r.metric.step_metric for r in records(file) if r.metric.glob_name == "*"]
        assert axes[-1] == "train/env_step"
        (run,) = [record.run for record in records(file) if record.WhichOneof("record_type") == "run"][:1]
        assert run.project == "p" and list(run.tags) == ["t"]


def test_a_run_without_wandb_needs_no_wandb(tmp_path):
    """Where it is installed transformers imports it, whatever a run reports to: here it is not."""
    script = f"""
import sys
from importlib.machinery import PathFinder

find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *others: None if name == "wandb" else find(name, *others)
from tiny import *
from trl_multiagent import *

trainer = MAGRPOTrainer(
    agents=[lm(0), lm(1)], tokenizer=tok(), reward_func=word_reward, train_dataset=dataset(4),
    args=team_args(MAGRPOConfig, {str(tmp_path)!r}, save_strategy="steps", save_steps=1, max_steps=2),
)
trainer.train()
trainer.train(resume_from_checkpoint={str(tmp_path / "checkpoint-1")!r})
assert "wandb" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


if __name__ == "__main__":
    train_part(*sys.argv[1:])
