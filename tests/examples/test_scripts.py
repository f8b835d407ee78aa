# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""The example scripts, run as a user runs them, on tiny models and local data."""

import csv
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import yaml
from tiny import CHAT_TEMPLATE, gpt2, llama, tok
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from trl_multiagent.callbacks.wandb_records import offline_files, rows
from trl_multiagent.trainers.marlhf_config import RL_CONFIGS


ROOT = Path(__file__).parents[2]


def launch(
    script: str, *arguments: str, timeout: float = 300, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "accelerate.commands.launch", str(ROOT / "examples" / script), *arguments]
    # Without the W&B service that a test in this process may have started
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment = {**inherited, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **(environment or {})}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, cwd=ROOT)


def run_here(monkeypatch, script: str, *arguments: str) -> None:
    """Run a script in this process: for what ends before training."""
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    """Three models with tokenizers of their own: two that chat, and a critic of another family and vocabulary."""
    directory = tmp_path_factory.mktemp("models")
    for name, model, tokenizer in (
        ("a", llama(1, vocab=48), tok(48, chat_template=CHAT_TEMPLATE)),
        ("b", llama(2, vocab=40), tok(40, reverse=True)),
        ("critic", gpt2(3, vocab=64), tok(64)),
    ):
        model.save_pretrained(directory / name)
        tokenizer.save_pretrained(directory / name)
    return {name: str(directory / name) for name in ("a", "b", "critic")}


def write_csv(path: Path) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["question", "level"])
        writer.writerows([[f"w{i} w{i + 1}", i] for i in range(20)])
    return path


def test_train_maac_takes_local_models_and_data_and_shows_what_came_of_it(tmp_path, models):
    output = tmp_path / "run"
    run = launch(
        "train_maac.py",
        *("--agents", models["a"], models["b"], "--critic_model", models["critic"]),
        *("--dataset_name", str(write_csv(tmp_path / "prompts.csv")), "--prompt_column", "question"),
        *("--max_steps", "2", "--max_completion_length", "6", "--num_generations", "3", "--output_dir", str(output)),
    )
    assert run.returncode == 0, run.stderr[-3000:]
    # The plan, before training
    assert models["critic"] in run.stdout and "2 updates of 9 joint responses, 3 for each prompt" in run.stdout
    assert "8 to train on, 12 held out" in run.stdout
    # The table, the samples, and where things are
    assert "Reward on held-out prompts" in run.stdout and "12 x 4" in run.stdout
    assert "brief" in run.stdout and "detailed" in run.stdout and "AutoModelForCausalLM.from_pretrained" in run.stdout
    assert (output / "reward.png").read_bytes().startswith(b"\x89PNG")
    for entity in ("agent_0", "agent_1", "critic"):
        AutoModelForCausalLM.from_pretrained(output / entity)
    assert (output / "critic" / "value_head.pt").is_file()


