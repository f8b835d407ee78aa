# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Checkpoints that are damaged, that cannot be written, and that hold what must not be run."""

import errno
import json
import logging
import os
import pickle
import resource
import shutil
from pathlib import Path

import pytest
import torch
import xxhash
from critic_teams import team_with_critics
from tiny import dataset, weights_hash
from transformers import TrainerCallback

from trl_multiagent import CheckpointError
from trl_multiagent.checkpoints import export, storage
from trl_multiagent.checkpoints.storage import Attempt, Sealer, newest_valid, verify
from trl_multiagent.trainers import team_checkpoints


# A checkpoint is whole or not there


def written(target: Path, **files: str) -> Path:
    storage.begin(target)
    for name, text in files.items():
        (storage.stage(target) / name).write_text(text)
    storage.commit(target)
    return target


def test_a_checkpoint_appears_with_its_manifest(tmp_path):
    target = tmp_path / "runs" / "checkpoint-1"
    storage.begin(target)
    (storage.stage(target) / "agent_0").mkdir()
    (storage.stage(target) / "agent_0" / "weights").write_bytes(b"abc")
    (storage.stage(target) / "empty").touch()
    assert not target.exists() and storage.stage(target).name.startswith(".")
    assert newest_valid([tmp_path / "runs"]) == (None, [])
    storage.commit(target)
    assert [path.name for path in target.parent.iterdir()] == ["checkpoint-1"]
    assert json.loads((target / "manifest.json").read_text())["files"] == {
        "agent_0/weights": {"size": 3, "xxh3_128": xxhash.xxh3_128(b"abc").hexdigest()},
        "empty": {"size": 0, "xxh3_128": xxhash.xxh3_128(b"").hexdigest()},
    }
    verify(target)


def test_files_are_hashed_as_they_are_when_they_were_sealed(tmp_path):
    target = tmp_path / "checkpoint-1"
    storage.begin(target)
    sealer = Sealer(target)
    for name in ("agent_0", "agent_1"):
        (storage.stage(target) / name).mkdir()
        (storage.stage(target) / name / "weights").write_text(name)
        sealer.seal(name)
    (storage.stage(target) / "run.json").write_text("{}")
    storage.commit(target, sealer)
    verify(target)
    assert set(json.loads((target / "manifest.json").read_text())["files"]) == {
        "agent_0/weights",
        "agent_1/weights",
        "run.json",
    }


def test_a_save_removes_what_killed_ones_left(tmp_path):
    written(tmp_path / "checkpoint-1", a="1")
    storage.begin(tmp_path / "checkpoint-2")
    (storage.stage(tmp_path / "checkpoint-2") / "a").write_text("half")
    (tmp_path / "wandb").mkdir()
    written(tmp_path / "checkpoint-3", a="3")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-3", "wandb"]


def test_a_checkpoint_takes_the_place_of_one_of_the_same_name(tmp_path):
    written(tmp_path / "checkpoint-1", old="1")
    written(tmp_path / "checkpoint-1", new="2")
    assert sorted(path.name for path in (tmp_path / "checkpoint-1").iterdir()) == ["manifest.json", "new"]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_replacement_killed_between_its_renames_leaves_the_old_one(tmp_path):
    written(tmp_path / "checkpoint-1", old="1")
    os.replace(tmp_path / "checkpoint-1", tmp_path / ".checkpoint-1.replaced")
    checkpoint, skipped = newest_valid([tmp_path])
    assert checkpoint == tmp_path / "checkpoint-1" and not skipped
    verify(checkpoint)


def test_also_where_a_path_is_given(run, tmp_path):
    shutil.copytree(run[0] / "checkpoint-2", tmp_path / ".checkpoint-2.replaced")
    trainer = build(tmp_path, max_steps=4)
    trainer.train(resume_from_checkpoint=tmp_path / "checkpoint-2")
    assert weights_hash(trainer.model) == run[1]


