# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""What CoMLRL's documents show runs here with another import path, on local model directories."""

import contextlib
import math
import re
from pathlib import Path

import pytest
import torch
import wandb
from tiny import dataset, gpt2, llama, logged, tok, weights_hash, word_reward
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from trl_multiagent import (
    IACConfig,
    IACTrainer,
    MAACConfig,
    MAACTrainer,
    MAGRPOConfig,
    MAGRPOTrainer,
    MARLHFConfig,
    MARLHFTrainer,
    read_checkpoint_metadata,
)
from trl_multiagent.agents.loading import load_tokenizer as from_pretrained
from trl_multiagent.callbacks import wandb_resume
from trl_multiagent.callbacks.wandb_records import offline_files, rows


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    """Local stand-ins: "3B" and "7B" share a vocabulary, "1.5B" has its own."""
    directory = tmp_path_factory.mktemp("models")
    for name, model, tokenizer in (
        ("3B", llama(0), tok()),
        ("7B", gpt2(1), tok()),
        ("1.5B", llama(2, vocab=48), tok(48)),
    ):
        model.save_pretrained(directory / name)
        tokenizer.save_pretrained(directory / name)
    return {name: str(directory / name) for name in ("3B", "7B", "1.5B")}


@pytest.fixture(autouse=True)
def in_scratch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the documents' examples name no output directory


def reward_func(completions1, completions2, completions3=None):
    return word_reward(completions1, completions2)


SHORT = dict(max_new_tokens=4, num_generations=2, report_to=[], save_strategy="no", disable_tqdm=True)


def test_homogeneous_agents(models):
    trainer = MAGRPOTrainer(
        agent_model=models["3B"],
        agents=None,
        num_agents=3,
        reward_func=reward_func,
        train_dataset=dataset(),
        args=MAGRPOConfig(num_agents=3, num_turns=1, temperature=0.7, top_p=0.9, top_k=None, **SHORT),
    )
    assert len(trainer.agents) == 3
    assert len({weights_hash(agent) for agent in trainer.agents}) == 1
    trainer.train()
    assert len({weights_hash(agent) for agent in trainer.agents}) == 3


def test_heterogeneous_agents(models):
    trainer = MAGRPOTrainer(
        agent_model=None,
        agents=[models["3B"], models["7B"]],
        reward_func=reward_func,
        train_dataset=dataset(),
        args=MAGRPOConfig(num_agents=2, num_turns=1, temperature=0.7, top_p=0.9, top_k=None, **SHORT),
    )
    assert [agent.config.model_type for agent in trainer.agents] == ["llama", "gpt2"]
    trainer.train()


def maac(models, **kwargs) -> MAACTrainer:
    return MAACTrainer(
        agent_model=None,
        agents=[models["3B"], models["1.5B"]],
        tokenizer=[from_pretrained(models["3B"]), from_pretrained(models["1.5B"])],
        critic_model=models["7B"],
        critics=None,
        reward_func=reward_func,
        train_dataset=dataset(),
        args=MAACConfig(num_agents=2, num_turns=1, temperature=0.7, top_p=0.9, top_k=None, **SHORT),
        **kwargs,
    )


def test_central_critic(models):
    trainer = maac(models)
    assert len(trainer.critics) == 1
    before = weights_hash(trainer.critics[0])
    trainer.train()
    assert weights_hash(trainer.critics[0]) != before


def test_training_from_saved_models(models):
    trainer = MAGRPOTrainer(
        agents=[models["3B"], models["7B"]],
        reward_func=reward_func,
        train_dataset=dataset(),
        args=MAGRPOConfig(**SHORT),
    )
    trainer.train()
    trainer.save_model("./saved-models/run-1")

    continued_trainer = MAGRPOTrainer(
        agents=[
            "./saved-models/run-1/agent_0",
            "./saved-models/run-1/agent_1",
        ],
        num_agents=2,
        reward_func=reward_func,
        train_dataset=dataset(),
        args=MAGRPOConfig(
            num_agents=2,
            num_turns=1,
            num_train_epochs=3,
            agent_learning_rate=5e-6,
            temperature=0.7,
            top_p=0.9,
            top_k=None,
            **SHORT,
        ),
    )
    assert weights_hash(continued_trainer.model) == weights_hash(trainer.model)
    continued_trainer.train()
    continued_trainer.save_model("./saved-models/run-2")
    assert continued_trainer.state.epoch == 3
    assert {group["lr"] for group in trainer.optimizer.param_groups} != {5e-6}
    assert Path("saved-models/run-2/agent_1/model.safetensors").is_file()