def test_train_madpo_keeps_its_pairs_and_shows_what_came_of_it(tmp_path, models):
    output = tmp_path / "run"
    run = launch(
        "train_madpo.py",
        *("--agents", models["a"], models["b"], "--prompt_column", "question"),
        *("--dataset_name", str(write_csv(tmp_path / "prompts.csv")), "--preference_num_candidates", "4"),
        *("--max_completion_length", "6", "--output_dir", str(output)),
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "up to 4 pairs of 4 joint responses" in " ".join(run.stdout.split())
    assert "Reward on held-out prompts" in run.stdout
    pairs = [json.loads(line) for line in (output / "preferences" / "iteration-0.jsonl").read_text().splitlines()]
    assert {pair["task"] for pair in pairs} <= set(range(8)) and 0 < len(pairs) <= 32
    AutoModelForCausalLM.from_pretrained(output / "agent_1")


@pytest.mark.parametrize("algorithm", ["marloo", "maac"])
def test_train_marlhf_learns_a_reward_model_first(tmp_path, models, algorithm):
    output = tmp_path / "run"
    critic = ["--critic_model_name", models["critic"]] if algorithm == "maac" else []
    run = launch(
        "train_marlhf.py",
        *("--agents", models["a"], models["b"], "--prompt_column", "question", "--rl_algorithm", algorithm, *critic),
        *("--dataset_name", str(write_csv(tmp_path / "prompts.csv")), "--max_steps", "2"),
        *("--reward_eval_fraction", "0.5", "--max_completion_length", "6", "--output_dir", str(output)),
    )
    assert run.returncode == 0, run.stderr[-3000:]
    said = " ".join(run.stdout.split())
    assert "up to 4 pairs of 4 joint responses" in said and f"{algorithm}, whose reward is the reward model's" in said
    assert "Reward on held-out prompts" in said and "Reward model on pairs of held-out tasks" in said
    assert (output / "preferences" / "iteration-0.jsonl").is_file()
    assert AutoModelForSequenceClassification.from_pretrained(output / "reward_model").config.num_labels == 1
    AutoModelForCausalLM.from_pretrained(output / "agent_1")


def test_resume_training_is_one_run_in_parts(tmp_path, models):
    output = tmp_path / "run"
    options = [
        *("--agents", models["a"], models["b"], "--lora_rank", "2", "--first_part_epochs", "1"),
        *("--max_completion_length", "6", "--num_generations", "2", "--per_device_train_batch_size", "4"),
        *("--output_dir", str(output)),
    ]
    first = launch("resume_training.py", *options, "--num_train_epochs", "2")
    assert first.returncode == 0, first.stderr[-3000:]
    assert "The first part, up to epoch 1: from the start." in first.stdout
    assert f"The second part, up to epoch 2: on from {output / 'checkpoints' / 'checkpoint-1'}." in first.stdout
    again = launch("resume_training.py", *options, "--num_train_epochs", "2")
    assert "All 2 epochs are done" in again.stdout
    third = launch("resume_training.py", *options, "--num_train_epochs", "3")
    assert third.returncode == 0, third.stderr[-3000:]
    steps = [line.split()[:2] for line in third.stdout.splitlines() if line.split()[-1:] in (["first"], ["second"])]
    assert steps == [[str(step), str(4 * step)] for step in range(1, 7)]
    checkpoints = sorted(path.name for path in (output / "checkpoints").iterdir())
    assert checkpoints == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    files = offline_files(output / "wandb")
    assert len({file.name for file in files}) == 1 and len(files) >= 2
    logged = sorted(row["train/env_step"] for file in files for row in rows(file) if "train/reward" in row)
    assert logged == [4 * step for step in range(1, 7)]


def test_train_iac_takes_local_critics_and_gives_them_adapters(tmp_path, models):
    output = tmp_path / "run"
    run = launch(
        "train_iac.py",
        *("--use_separate_critic", "--critics", models["a"], models["b"], "--critic_lora_rank", "2"),
        *("--agents", models["a"], models["b"], "--critic_warmup_steps", "1", "--max_steps", "2"),
        *("--max_completion_length", "6", "--num_generations", "2", "--num_eval_prompts", "2"),
        *("--output_dir", str(output)),
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert f"critic of detailed  {models['b']}" in run.stdout
    for entity in ("agent_0", "agent_1"):
        assert (output / entity / "critic" / "adapter_config.json").is_file()
        assert (output / entity / "critic" / "value_head.pt").is_file()


def test_critics_that_cannot_read_their_actors_ids_are_an_error(monkeypatch, models):
    with pytest.raises(ValueError, match="critic_1 reads the token ids of detailed, but .* stand for other tokens"):
        critics = ("--critics", models["a"], models["critic"])
        run_here(monkeypatch, "train_iac.py", "--use_separate_critic", *critics, "--agents", models["a"], models["b"])


def test_train_iac_makes_each_actor_its_own_critic(tmp_path, models):
    output = tmp_path / "run"
    run = launch(
        "train_iac.py",
        *("--agents", models["a"], models["b"], "--advantage_level", "token", "--value_normalization"),
        *("--max_steps", "2", "--max_completion_length", "6", "--num_generations", "1", "--num_eval_prompts", "2"),
        *("--output_dir", str(output)),
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "a value head on each actor's own backbone" in run.stdout and "an advantage for each token" in run.stdout
    assert "2 updates of 8 joint responses, 1 for each prompt" in run.stdout
    for entity in ("agent_0", "agent_1"):
        AutoModelForCausalLM.from_pretrained(output / entity)
        assert (output / entity / "value_head.pt").is_file()


def test_critics_for_actors_that_are_their_own_are_an_error(monkeypatch, models):
    with pytest.raises(ValueError, match="--critics and --critic_lora_rank are for --use_separate_critic"):
        run_here(monkeypatch, "train_iac.py", "--agents", models["a"], "--critics", models["a"])


def test_train_magrpo_reads_a_config_file_and_the_command_line_wins(tmp_path, models):
    config = tmp_path / "run.yaml"
    settings = {
        "agents": [models["a"]],
        "dataset_name": str(tmp_path / "prompts.jsonl"),
        "max_steps": 50,
        "max_completion_length": 5,
        "num_generations": 2,
        "num_eval_prompts": 2,
        "output_dir": str(tmp_path / "run"),
    }
    config.write_text(yaml.safe_dump(settings))
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": f"w{i}"}) for i in range(6)))
    run = launch("train_magrpo.py", "--config", str(config), "--max_steps", "1")
    assert run.returncode == 0, run.stderr[-3000:]
    assert "1 updates of 8 joint responses, 2 for each prompt, at most 5 tokens" in run.stdout
    assert (tmp_path / "run" / "agent_1" / "config.json").is_file()


def test_an_example_goes_on_from_a_checkpoint(tmp_path, models):
    """As one would expect of `--resume_from_checkpoint`: two steps of three are there, and the third follows."""
    common = ("--agents", models["a"], models["b"], "--max_completion_length", "6", "--num_generations", "2")
    common += ("--save_strategy", "steps", "--save_steps", "1", "--output_dir", str(tmp_path), "--report_to", "wandb")
    norms = []
    for part in (("--max_steps", "2"), ("--max_steps", "3", "--resume_from_checkpoint", f"{tmp_path}/checkpoint-2")):
        environment = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
        run = launch("train_magrpo.py", *common, *part, environment=environment)
        assert run.returncode == 0, run.stderr[-3000:]
        state = json.loads((sorted(tmp_path.glob("checkpoint-*"))[-1] / "trainer_state.json").read_text())
        norms.append([row["grad_norm"] for row in state["log_history"]])
    assert len(norms[1]) == 3 and norms[1][:2] == norms[0]
    files = offline_files(tmp_path / "wandb")
    assert len(files) == 2 and len({file.name for file in files}) == 1
    steps = [row["train/global_step"] for file in files for row in rows(file)]
    assert steps == [0, 1, 2, 2, 3, 3]  # evaluations before and after each part, the one before the second is known


def test_a_wrong_number_of_actors_is_named(monkeypatch, models):
    with pytest.raises(ValueError, match="--agents names 3 models; this example trains brief and detailed"):
        run_here(monkeypatch, "train_magrpo.py", "--agents", *[models["a"]] * 3)


def test_a_refused_option_is_named_with_the_reason(monkeypatch, models):
    with pytest.raises(ValueError, match="use_vllm=True is not supported .*each actor needs a vLLM engine"):
        run_here(monkeypatch, "train_magrpo.py", "--agents", models["a"], "--use_vllm", "true")


@pytest.mark.parametrize(
    "script",
    [
        *("train_maac.py", "train_iac.py", "train_magrpo.py", "train_madpo.py", "train_marlhf.py"),
        *("multi_turn_feedback.py", "pipeline.py"),
    ],
)
def test_help_is_grouped_and_leaves_out_what_is_refused(monkeypatch, capsys, script):
    with pytest.raises(SystemExit, match="0"):
        run_here(monkeypatch, script, "--help")
    text = capsys.readouterr().out
    for section in ("what is trained, on what:", "the team:", "each actor:", "the run:"):
        assert section in text
    assert "--agents" in text and "--learning_rate" in text
    assert "--use_vllm" not in text and max(map(len, text.splitlines())) <= 110


@pytest.mark.slow
def test_the_main_job_runs_on_the_embedded_default(tmp_path):
    run = launch(
        "train_maac.py", "--max_steps", "2", "--num_eval_prompts", "2", "--output_dir", str(tmp_path), timeout=850
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "SmolLM2-135M-Instruct" in run.stdout and "2 x 4" in run.stdout
    assert (tmp_path / "agent_1" / "model.safetensors").stat().st_size > 5e8


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train_madpo.py", *(f"train_marlhf.py {name}" for name in RL_CONFIGS)])
def test_preferences_train_the_embedded_default(tmp_path, monkeypatch, script):
    script, *algorithm = script.split()
    options = ["--num_eval_prompts", "1", "--max_completion_length", "8", "--preference_num_candidates", "4"]
    if algorithm:
        options += ["--rl_algorithm", *algorithm, "--max_steps", "1", "--steps_per_generation", "1"]
    (tmp_path / "prompts.csv").write_text("prompt\n" + "What is a river?\nWhy do cats purr?\nWhat is salt?\n")
    run_here(
        monkeypatch,
        script,
        *("--dataset_name", str(tmp_path / "prompts.csv"), "--output_dir", str(tmp_path / "run"), *options),
    )
    assert (tmp_path / "run" / "reward.png").is_file()
    for written in ["agent_0", "agent_1", *(["reward_model"] if algorithm else [])]:
        assert (tmp_path / "run" / written / "model.safetensors").stat().st_size > 5e8


def test_multi_turn_feedback_shows_the_reward_of_each_turn(tmp_path, models):
    output = tmp_path / "run"
    run = launch(
        "multi_turn_feedback.py",
        *("--agents", models["a"], models["b"], "--dataset_name", str(write_csv(tmp_path / "prompts.csv"))),
        *("--prompt_column", "question", "--num_eval_prompts", "3", "--max_steps", "2", "--num_generations", "2"),
        *("--max_completion_length", "5", "--log_completions", "true", "--output_dir", str(output)),
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "2 for each prompt, 2 turns as a chain" in run.stdout
    for turn in (1, 2):
        assert f"length_ratio, turn {turn}" in run.stdout
    # What the environment said reached both actors, the one with a chat template and the one without
    table = pd.concat(map(pd.read_parquet, (output / "completions").glob("*.parquet")))
    second = table[table["turn"] == 2]
    for actor in ("brief", "detailed"):
        assert second[f"{actor}/prompt"].astype(str).str.contains("The detailed answer is").all()
    # One reward for both, under the function's name
    assert [column for column in table if "rewards/" in column] == ["rewards/length_ratio"]
    assert table["rewards/length_ratio"].between(0, 1).all()
    for index in (0, 1):
        AutoModelForCausalLM.from_pretrained(output / f"agent_{index}")


def test_pipeline_lets_each_actor_hear_those_before_it(tmp_path, models):
    output = tmp_path / "run"
    run = launch(
        "pipeline.py",
        *("--agents", models["b"], models["a"], models["critic"], "--trainable_agents", "false", "true", "true"),
        *("--dataset_name", str(write_csv(tmp_path / "prompts.csv")), "--prompt_column", "question"),
        *("--num_eval_prompts", "3", "--max_steps", "2", "--num_generations", "2", "--max_completion_length", "5"),
        *("--log_completions", "true", "--output_dir", str(output)),
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert all(role in run.stdout for role in ("planner", "writer", "editor"))
    table = pd.concat(map(pd.read_parquet, (output / "completions").glob("*.parquet")))
    for hears, says, label in (("writer", "planner", "Key words: "), ("editor", "writer", "Answer: ")):
        for prompt, said in zip(table[f"{hears}/prompt"].astype(str), table[f"{says}/completion"], strict=True):
            assert label + said in prompt
    assert "planner/advantage" not in table and "writer/advantage" in table
    (column,) = (column for column in table if "rewards/" in column)
    assert column.startswith("rewards/") and table[column].notna().all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "shown"),
    [
        ("multi_turn_feedback.py", "turn 2"),
        ("pipeline.py", "editor"),
        ("train_iac.py", "a value head on each actor's own backbone"),
    ],
)
def test_the_other_examples_run_on_the_embedded_default(tmp_path, script, shown):
    run = launch(
        *(script, "--max_steps", "1", "--num_eval_prompts", "2", "--num_generations_eval", "1"),
        *("--steps_per_generation", "1", "--num_generations", "2", "--per_device_train_batch_size", "2"),
        *("--output_dir", str(tmp_path)),
        timeout=850,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "SmolLM2-135M-Instruct" in run.stdout and shown in run.stdout
