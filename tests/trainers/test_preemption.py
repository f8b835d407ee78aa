# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""SIGTERM: a run saves what it has, says where, and goes on from there as if it had not been ended."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from critic_teams import team_with_critics
from tiny import dataset, weights_hash, word_reward
from transformers import TrainerCallback

from trl_multiagent import read_checkpoint_metadata
from trl_multiagent.checkpoints import storage
from trl_multiagent.trainers.preemption import EXIT_CODE


ROOT = Path(__file__).resolve().parents[2]


class TermAtStep(TrainerCallback):
    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


class TermInReward:
    """SIGTERM while rewards of some call are computed."""

    __name__ = "word_reward"

    def __init__(self, call: int | None = None):
        self.calls, self.call = 0, call

    def __call__(self, *completions):
        self.calls += 1
        if self.calls == self.call:
            os.kill(os.getpid(), signal.SIGTERM)
        return word_reward(*completions)


class Tracker(TrainerCallback):
    """A callback that logs to a run elsewhere."""

    tracker = "own"
    preempted = 0

    def identity(self):
        return {"id": "a"}

    def continue_run(self, identity):
        pass

    def on_preemption(self):
        self.preempted += 1


def build(directory, callbacks=(), reward=None, rows=4, **options):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 100, **options}
    kwargs = {"callbacks": [*callbacks], "reward_func": reward or TermInReward(), "train_dataset": dataset(rows)}
    return team_with_critics("MAAC", directory, kwargs=kwargs, **options)


