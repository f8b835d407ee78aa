# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""
A run on two processes that is resumed, from any of its steps, is the run that never stopped, to the bit: with DDP,
ZeRO-2 and ZeRO-3, on the CPU.

This file is also the script that the two processes run: `torchrun --nproc_per_node 2 <this file> <command> <directory>
<ZeRO stage>`. A process leaves what it saw in `<directory>/rank_<i>.json`.
"""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

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
    MAGRPOConfig,
    MAGRPOTrainer,
    MAREINFORCEConfig,
    MAREINFORCETrainer,
    MAReMaxConfig,
    MAReMaxTrainer,
    MARLOOConfig,
    MARLOOTrainer,
)
from trl_multiagent.placement.backends import local_part, states_by_group


ROOT = Path(__file__).resolve().parents[2]
LAUNCH_TIMEOUT = 600  # seconds; a launch takes a small part of it, so what runs into it hangs
STEPS = 5
BACKENDS = {"DDP": 0, "ZeRO-2": 2, "ZeRO-3": 3}

# A generation batch serves two micro-batches in two iterations, so four updates: a resume at 1, 2, 3 or 5 finds it
# partly used. An epoch has three of them.
BUFFERED = {"num_iterations": 2, "steps_per_generation": 2, "per_device_train_batch_size": 2}
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
    "MAAC": (MAACConfig, MAACTrainer, {**BUFFERED, "value_normalization": True, "critic_warmup_steps": 1}),
    "IAC": (IACConfig, IACTrainer, {**BUFFERED, "critic_type": "q"}),
    "IAC, shared": (
        IACConfig,
        IACTrainer,
        {**BUFFERED, "use_separate_critic": False, "value_normalization": True, "gradient_accumulation_steps": 2},
    ),
}
ALL_CASES = [*CASES, *(f"{name}, LoRA" for name in ("MAGRPO", "MAAC", "IAC", "IAC, shared"))]


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
    args = config_class(
        output_dir=str(directory),
        max_completion_length=4,
        num_generations=4,
        **{"per_device_train_batch_size": 4, **options},
        learning_rate=1e-2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        influence_steps=1,
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
    if command == "resume all":
        report = {}
        for case in ALL_CASES:
            report[case] = {}
            for start in range(STEPS):
                AcceleratorState._reset_state()  # the next trainer may bring its own DeepSpeed plugin
                output = directory / case / ("run" if start == 0 else f"from {start}")
                trainer = build(case, output, stage, save_strategy="steps" if start == 0 else "no")
                trainer.train(
                    resume_from_checkpoint=str(directory / case / "run" / f"checkpoint-{start}") if start else None
                )
                report[case][start] = what_it_is(trainer)
    else:
        callbacks = [KillSecondProcess()] if command == "kill" else []
        trainer = build("IAC, shared", directory / "run", stage, callbacks)
        trainer.train(resume_from_checkpoint=command == "resume")
        report = what_it_is(trainer)
    (directory / f"rank_{rank}.json").write_text(json.dumps(report))


class KillSecondProcess(TrainerCallback):
    """Kills the second process in the middle of the third step's accumulation."""

    def on_substep_end(self, args, state, control, **kwargs):
        if state.global_step == 2 and args.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)


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


if __name__ == "__main__":
    main(*sys.argv[1:])