def test_the_newest_is_the_one_that_was_saved_last_wherever_it_lies(tmp_path):
    written(tmp_path / "a" / "checkpoint-30", x="1")
    written(tmp_path / "b" / "checkpoint-4", x="2")
    directories = [tmp_path / "a", tmp_path / "b", tmp_path / "not there"]
    assert newest_valid(directories) == (tmp_path / "b" / "checkpoint-4", [])
    (tmp_path / "b" / "checkpoint-4" / "x").write_text("3")
    checkpoint, (reason,) = newest_valid(directories)
    assert checkpoint == tmp_path / "a" / "checkpoint-30"
    assert "checkpoint-4" in reason and "the content of x is not what was saved" in reason


@pytest.mark.parametrize(
    "manifest", ["", "{", "[]", "{}", '{"files": {}}', '{"saved_at": "x", "files": {}}', '{"saved_at": 1, "files": 3}']
)
def test_a_manifest_that_cannot_be_read_is_named(manifest, tmp_path):
    written(tmp_path / "checkpoint-1", a="1")
    (tmp_path / "checkpoint-1" / "manifest.json").write_text(manifest)
    with pytest.raises(CheckpointError, match=r"checkpoint-1.* is damaged: manifest.json"):
        verify(tmp_path / "checkpoint-1")


def test_only_the_first_failure_of_an_attempt_is_kept():
    attempt, done = Attempt(), []

    def fail(message):
        raise OSError(message)

    for part, argument in ((done.append, 1), (fail, "first"), (done.append, 2), (fail, "second")):
        attempt(part, argument)
    assert done == [1] and str(attempt.error) == "first"


def test_tensors_are_read_back_and_torchs_checksums_are_there_for_others(tmp_path):
    storage.save_tensors({"a": torch.arange(3)}, tmp_path / "a.pt")
    assert torch.load(tmp_path / "a.pt", weights_only=True)["a"].tolist() == [0, 1, 2]
    assert torch.serialization.get_crc32_options()


# A team's checkpoints


