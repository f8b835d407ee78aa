# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""
Runs that are killed while they save, at a random moment, and resumed.

Moments are drawn in two ways: among the operations on files, as the interpreter's audit hooks see them, which is
between two files; and from the time that a save takes, which is within the writing of one. Each part of a run is a
process, forked from one that has imported everything: `python <this file> <directory>`.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parents[2]
STEPS = 4
# The documents' checkpoints are written over older ones where a run goes back to an earlier one
KINDS = {"steps": "output_dir", "epochs": "checkpoint_dir", "replacing": "checkpoint_dir"}
KILLS_BY_OPERATION, KILLS_BY_TIME = 6, 4


# In the test's own process


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    directory = tmp_path_factory.mktemp("killed")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "OMP_NUM_THREADS": "1",  # forked processes have no threads but one
    }
    command = [sys.executable, __file__, str(directory)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((directory / "report.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_killed_save_can_be_resumed_and_the_end_is_the_same(kind, report):
    """B04: 30 kills in all."""
    kills = report[kind]["kills"]
    assert len(kills) == KILLS_BY_OPERATION + KILLS_BY_TIME
    for kill in kills:
        assert kill["status"] == -signal.SIGKILL, kill
        assert kill["resumed"] == report[kind]["end"], kill
        assert kill["steps"][-1] == STEPS, kill
    assert sum(kill["left_a_stage"] for kill in kills) >= 3  # some were killed in the midst


# In the process that starts the parts


def in_a_fork(work: Callable[[], None]) -> int:
    """Do some work in a forked process; return its exit status, negative for a signal."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def train(directory: Path, kind: str, resume=None, kill: "Kill | None" = None, result: str | None = None) -> None:
    """A part of a run: four steps of one epoch each."""
    from critic_teams import team_with_critics
    from tiny import dataset, weights_hash
    from transformers import TrainerCallback

    class Seen(TrainerCallback):
        steps: list[int] = []

        def on_step_end(self, args, state, control, **kwargs):
            self.steps.append(state.global_step)

    options = {"max_steps": -1, "num_train_epochs": STEPS, "lr_scheduler_type": "constant"}
    options |= {"save_strategy": "steps", "save_steps": 1} if kind == "steps" else {"save_strategy": "no"}
    trainer = team_with_critics("MAAC", directory, kwargs={"train_dataset": dataset(2)}, **options)
    trainer.add_callback(Seen())
    if kill is not None:
        kill.install(trainer)
    trainer.train(resume_from_checkpoint=resume, checkpoint_dir=None if kind == "steps" else directory / "checkpoints")
    if result is not None:
        weights = [
            weights_hash(trainer.model),
            [row["reward"] for row in trainer.state.log_history if "reward" in row],
        ]
        (directory / result).write_text(json.dumps({"end": weights, "steps": Seen.steps}))


class Kill:
    """
    Kills its process in the save after some step.

    Args:
        step (`int`):
            The step.
        operation (`int`, *optional*):
            The operation on files, counted in that save, before which it kills.
        after (`float`, *optional*):
            Seconds of that save after which it kills.
        count (`str` or path, *optional*):
            Does not kill: writes how many operations there are, and how many seconds the save takes.
    """

    def __init__(self, step, operation=None, after=None, count=None):
        self.step, self.operation, self.after, self.count = step, operation, after, count

    def install(self, trainer) -> None:
        write, seen, saving = trainer._write, [], []

        def on_event(event, arguments):
            if saving and (event == "open" or event.startswith(("os.", "shutil."))):
                seen.append(event)
                if len(seen) == self.operation:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(on_event)

        def watched(*args):
            if trainer.state.global_step != self.step:
                return write(*args)
            saving.append(True)
            if self.after is not None:
                threading.Timer(self.after, os.kill, (os.getpid(), signal.SIGKILL)).start()
            start = time.perf_counter()
            written = write(*args)
            seconds = time.perf_counter() - start
            saving.clear()
            if self.count is not None:
                Path(self.count).write_text(json.dumps([len(seen), seconds]))
            if self.after is not None:
                time.sleep(60)  # the save was quicker than the time that was drawn
            return written

        trainer._write = watched


def kills_of(kind: str, directory: Path, draw: random.Random) -> dict:
    """What became of each kill of a kind of run."""
    whole = directory / "whole"
    whole.mkdir(parents=True)
    assert in_a_fork(partial(train, whole, kind, kill=Kill(2, count=whole / "count"), result="result")) == 0
    (operations, seconds), end = json.loads((whole / "count").read_text()), json.loads((whole / "result").read_text())
    moments = [{"operation": draw.randint(1, operations)} for _ in range(KILLS_BY_OPERATION)]
    moments += [{"after": draw.uniform(0, seconds)} for _ in range(KILLS_BY_TIME)]
    kills = []
    for number, moment in enumerate(moments):
        run = directory / f"run {number}"
        step, resume = draw.choice([2, 3]), None
        if kind == "replacing":
            shutil.copytree(whole, run)
            resume = run / "checkpoints" / "checkpoint-1"
        else:
            run.mkdir()
        status = in_a_fork(partial(train, run, kind, resume=resume, kill=Kill(step, **moment)))
        left = bool(list(run.rglob(".checkpoint-*.partial")))
        resumed = in_a_fork(partial(train, run, kind, resume=True, result="resumed"))
        if resumed != 0:
            raise RuntimeError(f"{kind}, {moment}, step {step}: the resumed run ended with {resumed}")
        after = json.loads((run / "resumed").read_text())
        steps = after["steps"] or [STEPS]  # the newest may have been that of the end
        kills.append(
            {
                "moment": moment,
                "step": step,
                "status": status,
                "left_a_stage": left,
                "resumed": after["end"],
                "steps": steps,
            }
        )
    return {"end": end["end"], "operations": operations, "seconds": seconds, "kills": kills}


def main(directory: Path) -> None:
    import critic_teams  # noqa: F401
    import deepspeed  # noqa: F401
    import torch

    torch.set_num_threads(1)
    report = {kind: kills_of(kind, directory / kind, random.Random(kind)) for kind in KINDS}
    (directory / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