def test_training_from_a_saved_critic_and_its_value_head(models):
    trainer = maac(models)
    trainer.train()
    saved_dir = Path("./saved-models/maac-run-1")
    trainer.save_model(saved_dir)
    actor_dirs = [str(saved_dir / f"agent_{i}") for i in range(2)]

    continued_maac = MAACTrainer(
        agents=actor_dirs,
        tokenizer=[from_pretrained(path) for path in actor_dirs],
        critic_model=str(saved_dir / "critic"),
        reward_func=reward_func,
        train_dataset=dataset(),
        args=MAACConfig(num_agents=2, num_turns=1, num_train_epochs=3, **SHORT),
    )
    assert weights_hash(continued_maac.model) == weights_hash(trainer.model)  # it was restored by itself
    torch.nn.init.zeros_(continued_maac.critics[0].value_head.net[0].weight)
    continued_maac.critics[0].value_head.load_state_dict(
        torch.load(
            saved_dir / "critic" / "value_head.pt",
            map_location="cpu",
            weights_only=True,
        )
    )
    assert weights_hash(continued_maac.model) == weights_hash(trainer.model)
    continued_maac.train()
    continued_maac.save_model("./saved-models/maac-run-2")


def test_a_custom_head_is_set_by_model_config(models):
    trainer = maac(models, model_config={"critic_value_head_hidden_dim": 5})
    assert [tuple(p.shape) for p in trainer.critics[0].value_head.parameters()] == [(5, 16), (5,), (1, 5), (1,)]
    trainer.train()
    trainer.save_model("saved")
    with pytest.raises(ValueError, match=r"has the shapes .*\(5, 16\).* but this run asks for .*\(1, 16\)"):
        maac({**models, "7B": "saved/critic"})


def test_independent_critics(models):
    trainer = IACTrainer(
        agent_model=None,
        agents=[models["3B"], models["7B"]],
        tokenizer=[
            AutoTokenizer.from_pretrained(models["3B"]),
            AutoTokenizer.from_pretrained(models["7B"]),
        ],
        critic_model=None,
        critics=[models["3B"], models["7B"]],
        reward_func=reward_func,
        train_dataset=dataset(),
        args=IACConfig(
            num_agents=2,
            num_turns=1,
            use_separate_critic=True,
            temperature=0.7,
            top_p=0.9,
            top_k=None,
            **SHORT,
        ),
    )
    assert [critic.config.model_type for critic in trainer.critics] == ["llama", "gpt2"]
    before = [weights_hash(critic) for critic in trainer.critics]
    trainer.train()
    assert all(hash_ != weights_hash(critic) for hash_, critic in zip(before, trainer.critics, strict=True))


def shared_iac(models, **options) -> IACTrainer:
    return IACTrainer(
        agent_model=None,
        agents=[models["3B"], models["7B"]],
        tokenizer=[
            AutoTokenizer.from_pretrained(models["3B"]),
            AutoTokenizer.from_pretrained(models["7B"]),
        ],
        critic_model=None,
        critics=None,
        reward_func=reward_func,
        train_dataset=dataset(),
        args=IACConfig(
            num_agents=2,
            num_turns=1,
            use_separate_critic=False,
            temperature=0.7,
            top_p=0.9,
            top_k=None,
            **SHORT,
            **options,
        ),
    )


def test_actors_that_are_their_own_critics(models):
    trainer = shared_iac(models)
    assert len(trainer.critics) == 0
    before = [weights_hash(agent.value_head) for agent in trainer.agents]
    trainer.train()
    assert all(hash_ != weights_hash(agent.value_head) for hash_, agent in zip(before, trainer.agents, strict=True))