def ended(trainer, caplog, **kwargs) -> str:
    """Train until SIGTERM ends it; return what was said."""
    with caplog.at_level(logging.WARNING), pytest.raises(SystemExit) as exit:
        trainer.train(**kwargs)
    assert exit.value.code == EXIT_CODE == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    (said,) = [record.getMessage() for record in caplog.records if "SIGTERM" in record.getMessage()]
    return said


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Weights at the end of a run that is left alone, by options."""
    known = {}

    def of(**options):
        if str(options) not in known:
            trainer = build(tmp_path_factory.mktemp("whole"), **options)
            trainer.train()
            known[str(options)] = weights_hash(trainer.model)
        return known[str(options)]

    return of


def test_the_step_that_was_done_is_saved_and_the_run_can_go_on(tmp_path, caplog, whole):
    tracker = Tracker()
    said = ended(build(tmp_path, [TermAtStep(2), tracker]), caplog)
    saved = tmp_path / "checkpoint-2"
    assert said == f"The training was ended by SIGTERM after 2 optimizer steps. It can be resumed from {saved}."
    assert tracker.preempted == 1 and read_checkpoint_metadata(saved)["step"] == 2
    resumed = build(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert weights_hash(resumed.model) == whole()


@pytest.mark.parametrize("call", [4, 5, 6])
@pytest.mark.parametrize("num_iterations", [1, 2])
def test_within_an_accumulation_the_last_whole_step_is_saved(call, num_iterations, tmp_path, caplog, whole):
    """Each step takes three micro-batches, two prompts each; what was done of the next is done again."""
    options = {"gradient_accumulation_steps": 3, "steps_per_generation": 1, "rows": 24}
    options |= {"num_iterations": num_iterations}
    said = ended(build(tmp_path, reward=TermInReward(2 * call), **options), caplog)
    micro_batches = num_iterations * (call - 1) + 1  # the one at whose generation it came is finished
    assert f"after {micro_batches // 3} optimizer steps" in said
    resumed = build(tmp_path, **options)
    resumed.train(resume_from_checkpoint=True)
    assert weights_hash(resumed.model) == whole(**options)


def test_a_checkpoint_that_is_there_is_not_written_again(tmp_path, caplog, monkeypatch):
    commits = []
    commit = storage.commit
    monkeypatch.setattr(storage, "commit", lambda target, *args: (commits.append(target), commit(target, *args)))
    said = ended(build(tmp_path, [TermAtStep(2)], save_steps=1), caplog)
    assert f"resumed from {tmp_path / 'checkpoint-2'}." in said
    assert [Path(target).name for target in commits] == ["checkpoint-1", "checkpoint-2"]


def test_it_is_saved_where_the_documents_checkpoints_are(tmp_path, caplog, whole):
    """In the second epoch, of two steps each; the checkpoint is written again when the epoch ends."""
    options = {"max_steps": -1, "num_train_epochs": 3, "save_strategy": "no"}
    said = ended(build(tmp_path, [TermAtStep(3)], **options), caplog, checkpoint_dir=tmp_path / "saved")
    assert f"after 3 optimizer steps. It can be resumed from {tmp_path / 'saved' / 'checkpoint-2'}." in said
    resumed = build(tmp_path, **options)
    resumed.train(resume_from_checkpoint=True, checkpoint_dir=tmp_path / "saved")
    assert weights_hash(resumed.model) == whole(**options)
    assert read_checkpoint_metadata(tmp_path / "saved" / "checkpoint-2")["step"] == 4


def test_before_the_first_step_there_is_nothing_to_save(tmp_path, caplog):
    options = {"gradient_accumulation_steps": 2, "steps_per_generation": 1}
    said = ended(build(tmp_path, reward=TermInReward(1), **options), caplog)
    assert "after 0 optimizer steps. No step was done yet, so nothing was saved." in said
    assert not list(tmp_path.iterdir())


def test_after_a_resume_and_before_a_step_the_checkpoint_is_named(tmp_path, caplog):
    build(tmp_path, max_steps=4, save_steps=1).train()
    trainer = build(tmp_path, reward=TermInReward(1), gradient_accumulation_steps=1)
    said = ended(trainer, caplog, resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert "SIGTERM after 3 optimizer steps" in said and str(tmp_path / "checkpoint-3") in said


def test_all_is_saved_though_other_checkpoints_are_models_only(tmp_path, caplog, whole):
    said = ended(build(tmp_path, [TermAtStep(2)], save_steps=1, save_only_model=True), caplog)
    assert f"It can be resumed from {tmp_path / 'checkpoint-2'}." in said
    resumed = build(tmp_path, save_steps=1, save_only_model=True)
    resumed.train(resume_from_checkpoint=tmp_path / "checkpoint-2")
    assert weights_hash(resumed.model) == whole()


def test_where_the_save_fails_that_is_said(tmp_path, caplog, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage, "commit", full)
    said = ended(build(tmp_path, [TermAtStep(2)]), caplog)
    assert "after 2 optimizer steps. No checkpoint could be saved." in said
    assert "No space left on device" in caplog.text and not list(tmp_path.iterdir())


def test_at_the_last_step_the_run_is_complete_and_the_program_gets_its_signal(tmp_path, whole, monkeypatch):
    raised = []
    monkeypatch.setattr(signal, "raise_signal", raised.append)
    trainer = build(tmp_path, [TermAtStep(4)])
    trainer.train()
    assert raised == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert weights_hash(trainer.model) == whole() and (tmp_path / "checkpoint-4").is_dir()


class SeesHandler(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        self.handler = signal.getsignal(signal.SIGTERM)


def test_a_run_that_saves_nothing_ends_at_once_as_any_program(tmp_path):
    seen = SeesHandler()
    build(tmp_path, [seen], save_strategy="no").train()
    assert seen.handler is signal.SIG_DFL


def test_the_programs_own_handler_is_left_alone(tmp_path):
    def handler(signum, frame):
        pass

    seen = SeesHandler()
    signal.signal(signal.SIGTERM, handler)
    try:
        build(tmp_path, [seen, TermAtStep(2)]).train()
        assert seen.handler is handler is signal.getsignal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_a_training_in_another_thread_takes_no_signals(tmp_path):
    seen = SeesHandler()
    trainer = build(tmp_path, [seen])
    thread = threading.Thread(target=trainer.train)
    thread.start()
    thread.join(120)
    assert trainer.state.global_step == 4 and seen.handler is signal.SIG_DFL


# Under `accelerate launch`, which does not pass SIGTERM on: `python <this file> <directory>`


def train_slowly(directory: str) -> None:
    class Slow(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            (Path(directory) / "steps").write_text(str(state.global_step))
            time.sleep(0.2)

    trainer = build(Path(directory) / "run", [Slow()], max_steps=300, save_steps=1000)
    trainer.train()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("processes", [1, 2])
def test_accelerate_launch_is_ended(processes, tmp_path):
    launcher = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--num_machines", "1"]
    launcher += ["--mixed_precision", "no", "--dynamo_backend", "no", "--num_processes", str(processes)]
    launcher += ["--cpu"] if processes == 1 else ["--multi_gpu"]  # the latter's launcher, on the CPU
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    environment |= {} if processes == 1 else {"ACCELERATE_USE_CPU": "true"}
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(
            [*launcher, __file__, str(tmp_path)], env=environment, stdout=log, stderr=subprocess.STDOUT
        )
        steps = tmp_path / "steps"
        for _ in range(600):
            time.sleep(0.2)
            if process.poll() is not None or (steps.is_file() and int(steps.read_text() or 0) >= 3):
                break
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    for _ in range(300):
        time.sleep(0.2)
        if "It can be resumed from" in (tmp_path / "log").read_text():
            break
    (checkpoint,) = (tmp_path / "run").glob("checkpoint-*")
    step = read_checkpoint_metadata(checkpoint)["step"]
    assert checkpoint.name == f"checkpoint-{step}" and 3 <= step < 300
    storage.verify(checkpoint)
    assert len(list(checkpoint.glob("process_*.pt"))) == processes
    assert f"SIGTERM after {step} optimizer steps. It can be resumed from" in (tmp_path / "log").read_text()


if __name__ == "__main__":
    train_slowly(sys.argv[1])
