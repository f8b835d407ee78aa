# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""
A run on two processes that is resumed, from any of its steps, is the run that never stopped, to the bit: with DDP,
ZeRO-2 and ZeRO-3, on the CPU.

This file is also the script that the two processes run: `torchrun --nproc_per_node 2 <this file> <command> <directory>
<ZeRO stage>`. A process leaves what it saw in `<directory>/rank_<i>.json`.
"""

import functools
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from critic_teams import adapter
from tiny import dataset, llama, lm, tok, word_reward
from transformers import TrainerCallback, set_seed

from trl_multiagent import (
    IACConfig,
    IACTrainer,
    MAACConfig,
    MAACTrainer,
    MADPOConfig,
    MADPOIterConfig,
    MADPOIterTrainer,
    MADPOTrainer,
    MAGRPOConfig,
    MAGRPOTrainer,
    MAREINFORCEConfig,
    MAREINFORCETrainer,
    MAReMaxConfig,
    MAReMaxTrainer,
    MARLHFConfig,
    MARLHFIterConfig,
    MARLHFIterTrainer,
    MARLHFTrainer,
    MARLOOConfig,
    MARLOOTrainer,
)
from trl_multiagent.placement.backends import local_part, states_by_group


pytestmark = pytest.mark.distributed

ROOT = Path(__file__).resolve().parents[2]
LAUNCH_TIMEOUT = 600  # seconds; a launch takes a small part of it, so what runs into it hangs
STEPS = 5
STEPS_OF_ITERATIONS = 4

# A generation batch serves two micro-batches in two iterations, so four updates: a resume at 1, 2, 3 or 5 finds it
# partly used. An epoch has three of them.
BUFFERED = {"num_iterations": 2, "steps_per_generation": 2, "per_device_train_batch_size": 2}
# Two iterations of two steps each
ITERATIONS = {"max_steps": -1, "num_iterations": 2, "num_train_epochs": 1, "preference_num_candidates": 4}
ITERATIONS |= {"comparator_policy": "history", "comparator_history_k": 1}
CASES = {
    "MAGRPO": (
        MAGRPOConfig,
        MAGRPOTrainer,
        {**BUFFERED, "beta": 0.1, "advantage_groups": "role", "scale_rewards": "none"},
    ),
    # An epoch of three micro-steps ends within the second accumulation
    "MAREINFORCE": (MAREINFORCEConfig, MAREINFORCETrainer, {"gradient_accumulation_steps": 2}),
    "MARLOO": (MARLOOConfig, MARLOOTrainer, BUFFERED),
    "MAReMax": (MAReMaxConfig, MAReMaxTrainer, {**BUFFERED, "remax_baseline": "greedy"}),
    "MADPO": (
        MADPOConfig,
        MADPOTrainer,
        {"num_generations": 1, "influence_steps": 0, "preference_num_candidates": 4, "preference_pairs_per_sample": 4},
    ),
    "MARLHF": (MARLHFConfig, MARLHFTrainer, {**BUFFERED, "preference_num_candidates": 4}),
    "MADPOIter": (
        MADPOIterConfig,
        MADPOIterTrainer,
        {
            **ITERATIONS,
            "num_generations": 1,
            "influence_steps": 0,
            "preference_replay_mode": "lambda_decay",
            "preference_replay_lambda": 0.6,
            "preference_replay_sample_size": 12,
        },
    ),
    "MARLHFIter": (
        MARLHFIterConfig,
        MARLHFIterTrainer,
        {
            **ITERATIONS,
            "preference_scoring_reward": "reward_model",
            "reward_num_train_epochs": 1,
            "gradient_accumulation_steps": 2,
            "steps_per_generation": 1,
        },
    ),
    "MAAC": (MAACConfig, MAACTrainer, {**BUFFERED, "value_normalization": True, "critic_warmup_steps": 1}),
    "IAC": (IACConfig, IACTrainer, {**BUFFERED, "critic_type": "q"}),
    "IAC, shared": (
        IACConfig,
        IACTrainer,
        {**BUFFERED, "use_separate_critic": False, "value_normalization": True, "gradient_accumulation_steps": 2},
    ),
}
ALL_CASES = [*CASES, *(f"{name}, LoRA" for name in ("MAGRPO", "MAAC", "IAC", "IAC, shared", "MADPO"))]
# ZeRO stage and cases of each back end
BACKENDS = {
    "DDP": (0, ALL_CASES),
    "ZeRO-2": (2, ALL_CASES),
    "ZeRO-3": (3, ["MAGRPO", "MADPO", "MARLHF", "MAAC", "IAC, shared, LoRA"]),
}


def with_random_words(row):
    """A formatter that draws: what it says is not in the dataset."""
    return f"{row['prompt']} w{random.randrange(20)} w{int(torch.randint(20, ()))}"


def build(case: str, directory: Path, stage: int, callbacks=(), **changed):
    config_class, trainer_class, options = CASES[case.removesuffix(", LoRA")]
    peft = adapter() if case.endswith(", LoRA") else None
    options = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 1, "logging_steps": 2, **options, **changed}
    zero = {
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
    }
    if issubclass(config_class, MARLHFConfig):
        options = {"reward_model_name": reward_source(), **options}
    args = config_class(
        output_dir=str(directory),
        max_completion_length=4,
        **{"num_generations": 4, "influence_steps": 1, "per_device_train_batch_size": 4, **options},
        learning_rate=1e-2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        deepspeed=zero if stage else None,
    )
    critics = {}
    if trainer_class is MAACTrainer:
        critics = {"critic_model": lm(7), "critic_peft_config": peft}
    elif trainer_class is IACTrainer and args.use_separate_critic:
        critics = {"critics": [lm(7), llama(8)], "critic_peft_config": peft}
    set_seed(5)
    return trainer_class(
        agents=[lm(0), llama(1)],
        tokenizer=tok(),
        reward_func=word_reward,
        formatters=with_random_words,
        args=args,
        train_dataset=dataset(6),
        peft_config=peft,
        callbacks=list(callbacks),
        **critics,
    )


@functools.cache
def reward_source() -> str:
    """
    Where a reward model is learned from, for each process its own. Made before the processes know of each other: later
    only the first of them would write it.
    """
    source = tempfile.mkdtemp()
    llama(9).save_pretrained(source)
    tok().save_pretrained(source)
    return source


def what_it_is(trainer) -> dict:
    """What this process holds: hashes of weights, moments of heads and optimizer states, and the log without times."""
    weights, states, moments = (hashlib.sha256() for _ in range(3))
    for parameter in trainer.model.parameters():
        weights.update(local_part(parameter).detach().numpy().tobytes())
    for module in trainer.model.modules():
        if hasattr(module, "moments"):
            moments.update(module.moments.as_tensor().numpy().tobytes())
    count = 0
    for _, state in states_by_group(trainer.accelerator, trainer.optimizer):
        for name in sorted(state):
            count += 1
            value = state[name]
            states.update(value.numpy().tobytes() if isinstance(value, torch.Tensor) else str(value).encode())
    rows = [
        {name: value for name, value in row.items() if name != "step_time"}
        for row in trainer.state.log_history
        if "train_runtime" not in row
    ]
    return {
        "processes": trainer.accelerator.num_processes,
        "steps": trainer.state.global_step,
        "weights": weights.hexdigest(),
        "moments": moments.hexdigest(),
        "states": [count, states.hexdigest()],
        "rows": rows,
    }


def main(command: str, directory: str, stage: str) -> None:
    directory, stage, rank = Path(directory), int(stage), int(os.environ["RANK"])
    reward_source()
    if command == "resume from every step":
        report = {case: train_and_resume(case, directory / case, stage) for case in dict(BACKENDS.values())[stage]}
    else:
        stop = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM}.get(command)
        callbacks = [] if stop is None else [SignalSecondProcess(stop)]
        trainer = build("IAC, shared", directory / "run", stage, callbacks)
        trainer.train(resume_from_checkpoint=command == "resume")
        report = what_it_is(trainer)
    (directory / f"rank_{rank}.json").write_text(json.dumps(report))


def steps_of(case: str) -> int:
    return STEPS_OF_ITERATIONS if case in ("MADPOIter", "MARLHFIter") else STEPS


def train_and_resume(case: str, directory: Path, stage: int) -> list[dict]:
    """What each training comes to: at once, and from the checkpoint of every step."""
    reports = []
    for start in range(steps_of(case)):
        AcceleratorState._reset_state()  # the next trainer may bring its own DeepSpeed plugin
        whole = directory / "whole"
        trainer = build(case, directory / f"from {start}" if start else whole, stage)
        trainer.train(resume_from_checkpoint=str(whole / f"checkpoint-{start}") if start else None)
        reports.append(what_it_is(trainer))
    return reports


class SignalSecondProcess(TrainerCallback):
    """Sends a signal to the second process in the middle of the third step's accumulation."""

    def __init__(self, signum: int):
        self.signum = signum

    def on_substep_end(self, args, state, control, **kwargs):
        if state.global_step == 2 and args.process_index == 1:
            os.kill(os.getpid(), self.signum)


