# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""
Preference trainers that are ended inside a phase (while pairs are collected, while the reward model is learned, while
the team is trained) and go on as the run that never ended, to the bit.

Ended means SIGTERM or, for a run in a process of its own, SIGKILL, always sent by the process to itself. This file is
also the script of those processes, which are forked from one that has imported everything: `python <this file>
<directory>`.
"""

import functools
import hashlib
import json
import logging
import os
import pickle
import random
import signal
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from tiny import dataset, llama, lm, preference_args, tok, word_reward
from transformers import TrainerCallback

from trl_multiagent import (
    JointRewardTrainer,
    MADPOConfig,
    MADPOIterConfig,
    MADPOIterTrainer,
    MADPOTrainer,
    MARLHFConfig,
    MARLHFIterConfig,
    MARLHFIterTrainer,
    MARLHFTrainer,
)
from trl_multiagent.checkpoints.storage import newest_valid
from trl_multiagent.trainers.preemption import EXIT_CODE


ROOT = Path(__file__).resolve().parents[2]
TASKS = 6
SAVE_STEPS = 2  # of runs that are killed; those that are ended by SIGTERM save nothing else


# A run, and the moments at which it can be ended


@dataclass(frozen=True)
class Moment:
    """
    A moment of a run.

    Attributes:
        phase (`str`): `"collect"`, of which a moment is the scoring of answers; `"learn"`, a micro-step of the reward
            model; or `"train"`, a micro-step of the team or the scoring of one of its samples by the reward model.
        iteration (`int`): the iteration that the phase is part of.
        number (`int`): which moment of the phase, from 1 on.
    """

    phase: str
    iteration: int
    number: int


class Moments(TrainerCallback):
    """
    Notes the moments of a run, and sends a signal to its own process at one of them.

    Args:
        at ([`Moment`], *optional*): when.
        signum (`int`): the signal.
        scored_tasks (`dict[int, int]`): how many tasks, the first ones, have rewards in an iteration; default all.
    """

    def __init__(self, at: Moment | None, signum: int, scored_tasks: dict[int, int]):
        self.at, self.signum, self.scored_tasks = at, signum, scored_tasks
        self.phase, self.counts = "train", Counter()

    def watch(self, trainer) -> None:
        self.trainer = trainer
        trainer._collect_pairs = self._within("collect", trainer._collect_pairs)
        if isinstance(trainer, MARLHFTrainer):
            trainer._learn_reward = self._within("learn", trainer._learn_reward)
            trainer._learned_reward.funcs[0] = self._noted(trainer._learned_reward.funcs[0])

    def _within(self, phase: str, work: Callable) -> Callable:
        def watched(*args):
            self.phase = phase
            noted = self._noted(JointRewardTrainer.training_step)
            with mock.patch.object(JointRewardTrainer, "training_step", noted):
                result = work(*args)
            self.phase = "train"
            return result

        return watched

    def _noted(self, work: Callable) -> Callable:
        def noted(*args, **kwargs):
            self.note()
            return work(*args, **kwargs)

        return noted

    @property
    def iteration(self) -> int:
        return self.trainer._iteration + (self.phase == "collect")

    def note(self) -> None:
        key = self.phase, self.iteration
        self.counts[key] += 1
        if self.at == Moment(*key, self.counts[key]):
            os.kill(os.getpid(), self.signum)

    def on_substep_end(self, args, state, control, **kwargs):
        self.note()

    def on_step_end(self, args, state, control, **kwargs):
        self.note()

    def reward(self, *completions, batch_items):
        self.note()
        scored = self.scored_tasks.get(self.iteration, TASKS)
        rewards = word_reward(*completions)
        return [
            reward if int(row["gold"][1:]) < scored else 0.0 for reward, row in zip(rewards, batch_items, strict=True)
        ]


def with_random_words(row):
    """A formatter that draws from every generator: what it says is not in the dataset."""
    return f"{row['prompt']} w{random.randrange(20)} w{np.random.randint(20)} w{int(torch.randint(20, ()))}"


TRAINERS = {
    "MADPO": (MADPOConfig, MADPOTrainer),
    "MADPOIter": (MADPOIterConfig, MADPOIterTrainer),
    "MARLHF": (MARLHFConfig, MARLHFTrainer),
    "MARLHFIter": (MARLHFIterConfig, MARLHFIterTrainer),
}


@dataclass
class Case:
    """
    A run.

    Attributes:
        kind (`str`): its trainer.
        options (`dict`): those of its config.
        boundaries (`bool`): whether it saves at boundaries, and not by steps.
        scored_tasks (`dict[int, int]`): see [`Moments`].
        ends (list of [`Moment`]): when it is ended, in order; default: at least once in each of its phases.
    """

    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    boundaries: bool = False
    scored_tasks: dict[int, int] = field(default_factory=dict)
    ends: list[Moment] = field(default_factory=list)

    def build(self, directory: Path, at: Moment | None = None, signum: int = signal.SIGTERM, save_steps: int = 100):
        """A trainer, and the moments of its run."""
        config_class, trainer_class = TRAINERS[self.kind]
        moments = Moments(at, signum, self.scored_tasks)
        # Two tasks are answered at once; an optimizer step takes two micro-steps
        options = {"max_completion_length": 4, "preference_batch_size": 8, "gradient_accumulation_steps": 2}
        options |= {"per_device_train_batch_size": 2, "save_steps": save_steps}
        options |= {"save_strategy": "no" if self.boundaries else "steps"}
        kwargs = {}
        if self.kind.startswith("MARLHF"):
            options |= {"num_generations": 2, "reward_learning_rate": 1e-2, "reward_train_batch_size": 4}
            options |= {"reward_model_name": str(reward_source(directory.parent))}
        if self.options.get("rl_algorithm") == "maac":
            kwargs["critic_model"] = lm(7)
        trainer = trainer_class(
            agents=[lm(0), llama(1)],
            tokenizer=tok(),
            reward_func=moments.reward,
            formatters=with_random_words,
            train_dataset=dataset(TASKS),
            args=preference_args(config_class, directory, **{**options, **self.options}),
            callbacks=[moments],
            **kwargs,
        )
        moments.watch(trainer)
        return trainer, moments

    def train(self, trainer) -> None:
        """Go on from the newest checkpoint in the run's directory, or begin."""
        directory = Path(trainer.args.output_dir)
        trainer.train(
            resume_from_checkpoint=bool(checkpoints(directory)),
            checkpoint_dir=directory / "saved" if self.boundaries else None,
        )

    def ends_of(self, counts: dict[tuple[str, int], int]) -> list[Moment]:
        """When a run that has so many moments of each phase is ended."""
        if self.ends:
            return self.ends
        ends = []
        for (phase, iteration), count in counts.items():
            if phase == "train":
                ends.append(Moment(phase, iteration, 1))  # before the first step of the phase
            ends.append(Moment(phase, iteration, (count + 1) // 2))
        return ends


def checkpoints(directory: Path) -> list[Path]:
    return [*directory.glob("checkpoint-*"), *(directory / "saved").glob("checkpoint-*")]


def reward_source(directory: Path) -> Path:
    """What a reward model is learned from."""
    source = directory / "reward source"
    if not source.is_dir():
        llama(9).save_pretrained(source)
        tok().save_pretrained(source)
    return source


CASES = {
    "MADPO": Case("MADPO", {"num_train_epochs": 2}),
    "MADPOIter, history": Case(
        "MADPOIter",
        {
            "num_iterations": 3,
            "comparator_policy": "history",
            "comparator_history_k": 1,
            "preference_replay_mode": "lambda_decay",
            "preference_replay_lambda": 0.6,
            "preference_replay_sample_size": 10,
        },
    ),
    # The second iteration has more pairs than the first and so a longer schedule; the third and fourth have none
    "MADPOIter, uneven": Case(
        "MADPOIter",
        {"num_iterations": 5, "comparator_policy": "history", "comparator_history_k": 1},
        scored_tasks={0: 3, 2: 0, 3: 0},
        ends=[Moment("collect", 1, 12), Moment("collect", 4, 6)],
    ),
    "MARLHF by MAGRPO": Case("MARLHF", {"rl_algorithm": "magrpo"}),
    "MARLHF by MAAC": Case("MARLHF", {"rl_algorithm": "maac", "num_iterations": 2}),
    "MARLHF by MAREINFORCE, boundaries": Case(
        "MARLHF", {"rl_algorithm": "mareinforce", "num_train_epochs": 2}, boundaries=True
    ),
    "MARLHFIter": Case(
        "MARLHFIter",
        {
            "num_train_epochs": 1,
            "num_iterations": 2,
            "preference_scoring_reward": "reward_model",
            "comparator_policy": "history",
            "comparator_history_k": 1,
            "preference_replay_mode": "nearest_k",
            "preference_replay_k": 2,
        },
    ),
}


# What a run came to


def outcome(trainer, directory: Path) -> dict[str, Any]:
    """The exports (team, critics and reward model), what else the run's future comes from, its log and its files."""
    trainer.save_model(str(directory / "export"))
    return {
        "export": weights_below(directory / "export"),
        "optimizer": [
            {name: digest(value) for name, value in trainer.optimizer.state[parameter].items()}
            for parameter in trainer.model.parameters()
            if parameter in trainer.optimizer.state
        ],
        "schedule": trainer.lr_scheduler.state_dict(),
        "random numbers": [digest(random.getstate()), digest(np.random.get_state()), digest(torch.get_rng_state())],
        "counts": [trainer.state.global_step, trainer.state.max_steps, trainer.state.epoch, trainer.env_step],
        "log": [
            {name: value for name, value in row.items() if not name.endswith("step_time")}
            for row in trainer.state.log_history
            if "train_runtime" not in row
        ],
        "pairs": pairs_below(directory / "preferences"),
        "policies": weights_below(directory / "policies"),
        "boundaries": weights_below(directory / "saved"),
    }


def weights_below(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): digest(path.read_bytes())
        for path in sorted(directory.rglob("*.safetensors"))
    }


def pairs_below(directory: Path) -> dict[str, str]:
    """The pairs of each iteration, which are the same wherever they were written."""
    found: dict[str, set[str]] = {}
    for path in directory.rglob("*"):
        if path.is_file():
            found.setdefault(path.name, set()).add(digest(path.read_bytes()))
    assert all(len(texts) == 1 for texts in found.values()), found
    return {name: texts.pop() for name, texts in sorted(found.items())}


def digest(value: Any) -> str:
    """A hash of every bit of a tensor, or of plain data."""
    if isinstance(value, torch.Tensor):
        value = (str(value.dtype), value.shape, value.detach().contiguous().flatten().view(torch.uint8).numpy())
    return hashlib.sha256(pickle.dumps(value)).hexdigest()[:12]


@dataclass
class Whole:
    """A run that is not ended: what it came to, and when it can be ended."""

    outcome: dict[str, Any]
    ends: list[Moment]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    @functools.cache
    def run(name: str) -> Whole:
        case, directory = CASES[name], tmp_path_factory.mktemp("whole") / "run"
        trainer, moments = case.build(directory)
        case.train(trainer)
        return Whole(outcome(trainer, directory), case.ends_of(moments.counts))

    return run


def goes_on_to(expected: dict[str, Any], case: Case, directory: Path, **options) -> None:
    """The rest of a run comes to what is expected of the whole."""
    trainer, _ = case.build(directory, **options)
    case.train(trainer)
    found = outcome(trainer, directory)
    assert found == expected, [name for name in expected if found[name] != expected[name]]


# SIGTERM


@pytest.mark.parametrize("name", CASES)
def test_sigterm_in_every_phase(name, whole, tmp_path, caplog):
    """
    Nothing is saved before there is what could be gone on with: a step of a team, or its learned reward. Later what
    is said to be saved is the newest checkpoint, and the run goes on from it, also when it is ended again.
    """
    case, directory = CASES[name], tmp_path / "run"
    for end in whole(name).ends:
        trainer, _ = case.build(directory, end)
        caplog.clear()
        with caplog.at_level(logging.WARNING), pytest.raises(SystemExit) as exit:
            case.train(trainer)
        assert exit.value.code == EXIT_CODE and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        (said,) = [record.getMessage() for record in caplog.records if "SIGTERM" in record.getMessage()]
        assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
        has_begun = end.iteration > 0 or end.phase == "train" and (case.kind.startswith("MARLHF") or end.number > 1)
        if has_begun:
            newest, _ = newest_valid([directory, directory / "saved"])
            assert said.endswith(f"It can be resumed from {newest}."), end
        else:
            assert said.endswith("after 0 optimizer steps. No step was done yet, so nothing was saved."), end
            assert not checkpoints(directory)
    goes_on_to(whole(name).outcome, case, directory)


# SIGKILL


@pytest.fixture(scope="module")
def killed(whole, tmp_path_factory) -> Path:
    """Where each case's run was killed in every phase, one after the other, and not gone on with after the last."""
    directory = tmp_path_factory.mktemp("killed")
    # Before the first step of a phase there is no other checkpoint than while it is prepared
    ends = {name: [vars(end) for end in whole(name).ends if (end.phase, end.number) != ("train", 1)] for name in CASES}
    (directory / "ends.json").write_text(json.dumps(ends))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "OMP_NUM_THREADS": "1",  # forked processes have no threads but one
    }
    command = [sys.executable, __file__, str(directory)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_sigkill_in_every_phase(name, whole, killed):
    """
    Without a checkpoint the run begins anew in the same directory, with one it goes on from there; what the killed
    ones left (pairs, policies) does not change it.
    """
    goes_on_to(whole(name).outcome, CASES[name], killed / name / "run", save_steps=SAVE_STEPS)


# In the process that starts those that are killed


def kill_in_every_phase(directory: Path) -> None:
    import deepspeed  # noqa: F401  each fork would import it

    for name, ends in json.loads((directory / "ends.json").read_text()).items():
        (directory / name).mkdir()
        for end in ends:
            status = in_a_fork(train_until, CASES[name], directory / name / "run", Moment(**end))
            if status != -signal.SIGKILL:
                raise RuntimeError(f"{name}, {end}: the process ended with {status}")


def train_until(case: Case, directory: Path, end: Moment) -> None:
    trainer, _ = case.build(directory, end, signal.SIGKILL, save_steps=SAVE_STEPS)
    case.train(trainer)


def in_a_fork(work: Callable, *args) -> int:
    """Do some work in a forked process; return its exit status, negative for a signal."""
    child = os.fork()
    if child == 0:
        try:
            work(*args)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    kill_in_every_phase(Path(sys.argv[1]))
