# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Actors of a team touch each other by the joint reward only: what is trained, what is not, and in any order."""

import hashlib

import pytest
import torch
from tiny import dataset, gpt2, llama, lm, parameters, tok, weights_hash

from trl_multiagent import IACConfig, IACTrainer, MAACConfig, MAACTrainer, MAGRPOConfig, MAGRPOTrainer
from trl_multiagent.agents.grpo_agent import GRPOAgent


TEAMS = {
    "two equal": lambda: [lm(0), lm(0)],
    "two architectures and vocabularies": lambda: [lm(0), llama(1, vocab=40)],
    "three architectures and vocabularies": lambda: [gpt2(2, vocab=36), lm(0), llama(1, vocab=40)],
}

METHODS = ["MAGRPO", "MAAC", "IAC separate", "IAC shared"]
ALL_METHODS = pytest.mark.parametrize("method", METHODS)
BOTH_IAC = pytest.mark.parametrize("method", METHODS[2:])


def joint_reward(*completions):
    """Numbers of the words, the same for any order of the actors and exactly: only whole numbers are added."""
    return [
        float(sum(int(word[1:]) % 7 for text in joint for word in text.split() if word[0] == "w"))
        for joint in zip(*completions, strict=True)
    ]


def options(tmp_path, **changed):
    return {
        "output_dir": str(tmp_path / "run"),
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 5,
        "learning_rate": 1e-2,
        "max_steps": 4,
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "seed": 3,
        **changed,
    }


class SymmetricMAACTrainer(MAACTrainer):
    """The critic sees what the actors say, in alphabetical order, so that the actors' order is nothing to it."""

    def render_critic_input(self, turn, sample, agent=None):
        by_actor = zip(turn.prompts, turn.completions, strict=True)
        return " ".join(sorted(f"{asked[sample]} {said[sample]}" for asked, said in by_actor))


def own_critics(agents):
    """A critic for each actor, of its vocabulary, that goes with it wherever it stands."""
    identities = [int(getattr(agent.config, "identity", f"actor {i}").split()[1]) for i, agent in enumerate(agents)]
    return [
        llama(10 + identity, vocab=agent.config.vocab_size, hidden=8)
        for identity, agent in zip(identities, agents, strict=True)
    ]


def build(tmp_path, agents, method="MAGRPO", reward=joint_reward, peft_config=None, critic=None, **changed):
    arguments = {
        "agents": agents,
        "tokenizer": [tok(agent.config.vocab_size) for agent in agents],
        "reward_func": reward,
        "train_dataset": dataset(8),
        "eval_dataset": dataset(3) if changed.get("eval_strategy") else None,
        "peft_config": peft_config,
    }
    if method == "MAGRPO":
        return MAGRPOTrainer(args=MAGRPOConfig(**options(tmp_path, **changed)), **arguments)
    changed = {"critic_learning_rate": 5e-3, **changed}
    if method == "MAAC":
        args = MAACConfig(**options(tmp_path, critic_type="q", **changed))
        critic = lm(7) if critic is None else critic
        return SymmetricMAACTrainer(args=args, critic_model=critic, critic_tokenizer=tok(), **arguments)
    separate = method == "IAC separate"
    args = IACConfig(**options(tmp_path, use_separate_critic=separate, **changed))
    return IACTrainer(args=args, critics=own_critics(agents) if separate else None, **arguments)


def train(tmp_path, agents, method="MAGRPO", **changed):
    trainer = build(tmp_path, agents, method, **changed)
    trainer.train()
    return trainer


@pytest.fixture
def own_streams(monkeypatch):
    """Give each actor a random stream of its own: it samples by its identity, the step and what it is asked."""
    generate = GRPOAgent._generate_single_turn

    def generate_from_own_stream(self, prompt_ids, *args, **kwargs):
        key = f"{self.model.config.identity} {self.state.global_step} {prompt_ids} {self.model.training}"
        with torch.random.fork_rng():
            torch.manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big"))
            return generate(self, prompt_ids, *args, **kwargs)

    monkeypatch.setattr(GRPOAgent, "_generate_single_turn", generate_from_own_stream)


def named(agents):
    """Identities that go with the actors wherever they stand; equal models are told apart by them as well."""
    for identity, agent in enumerate(agents):
        agent.config.identity = f"actor {identity}"
    return agents


# What is trained, and what is not


@ALL_METHODS
@pytest.mark.parametrize("team", TEAMS)
def test_every_actor_and_critic_learns(team, method, tmp_path):
    agents = TEAMS[team]()
    trainer = build(tmp_path, agents, method, critic=gpt2(7))
    before = {name: parameters(module) for name, module in trainer.model.entities()}
    trainer.train()
    for name, module in trainer.model.entities():
        new, old = parameters(module), before[name]
        assert torch.isfinite(new).all(), name
        assert not torch.equal(new, old), name
        assert (new - old).abs().max() < 0.1, name  # four steps of AdamW at 1e-2 move no weight further than this
    critics = {"MAAC": ["critic"], "IAC separate": [f"agent_{i}/critic" for i in range(len(agents))]}.get(method, [])
    for step in trainer.state.log_history[:-1]:
        assert all(step[f"{name}/grad_norm"] > 0 for name in [*(f"agent_{i}" for i in range(len(agents))), *critics])