def build(directory, **options):
    return team_with_critics("MAAC", directory, **{"save_strategy": "steps", "save_steps": 1, **options})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A whole run of four steps, whose second checkpoint is kept."""
    directory = tmp_path_factory.mktemp("run")
    trainer = build(directory, max_steps=4)
    trainer.train()
    return directory, weights_hash(trainer.model)


@pytest.fixture
def copied(run, tmp_path):
    """The second checkpoint, and a copy of it as the fourth."""
    for number in (2, 4):
        shutil.copytree(run[0] / "checkpoint-2", tmp_path / f"checkpoint-{number}")
    return tmp_path


FILES = [
    "trainer_state.json",
    "run.json",
    "optimizer.pt",
    "scheduler.pt",
    "process_0.pt",
    "agent_0/config.json",
    "agent_1/model.safetensors",
    "agent_1/tokenizer.json",
    "critic/model.safetensors",
    "critic/value_head.pt",
]


class TestDamagedCheckpoints:
    @pytest.mark.parametrize("name", FILES)
    @pytest.mark.parametrize("damage", ["removed", "cut", "a bit"])
    def test_a_checkpoint_is_not_resumed_and_nothing_of_it_is_loaded(self, name, damage, copied):
        """B04"""
        path = copied / "checkpoint-4" / name
        content = path.read_bytes()
        if damage == "removed":
            path.unlink()
        elif damage == "cut":
            path.write_bytes(content[:-1])
        else:
            path.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
        trainer = build(copied, max_steps=4)
        before = weights_hash(trainer.model)
        with pytest.raises(CheckpointError, match=rf"checkpoint-4.* is (damaged|not complete): .*{name}"):
            trainer.train(resume_from_checkpoint=str(copied / "checkpoint-4"))
        assert weights_hash(trainer.model) == before and trainer.state.global_step == 0

    @pytest.mark.parametrize("name", ["trainer_state.json", "agent_1/model.safetensors", "critic/value_head.pt"])
    def test_the_newest_whole_one_is_taken_and_the_other_named(self, name, copied, run, caplog):
        """B04: also an empty directory with a larger number."""
        (copied / "checkpoint-4" / name).unlink()
        (copied / "checkpoint-99").mkdir()
        trainer = build(copied, max_steps=4)
        with caplog.at_level(logging.WARNING):
            trainer.train(resume_from_checkpoint=True)
        for said in (
            f"checkpoint-4' is not complete: {name} is missing",
            "checkpoint-99' is no checkpoint of a team that was saved to its end: it has no manifest.json",
            f"The training goes on from {copied / 'checkpoint-2'}",
        ):
            assert said in caplog.text
        assert weights_hash(trainer.model) == run[1]

    def test_without_a_whole_one_the_reasons_are_given(self, tmp_path):
        (tmp_path / "checkpoint-99").mkdir()
        with pytest.raises(
            CheckpointError, match=r"hold no checkpoint that is whole.*checkpoint-99.*no manifest.json"
        ):
            build(tmp_path).train(resume_from_checkpoint=True)

    @pytest.mark.parametrize("path", ["nowhere", "agent_0"])
    def test_a_path_that_is_no_checkpoint_is_named(self, path, copied):
        with pytest.raises(CheckpointError, match=f"{path}.* is no checkpoint of a team"):
            build(copied).train(resume_from_checkpoint=copied / "checkpoint-2" / path)

    @pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "process_0.pt", "critic/value_head.pt"])
    def test_no_code_in_a_checkpoint_is_run(self, name, copied):
        """It has a right manifest, as one that somebody else made."""
        path, proof = copied / "checkpoint-4" / name, copied / "was run"

        class Code:
            def __reduce__(self):
                return os.mkdir, (str(proof),)

        torch.save(Code(), path)
        manifest = json.loads((copied / "checkpoint-4" / "manifest.json").read_text())
        content = path.read_bytes()
        manifest["files"][name] = {"size": len(content), "xxh3_128": xxhash.xxh3_128(content).hexdigest()}
        (copied / "checkpoint-4" / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises((pickle.UnpicklingError, ValueError)):
            build(copied, max_steps=4).train(resume_from_checkpoint=copied / "checkpoint-4")
        assert not proof.exists()


# Saves that fail


class FullDisk:
    """Lets no file grow beyond some bytes while a checkpoint is written; the third save of a run."""

    def __init__(self, size: int):
        self.size = size

    def install(self, patch):
        begin, discard, commit = storage.begin, storage.discard, storage.commit
        saves = []

        def limited(target):
            begin(target)
            saves.append(target)
            if len(saves) == 3:
                self.limit(self.size)

        patch.setattr(storage, "begin", limited)
        patch.setattr(storage, "discard", lambda target: (self.limit(None), discard(target)))
        patch.setattr(storage, "commit", lambda *args: (commit(*args), self.limit(None)))

    @staticmethod
    def limit(size: int | None):
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard if size is None else size, hard))


class Failure:
    """A function that fails, the first time after the second save."""

    def __init__(self, owner, name: str, call: int = 1):
        self.owner, self.name, self.call = owner, name, call

    def install(self, patch):
        original, write = getattr(self.owner, self.name), team_checkpoints.TeamCheckpoints._write
        saves, calls = [], []

        def counted(trainer, *args):
            saves.append(args)
            calls.clear()
            return write(trainer, *args)

        def failing(*args, **kwargs):
            calls.append(args)
            if len(saves) == 3 and len(calls) == self.call:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return original(*args, **kwargs)

        patch.setattr(team_checkpoints.TeamCheckpoints, "_write", counted)
        patch.setattr(self.owner, self.name, failing)


class Kept(TrainerCallback):
    """What lies in the output directory after each step."""

    def __init__(self):
        self.names: list[list[str]] = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.names.append(sorted(path.name for path in Path(args.output_dir).iterdir()))


FAILURES = {
    **{f"files of {size} bytes": FullDisk(size) for size in (0, 300, 3_000, 9_000)},
    "no directory": Failure(storage, "begin"),
    "first actor": Failure(export, "_save_entity", 1),
    "second actor": Failure(export, "_save_entity", 2),
    "critic": Failure(export, "_save_entity", 3),
    **{f"tensors {number}": Failure(storage, "save_tensors", number) for number in (1, 2, 3)},
    "run": Failure(team_checkpoints.TeamCheckpoints, "_write_run"),
    "sync": Failure(os, "fsync", 4),
    "hash": Failure(storage, "_hash", 2),
    "rename": Failure(os, "replace"),
}


class TestSavesThatFail:
    @pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
    def test_the_run_and_the_checkpoint_before_are_intact(self, failure, run, tmp_path, monkeypatch, caplog):
        """The third of four saves fails."""
        trainer, kept = build(tmp_path, max_steps=4, save_total_limit=2), Kept()
        trainer.add_callback(kept)
        with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
            failure.install(patch)
            trainer.train()
        assert weights_hash(trainer.model) == run[1]
        (error,) = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert error.getMessage().startswith(f"The checkpoint {tmp_path / 'checkpoint-3'} could not be saved: ")
        assert "The training goes on; earlier checkpoints are untouched." in error.getMessage()
        assert kept.names == [[], ["checkpoint-1"], ["checkpoint-1", "checkpoint-2"], ["checkpoint-1", "checkpoint-2"]]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-4"]
        verify(tmp_path / "checkpoint-2")
        resumed = build(tmp_path, max_steps=4)
        resumed.train(resume_from_checkpoint=tmp_path / "checkpoint-2")
        assert weights_hash(resumed.model) == run[1]

    def test_a_state_that_becomes_odd_during_the_run_is_named_and_the_run_goes_on(self, run, tmp_path, caplog):
        class Odd(TrainerCallback):
            state = None

            def on_step_end(self, args, state, control, **kwargs):
                self.state = object() if state.global_step == 2 else None

            def state_dict(self):
                return {"value": self.state}

            def load_state_dict(self, state):
                self.state = state["value"]

        trainer = build(tmp_path, max_steps=4)
        trainer.add_callback(Odd())
        with caplog.at_level(logging.ERROR):
            trainer.train()
        assert "checkpoint-2 could not be saved: TypeError" in caplog.text
        assert "['callback Odd']['value'] is a builtins.object" in caplog.text
        assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-3", "checkpoint-4"]
        assert weights_hash(trainer.model) == run[1]

    def test_a_state_that_cannot_be_told_is_named_and_the_run_goes_on(self, run, tmp_path, caplog):
        class Fails(TrainerCallback):
            step = 0

            def on_step_end(self, args, state, control, **kwargs):
                self.step = state.global_step

            def state_dict(self):
                if self.step == 2:
                    raise OSError("the service is away")
                return {}

            def load_state_dict(self, state):
                pass

        trainer = build(tmp_path, max_steps=4)
        trainer.add_callback(Fails())
        with caplog.at_level(logging.ERROR):
            trainer.train()
        assert "checkpoint-2 could not be saved: OSError: the service is away" in caplog.text
        assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-3", "checkpoint-4"]
        assert weights_hash(trainer.model) == run[1]

    def test_the_best_checkpoint_stays_the_one_that_is_there(self, tmp_path, monkeypatch):
        """B42: the save of what would be the best fails."""
        options = {
            "eval_strategy": "steps",
            "eval_steps": 1,
            "metric_for_best_model": "reward",
            "load_best_model_at_end": True,
        }
        calls = []

        def always_better(*completions):
            calls.append(completions)
            return [float(len(calls))] * len(completions[0])

        kwargs = {"eval_dataset": dataset(2), "reward_func": always_better}
        trainer = build(tmp_path, max_steps=3, kwargs=kwargs, **options)
        with monkeypatch.context() as patch:
            Failure(team_checkpoints.TeamCheckpoints, "_write_run").install(patch)
            trainer.train()
        assert trainer.state.best_global_step == 3
        assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