@pytest.mark.parametrize("use_separate_critic", [True, False])
def test_training_from_saved_independent_critics_and_their_value_heads(models, use_separate_critic):
    agents = [models["3B"], models["7B"]]
    args = IACConfig(num_agents=2, use_separate_critic=use_separate_critic, learning_rate=1e-3, **SHORT)
    critic = models["3B"] if use_separate_critic else None
    trainer = IACTrainer(
        agents=agents, critic_model=critic, reward_func=reward_func, train_dataset=dataset(), args=args
    )
    trainer.train()
    saved_dir = Path("./saved-models/iac-run-1")
    trainer.save_model(saved_dir)
    actor_dirs = [str(saved_dir / f"agent_{i}") for i in range(2)]
    critic_dirs = [str(saved_dir / f"agent_{i}" / "critic") for i in range(2)] if use_separate_critic else None

    continued_iac = IACTrainer(
        agents=actor_dirs,
        tokenizer=[AutoTokenizer.from_pretrained(path) for path in actor_dirs],
        critics=critic_dirs,
        reward_func=reward_func,
        train_dataset=dataset(),
        args=IACConfig(num_agents=2, num_train_epochs=3, use_separate_critic=use_separate_critic, **SHORT),
    )
    assert weights_hash(continued_iac.model) == weights_hash(trainer.model)  # they were restored by themselves
    for i, path in enumerate(critic_dirs or actor_dirs):
        owner = continued_iac.critics[i] if use_separate_critic else continued_iac.agents[i]
        torch.nn.init.zeros_(owner.value_head.net[0].weight)
        owner.value_head.load_state_dict(
            torch.load(Path(path) / "value_head.pt", map_location="cpu", weights_only=True)
        )
    assert weights_hash(continued_iac.model) == weights_hash(trainer.model)
    continued_iac.train()
    continued_iac.save_model("./saved-models/iac-run-2")


@pytest.mark.parametrize(
    ("use_separate_critic", "width"), [(True, "critic_value_head_hidden_dim"), (False, "value_head_hidden_dim")]
)
def test_saved_heads_of_independent_critics_need_their_width(models, use_separate_critic, width):
    args = IACConfig(num_agents=2, use_separate_critic=use_separate_critic, max_steps=1, **{width: 5}, **SHORT)
    rest = dict(reward_func=reward_func, train_dataset=dataset())
    critic = models["3B"] if use_separate_critic else None
    trainer = IACTrainer(agent_model=models["3B"], critic_model=critic, args=args, **rest)
    trainer.save_model("saved")
    directories = ["saved/agent_0", "saved/agent_1"]
    critics = [f"{directory}/critic" for directory in directories] if use_separate_critic else None
    args = IACConfig(num_agents=2, use_separate_critic=use_separate_critic, **SHORT)
    with pytest.raises(ValueError, match=rf"\(5, 24\).* but this run asks for .*\(1, 24\).*`{width}`"):
        IACTrainer(agents=directories, critics=critics, args=args, **rest)


class Stop(TrainerCallback):
    """The user's interruption, in the middle of the second epoch."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            raise KeyboardInterrupt


def end_wandb() -> None:
    """As at a process's end: what writes the files is ended too, so that no row is in its memory still."""
    wandb.finish()
    wandb.teardown()