@BOTH_IAC
def test_every_layer_of_every_critic_learns(method, tmp_path):
    """All but output embeddings, which no value reads."""
    trainer = build(tmp_path, [lm(0), llama(1, vocab=40)], method, learning_rate=0.0)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    still = {name for name, p in trainer.model.named_parameters() if torch.equal(p, before[name])}
    heads = {name for name in before if "value_head" in name}
    assert len(heads) == 4 and not still & heads
    if method == "IAC separate":
        actors = {name for name in before if name.startswith("agents.")}
        assert still == actors | {f"critics.{i}.backbone.lm_head.weight" for i in range(2)}
    else:  # the backbones are the actors', whose learning rate is 0
        assert still == set(before) - heads


def test_every_layer_of_every_actor_learns(tmp_path):
    agents = [lm(0), llama(1, vocab=40)]
    before = [{name: p.detach().clone() for name, p in agent.named_parameters()} for agent in agents]
    trainer = train(tmp_path, agents)
    for agent, old in zip(trainer.agents, before, strict=True):
        still = [name for name, p in agent.named_parameters() if torch.equal(p, old[name])]
        assert still == []


@ALL_METHODS
def test_a_frozen_actor_and_its_own_critic_do_not_move(method, tmp_path):
    agents = [lm(0), llama(1, vocab=40)]
    agents[1].requires_grad_(False)
    trainer = build(tmp_path, agents, method, weight_decay=0.1)
    before = {name: weights_hash(module) for name, module in trainer.model.entities()}
    trainer.train()
    moved = {name for name, module in trainer.model.entities() if weights_hash(module) != before[name]}
    assert moved == {"agent_0", *{"MAAC": ["critic"], "IAC separate": ["critic_0"]}.get(method, [])}
    assert not any(parameter.requires_grad for parameter in trainer.agents[1].parameters())
    # It still acts: the other learns from a joint reward
    entry = trainer.state.log_history[0]
    assert entry["agent_1/completions/mean_length"] > 0
    assert not any(name.startswith("agent_1/critic") for name in entry)
    if method == "IAC shared":
        assert [hasattr(agent, "value_head") for agent in trainer.agents] == [True, False]


def test_frozen_layers_do_not_move_and_the_others_do(tmp_path):
    agents = [lm(0), gpt2(2)]
    agents[0].get_input_embeddings().requires_grad_(False)
    agents[1].transformer.h[0].attn.requires_grad_(False)
    frozen = {
        (i, name): parameter.detach().clone()
        for i, agent in enumerate(agents)
        for name, parameter in agent.named_parameters()
        if not parameter.requires_grad
    }
    free = [{name: p.detach().clone() for name, p in agent.named_parameters() if p.requires_grad} for agent in agents]
    assert len(frozen) == 5
    trainer = train(tmp_path, agents, weight_decay=0.1)
    for (index, name), old in frozen.items():
        assert torch.equal(trainer.agents[index].get_parameter(name), old), name
    for agent, old in zip(trainer.agents, free, strict=True):
        assert [name for name in old if torch.equal(agent.get_parameter(name), old[name])] == []


def test_a_frozen_actor_counts_the_same_as_one_with_learning_rate_zero(own_streams, tmp_path):
    """Freezing one actor leaves the update of the other as it is."""

    def run(freeze):
        agents = named([lm(0), llama(1, vocab=40)])
        agents[1].requires_grad_(not freeze)
        trainer = build(tmp_path, agents)
        if not freeze:
            trainer.create_optimizer()
            for group in trainer.optimizer.param_groups:
                if group["entity"] == "agent_1":
                    group["lr"] = 0.0
        trainer.train()
        return weights_hash(trainer.agents[0])

    assert run(freeze=True) == run(freeze=False)


# Order


@ALL_METHODS
@pytest.mark.parametrize("team", TEAMS)
@pytest.mark.parametrize("changed", [{}, {"beta": 0.1, "num_iterations": 2, "gradient_accumulation_steps": 2}])
def test_exchanged_actors_give_exchanged_results(team, method, changed, own_streams, tmp_path):
    def run(order):
        agents = named(TEAMS[team]())
        trainer = train(tmp_path, [agents[i] for i in order], method, **changed)
        by_actor = {agent.config.identity: weights_hash(agent) for agent in trainer.agents}
        if method == "IAC separate":
            critics = zip(trainer.agents, trainer.critics, strict=True)
            by_actor |= {f"critic of {agent.config.identity}": weights_hash(critic) for agent, critic in critics}
        return by_actor, trainer

    size = len(TEAMS[team]())
    straight, first = run(range(size))
    turned, second = run([*range(1, size), 0])
    assert [agent.config.identity for agent in second.agents][-1] == "actor 0"
    assert straight == turned
    # Actors that start equal have become different ones
    assert len(set(straight.values())) == len(straight) == size * (2 if method == "IAC separate" else 1)
    if method == "MAAC":
        assert weights_hash(first.critics[0]) == weights_hash(second.critics[0])
    rewards = [[step["reward"] for step in t.state.log_history if "reward" in step] for t in (first, second)]
    assert rewards[0] == rewards[1] and len(set(rewards[0])) > 1