def launch(command: str, directory: Path, stage: int) -> subprocess.CompletedProcess:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        # DeepSpeed builds an operator and finds ninja by PATH only
        "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]),
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
    }
    worker = [str(Path(__file__).resolve()), command, str(directory), str(stage)]
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *worker],
        env=environment,
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=LAUNCH_TIMEOUT,
    )


# The tests


def reports(directory: Path) -> list[dict]:
    return [json.loads((directory / f"rank_{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module", params=BACKENDS)
def from_every_step(request, tmp_path_factory):
    """Back end, and the reports of both processes."""
    directory = tmp_path_factory.mktemp("resume")
    launched = launch("resume from every step", directory, BACKENDS[request.param][0])
    assert launched.returncode == 0, launched.stderr[-4000:]
    return request.param, reports(directory)


@pytest.mark.slow
def test_a_resume_from_any_step_is_the_run_that_never_stopped(from_every_step):
    """B02, B03, B05, B06: weights, moments of heads, optimizer states and the log of each process."""
    backend, processes = from_every_step
    for process, by_case in enumerate(processes):
        assert list(by_case) == BACKENDS[backend][1]
        for case, (whole, *resumed) in by_case.items():
            assert whole["processes"] == 2 and whole["steps"] == steps_of(case) and whole["states"][0] > 0
            assert [row["step"] for row in whole["rows"]] == [2, 4]
            for start, report in enumerate(resumed, start=1):
                assert report == whole, f"{case} on process {process}, from step {start}"


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("stop", ["kill", "terminate"])
def test_a_run_whose_second_process_was_stopped_amid_an_accumulation_goes_on_exactly(stop, stage, whole_run, tmp_path):
    stopped = launch(stop, tmp_path, stage)
    assert stopped.returncode != 0 and not list(tmp_path.glob("rank_*"))
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
    if stop == "terminate":
        assert "ended by SIGTERM after 2 optimizer steps" in stopped.stderr and "exitcode: 143" in stopped.stderr
    resumed = launch("resume", tmp_path, stage)
    assert resumed.returncode == 0, resumed.stderr[-4000:]
    assert reports(tmp_path) == whole_run(stage)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """Reports of both processes of a run that nobody stops, by ZeRO stage."""

    @functools.cache
    def run(stage: int) -> list[dict]:
        directory = tmp_path_factory.mktemp("whole")
        launched = launch("whole", directory, stage)
        assert launched.returncode == 0, launched.stderr[-4000:]
        return reports(directory)

    return run


if __name__ == "__main__":
    main(*sys.argv[1:])