def logged_to_wandb(directory) -> list[tuple]:
    """`env_step` and reward of each row in all parts of the one run of a directory."""
    files = offline_files(Path(directory) / "wandb")
    assert len({file.name for file in files}) == 1
    return [(row["train/env_step"], row["train/reward"]) for file in files for row in rows(file)]


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("new_process", [False, True])
def test_one_run_in_two_parts(stopped, new_process, models, monkeypatch):
    """Two epochs, then the rest of four from the checkpoint, in the same W&B run: as if it had been four at once."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    end_wandb()  # it would keep the working directory of an earlier test
    model_name = models["3B"]
    tokenizer = from_pretrained(model_name)
    train_dataset = dataset(4)

    def length_ratio_reward(completions1, completions2):
        rewards = []
        for first, second in zip(completions1, completions2, strict=True):
            ratio = len(second) / max(len(first), 1)
            distance = 0.0 if 2 <= ratio <= 3 else min(abs(ratio - 2), abs(ratio - 3))
            rewards.append(math.exp(-distance))
        return rewards

    def build_trainer(num_train_epochs, wandb_config):
        config = MAGRPOConfig(
            num_turns=1,
            num_train_epochs=num_train_epochs,
            num_generations=4,
            max_new_tokens=4,
            logging_steps=1,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
        )
        return MAGRPOTrainer(
            agents=[AutoModelForCausalLM.from_pretrained(model_name) for _ in range(2)],
            tokenizer=tokenizer,
            reward_func=length_ratio_reward,
            train_dataset=train_dataset,
            args=config,
            wandb_config=wandb_config,
        )

    wandb_config = {"project": "comlrl-examples", "name": "resume-demo"}
    checkpoint_dir = "./checkpoints/resume-demo"
    trainer = build_trainer(num_train_epochs=2, wandb_config=wandb_config)
    if stopped:
        trainer.add_callback(Stop())
    with pytest.raises(KeyboardInterrupt) if stopped else contextlib.nullcontext():
        trainer.train(checkpoint_dir=checkpoint_dir, checkpoint_interval=1)
    done = ["checkpoint-1"] if stopped else ["checkpoint-1", "checkpoint-2"]
    assert sorted(path.name for path in Path(checkpoint_dir).iterdir()) == done
    if new_process:
        end_wandb()
        monkeypatch.setattr(wandb_resume, "_started", set())
        monkeypatch.setattr(wandb_resume, "_rows_of_runs", {})

    checkpoint = max(
        Path(checkpoint_dir).glob("checkpoint-*"),
        key=lambda path: int(path.name.rsplit("-", 1)[1]),
    )
    identity = read_checkpoint_metadata(checkpoint)["wandb"]
    assert identity["project"] == "comlrl-examples" and identity["id"]
    if identity:
        wandb_config = {**wandb_config, **identity, "resume": "allow"}
    resumed = build_trainer(num_train_epochs=4, wandb_config=wandb_config)
    resumed.train(
        resume_from_checkpoint=str(checkpoint),
        checkpoint_dir=checkpoint_dir,
        checkpoint_interval=1,
    )
    assert read_checkpoint_metadata("checkpoints/resume-demo/checkpoint-4")["wandb"] == identity
    end_wandb()
    in_wandb = logged_to_wandb(".")

    Path("at_once").mkdir()
    at_once = build_trainer(num_train_epochs=4, wandb_config={"dir": "at_once"})
    at_once.train()
    end_wandb()
    assert [env_step for env_step, _ in in_wandb] == [8 * step for step in range(1, 9)]
    assert in_wandb == logged_to_wandb("at_once")
    assert resumed.state.epoch == at_once.state.epoch == 4
    assert weights_hash(resumed.model) == weights_hash(at_once.model)
    assert logged(resumed, "reward") == logged(at_once, "reward")
    assert logged(resumed, "env_step") == logged(at_once, "env_step")


def test_training_state(models):
    """The first document's blocks, with the object that has a state and what comes of `wandb_config`."""

    class Counter(TrainerCallback):
        steps = 0

        def on_step_end(self, args, state, control, **kwargs):
            self.steps += 1

        def state_dict(self):
            return {"steps": self.steps}

        def load_state_dict(self, state):
            self.steps = state["steps"]

    def build(num_train_epochs=2):
        return MAGRPOTrainer(
            agents=[models["3B"], models["1.5B"]],
            reward_func=reward_func,
            train_dataset=dataset(4),
            args=MAGRPOConfig(num_turns=1, num_train_epochs=num_train_epochs, **SHORT),
            callbacks=[counter],
        )

    counter = Counter()
    trainer = build()
    # Save a checkpoint at each completed training boundary.
    trainer.train(checkpoint_dir="./checkpoints", checkpoint_interval=1)
    steps, expected = counter.steps, weights_hash(trainer.model)
    assert steps == 2 and not list(Path("trainer_output").glob("checkpoint-*"))

    counter = Counter()
    resumed_trainer = build()
    # Recreate the trainer with the same models, tokenizers, data, and callbacks.
    resumed_trainer.train(
        resume_from_checkpoint="./checkpoints/checkpoint-1",
        checkpoint_dir="./checkpoints",
        checkpoint_interval=1,
    )
    assert counter.steps == steps and weights_hash(resumed_trainer.model) == expected

    wandb_config = {"project": "p"}
    checkpoint = "./checkpoints/checkpoint-1"
    identity = read_checkpoint_metadata(checkpoint)["wandb"]
    if identity and "id" not in wandb_config and "resume" not in wandb_config:
        wandb_config = {**wandb_config, **identity, "resume": "allow"}
    assert identity is None and wandb_config == {"project": "p"}