# Accumulation


def rewards_with_gaps(*completions):
    return [None if value % 3 == 0 else value for value in joint_reward(*completions)]


@pytest.mark.parametrize("reward", [joint_reward, rewards_with_gaps])
@ALL_METHODS
@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_accumulated_micro_batches_give_the_update_of_one_batch(loss_type, method, reward, tmp_path):
    def run(size, accumulation):
        trainer = train(
            tmp_path,
            [lm(0), llama(1, vocab=40)],
            method,
            reward=reward,
            loss_type=loss_type,
            beta=0.1,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation,
            adam_epsilon=1e-3,  # or AdamW would turn the rounding of a gradient that is 0 into a step
        )
        assert trainer.state.global_step == 4
        return parameters(trainer.model), [step["loss"] for step in trainer.state.log_history[:-1]]

    start = parameters(lm(0))
    (whole, losses), *others = run(8, 1), run(4, 2), run(1, 8)
    assert (whole[: start.numel()] - start).abs().max() > 1e-3
    for weights, parts in others:
        torch.testing.assert_close(weights, whole, rtol=0, atol=5e-6)
        assert parts == pytest.approx(losses, rel=1e-4, abs=1e-5)


# Evaluation


@ALL_METHODS
@pytest.mark.parametrize("changed", [{}, {"num_iterations": 2, "beta": 0.1}])
def test_evaluation_does_not_change_training(method, changed, tmp_path):
    def run(**evaluation):
        trainer = train(tmp_path, [lm(0), llama(1, vocab=40)], method, **changed, **evaluation)
        logs = [step for step in trainer.state.log_history if "loss" in step]
        for step in logs:
            step.pop("step_time")
        return weights_hash(trainer.model), logs, trainer

    without, logs, _ = run()
    beside, logs_beside, trainer = run(eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=8)
    evaluations = [step for step in trainer.state.log_history if "eval_reward" in step]
    assert len(evaluations) == 4
    assert beside == without
    assert logs_beside == logs


def test_evaluation_before_training_does_not_change_it(tmp_path):
    def run(evaluate):
        trainer = build(tmp_path, [lm(0), gpt2(2)], eval_strategy="steps", eval_steps=100)
        if evaluate:
            trainer.evaluate()
        trainer.train()
        return weights_hash(trainer.model)

    assert run(evaluate=True) == run(evaluate=False)


# Separate rewards


def test_one_more_actor_with_a_reward_of_its_own_changes_nothing_for_the_first(own_streams, tmp_path):
    """Each actor's gradient is clipped by its own norm, so not even a large one beside it is felt."""

    def own(*completions):
        return [
            joint_reward(texts) if i == 0 else [50 * x for x in joint_reward(texts)]
            for i, texts in enumerate(completions)
        ]

    def run(size):
        agents = named([lm(0), llama(1, vocab=40), gpt2(2, vocab=36)])[:size]
        trainer = train(tmp_path, agents, reward=own, max_grad_norm=0.05)
        return weights_hash(trainer.agents[0]), [
            (step["agent_0/grad_norm"], step["agent_0/entropy"]) for step in trainer.state.log_history[:-1]
        ]

    alone, beside_one, beside_two = run(1), run(2), run(3)
    assert alone == beside_one == beside_two
    assert all(norm > 0.05 for norm, _ in alone[1])  # clipped at every step


@pytest.mark.parametrize(
    ("method", "changed"),
    [
        ("MAGRPO", {"scale_rewards": "group"}),
        ("MAGRPO", {"scale_rewards": "none"}),
        ("IAC separate", {}),
        ("IAC separate", {"value_normalization": True, "critic_type": "q"}),
        ("IAC shared", {}),
        ("IAC shared", {"advantage_level": "token", "advantage_normalization": False}),
    ],
)
def test_another_actors_rewards_shifted_by_a_constant_change_nothing(method, changed, own_streams, tmp_path):
    """B26: neither for the first actor nor for its critic."""

    def run(shift):
        def own(first, second):
            return [joint_reward(first), [value + shift for value in joint_reward(second)]]

        trainer = train(tmp_path, named([lm(0), llama(1, vocab=40)]), method, reward=own, **changed)
        return {name: weights_hash(module) for name, module in trainer.model.entities()}

    plain, shifted = run(0.0), run(100.0)
    assert plain["agent_0"] == shifted["agent_0"] != weights_hash(lm(0))
    if method == "IAC separate":
        assert plain["critic_0"] == shifted["critic_0"] and plain["critic_1"] != shifted["critic_1"]
    elif method == "IAC shared":
        assert plain["agent_1"] != shifted["agent_1"]  # its head follows the rewards
