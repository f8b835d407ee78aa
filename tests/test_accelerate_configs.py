# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""The configurations in `accelerate_configs/` are accepted by `accelerate launch` and mean what their names say."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_deepspeed_cmd_env


CONFIGS = Path(__file__).resolve().parents[1] / "accelerate_configs"

# file name -> distributed type, ZeRO stage, mixed precision, runs on the CPU
EXPECTED = {
    "cpu.yaml": (DistributedType.NO, None, "no", True),
    "ddp.yaml": (DistributedType.MULTI_GPU, None, "bf16", False),
    "deepspeed_zero1.yaml": (DistributedType.DEEPSPEED, 1, "bf16", False),
    "deepspeed_zero2.yaml": (DistributedType.DEEPSPEED, 2, "bf16", False),
    "deepspeed_zero3.yaml": (DistributedType.DEEPSPEED, 3, "bf16", False),
    "single_gpu.yaml": (DistributedType.NO, None, "bf16", False),
}
DEEPSPEED_CONFIGS = [name for name, expected in EXPECTED.items() if expected[0] == DistributedType.DEEPSPEED]


def launch_arguments(name):
    """The arguments of `accelerate launch --config_file NAME script.py`, completed from the file as `launch` does."""
    args = launch_command_parser().parse_args(["--config_file", str(CONFIGS / name), "script.py"])
    return _validate_launch_command(args)[0]


def test_every_config_is_listed_here():
    assert sorted(path.name for path in CONFIGS.iterdir()) == sorted(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_starts_with_a_comment_on_when_to_use_it(name):
    first_line = (CONFIGS / name).read_text().splitlines()[0]
    assert first_line.startswith("# ")


@pytest.mark.parametrize("name", EXPECTED)
def test_accelerate_loads_it(name):
    distributed_type, zero_stage, mixed_precision, use_cpu = EXPECTED[name]
    config = load_config_from_file(str(CONFIGS / name))
    assert isinstance(config, ClusterConfig)
    assert config.distributed_type == distributed_type
    assert config.deepspeed_config.get("zero_stage") == zero_stage
    assert config.mixed_precision == mixed_precision
    assert config.use_cpu is use_cpu
    assert config.num_machines == 1
    assert (config.num_processes > 1) == (distributed_type != DistributedType.NO)


@pytest.mark.parametrize("name", EXPECTED)
def test_has_no_unknown_key(name):
    raw = yaml.safe_load((CONFIGS / name).read_text())
    assert set(raw) <= set(ClusterConfig.__dataclass_fields__)
    # accelerate copies the nested keys onto the launch arguments without looking at them
    options = {action.dest for action in launch_command_parser()._actions}
    assert set(raw.get("deepspeed_config", {})) <= options


@pytest.mark.parametrize("name", EXPECTED)
def test_launch_accepts_it(name):
    distributed_type, _, mixed_precision, use_cpu = EXPECTED[name]
    args = launch_arguments(name)
    assert args.use_deepspeed == (distributed_type == DistributedType.DEEPSPEED)
    assert args.multi_gpu == (distributed_type == DistributedType.MULTI_GPU)
    assert not args.use_fsdp
    assert args.mixed_precision == mixed_precision
    assert bool(args.use_cpu) is use_cpu


@pytest.mark.parametrize("name", DEEPSPEED_CONFIGS)
def test_deepspeed_processes_get_the_stage_and_take_accumulation_from_the_trainer(name, monkeypatch):
    for variable in [key for key in os.environ if key.startswith("ACCELERATE_")]:
        monkeypatch.delenv(variable)
    args = launch_arguments(name)
    args.main_process_port = 0
    args.deepspeed_fields_from_accelerate_config = ""
    _, env = prepare_deepspeed_cmd_env(args)
    stage = EXPECTED[name][1]
    assert env["ACCELERATE_USE_DEEPSPEED"] == "true"
    assert env["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == str(stage)
    assert env["ACCELERATE_DEEPSPEED_ZERO3_INIT"] == str(stage == 3).lower()
    assert env.get("ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", "false") == str(stage == 3).lower()
    # a number here would contradict the trainer's argument; left out, it is "auto"
    assert "ACCELERATE_GRADIENT_ACCUMULATION_STEPS" not in env
    assert "ACCELERATE_GRADIENT_CLIPPING" not in env


def test_cpu_config_launches_one_process_on_the_cpu(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from accelerate import Accelerator\n"
        "accelerator = Accelerator()\n"
        "print('seen', accelerator.num_processes, accelerator.device.type, accelerator.mixed_precision)\n"
    )
    env = {key: value for key, value in os.environ.items() if not key.startswith("ACCELERATE_")}
    launch = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
    result = subprocess.run(
        [*launch, "--config_file", str(CONFIGS / "cpu.yaml"), str(script)],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert "seen 1 cpu no" in result.stdout
