# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""What CoMLRL's documents show runs here with another import path, on local model directories."""

import re
from pathlib import Path

import pytest
import torch
from tiny import dataset, gpt2, llama, tok, weights_hash, word_reward

from trl_multiagent import MAACConfig, MAACTrainer, MAGRPOConfig, MAGRPOTrainer
from trl_multiagent.agents.loading import load_tokenizer as from_pretrained


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