def test_the_examples_of_actors_and_critics_run(models):
    text = (Path(__file__).parents[1] / "docs" / "actor_critic.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.S))
    for written, stand_in in (
        ("Qwen/Qwen2.5-0.5B-Instruct", models["3B"]),
        ("Qwen/Qwen2.5-1.5B-Instruct", models["7B"]),
        ("HuggingFaceTB/SmolLM2-360M-Instruct", models["1.5B"]),
        ("num_generations=", "max_completion_length=4, num_generations="),
    ):
        assert written in code
        code = code.replace(written, stand_in)
    names = {"torch": torch, "directory": Path("outputs/maac")}
    exec(compile(code, "actor_critic.md", "exec"), names)
    heads = ["maac/critic", "iac/agent_0/critic", "iac/agent_1/critic", "ppo/agent_0", "ppo/agent_1"]
    assert all((Path("outputs") / head / "value_head.pt").is_file() for head in heads)
    assert names["trainer"].args.output_dir == "outputs/next"


def test_the_readme_example_runs(models):
    text = (Path(__file__).parents[1] / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    for identifier, stand_in in (
        ("Qwen/Qwen2.5-0.5B-Instruct", models["3B"]),
        ("HuggingFaceTB/SmolLM2-360M-Instruct", models["1.5B"]),
    ):
        assert identifier in code
        code = code.replace(identifier, stand_in)
    code = code.replace("num_generations=4, max_completion_length=64", "num_generations=4, max_completion_length=4")
    exec(compile(code, "README.md", "exec"), {})
    assert Path("outputs/essay/agent_1/config.json").is_file()


def test_the_examples_of_training_state_run(models, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    end_wandb()
    text = (Path(__file__).parents[1] / "docs" / "training_state.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.S))
    for written, stand_in in (
        ("Qwen/Qwen2.5-0.5B-Instruct", models["3B"]),
        ("num_generations=", "max_completion_length=4, num_generations="),
    ):
        assert written in code
        code = code.replace(written, stand_in)
    names = {}
    exec(compile(code, "training_state.md", "exec"), names)
    end_wandb()
    assert sorted(path.name for path in Path("outputs/essay").glob("checkpoint-*")) == [
        "checkpoint-15",
        "checkpoint-16",
    ]
    assert names["trainer"].state.global_step == 16
    assert names["wandb_config"]["id"] and names["wandb_config"]["resume"] == "allow"


def test_a_learned_joint_reward_on_a_machine_without_its_device(models):
    trainer = MARLHFTrainer(
        agent_model=models["3B"],
        num_agents=2,
        reward_func=reward_func,
        train_dataset=dataset(),
        args=MARLHFConfig(
            num_agents=2,
            num_turns=1,
            reward_model_name=models["7B"],
            reward_model_device="cuda:1",
            preference_num_candidates=4,
            **SHORT,
        ),
    )
    before = weights_hash(trainer.model)
    trainer.train()
    assert weights_hash(trainer.model) != before
    trainer.save_model("./saved-models/marlhf")
    assert Path("saved-models/marlhf/reward_model/model.safetensors").is_file()


def test_the_examples_of_preferences_run(models):
    text = (Path(__file__).parents[1] / "docs" / "preferences.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.S))
    for written, stand_in in (
        ("Qwen/Qwen2.5-0.5B-Instruct", models["3B"]),
        ("preference_num_candidates=", "max_completion_length=4, preference_num_candidates="),
        ("max_length=1024", "max_length=64"),
    ):
        assert written in code
        code = code.replace(written, stand_in)
    names = {}
    exec(compile(code, "preferences.md", "exec"), names)
    assert Path("outputs/essay/preferences/iteration-0.jsonl").is_file()
    assert names["scorer"].score([["w1"], ["w2"]], [["w1"], ["w2"]]).shape == (2,)
    assert Path("outputs/essay-reward/model.safetensors").is_file()
