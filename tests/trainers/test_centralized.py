# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""One actor that writes the answers of two roles, trained by every preference trainer that samples."""

import math

import pytest
import torch
from datasets import Dataset
from endpoint import Endpoint, choices
from tiny import llama, logged, preference_args, stub_rollouts, tok, weights_hash
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_multiagent import (
    MADPOIterConfig,
    MADPOIterTrainer,
    MARLHFConfig,
    MARLHFIterConfig,
    MARLHFIterTrainer,
    MARLHFTrainer,
)
from trl_multiagent.rollouts.preferences import read_pairs


TAGS = ["<agent_0>", "</agent_0>", "<agent_1>", "</agent_1>"]
TASKS = ["w1 w2", "w3"]
# What the actor answers to each task; the fourth and the fifth answer cannot be read
SAID = [
    "<agent_0> w1 </agent_0> <agent_1> w2 </agent_1>",
    "<agent_0> w3 </agent_0> <agent_1> w0 </agent_1>",
    "<agent_1> w5 </agent_1> <agent_0> w2 </agent_0>",
    "w1 w2",
    "<agent_0> w1 <agent_1> w2 </agent_1>",
    "<agent_0> w6 w6 </agent_0> <agent_1> </agent_1>",
]
ROLES = [["w1", "w3", "w2", "w6 w6"], ["w2", "w0", "w5", ""]]  # what that says for each role
REWARDS = [3, 3, 7, None, None, 12]  # the sum of the numbers
# An endpoint that the iterative trainers compare with gives the same answers, the first one last
OTHERS, ROLES_OF_OTHERS = SAID[1:] + SAID[:1], [texts[1:] + texts[:1] for texts in ROLES]

CASES = {
    "MADPO, iterative": (MADPOIterTrainer, MADPOIterConfig, {}),
    "MARLHF, magrpo": (MARLHFTrainer, MARLHFConfig, {}),
    "MARLHF, maac": (MARLHFTrainer, MARLHFConfig, {"rl_algorithm": "maac"}),
    "MARLHF, iac": (MARLHFTrainer, MARLHFConfig, {"rl_algorithm": "iac", "use_separate_critic": False}),
    "MARLHF, iterative": (MARLHFIterTrainer, MARLHFIterConfig, {}),
}
EACH = pytest.mark.parametrize("case", CASES)
EACH_OF_RL = pytest.mark.parametrize("case", [case for case in CASES if case.startswith("MARLHF")])


class Numbers:
    """The sum of the numbers of both roles' words; it keeps what it was asked."""

    __name__ = "numbers"

    def __init__(self):
        self.calls = []

    def __call__(self, first, second):
        self.calls.append([list(first), list(second)])
        texts = [f"{a} {b}" for a, b in zip(first, second, strict=True)]
        return [float(sum(int(word[1:]) for word in text.split())) for text in texts]


def tokens(text: str) -> list[int]:
    return [10 + TAGS.index(word) if word in TAGS else 3 + int(word[1:]) for word in text.split()] + [2]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    directory = tmp_path_factory.mktemp("model")
    llama(3, vocab=14).save_pretrained(directory)
    tokenizer = tok(10)
    tokenizer.add_tokens(TAGS)
    tokenizer.save_pretrained(directory)
    return str(directory)


@pytest.fixture
def build(tmp_path, model, monkeypatch):
    """Builds a trainer of a case whose actor gives the answers above."""
    monkeypatch.setenv("OPENAI_API_KEY", "a key")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    endpoint = Endpoint(lambda body: (200, choices(*OTHERS[: body["n"]])))

    def make(case, output_dir=tmp_path, reward=None, **kwargs):
        trainer_class, config_class, options = CASES[case]
        given = {name: kwargs.pop(name) for name in ("eval_dataset", "reward_render") if name in kwargs}
        options = {
            "collaboration_mode": "centralized",
            "num_agents": 2,
            "max_completion_length": 8,
            "preference_num_candidates": len(SAID),
            "pair_selection": "all",
            **options,
        }
        if trainer_class is not MADPOIterTrainer:
            options |= {"num_generations": len(SAID), "per_device_train_batch_size": 2 * len(SAID)}
            options |= {"reward_learning_rate": 1e-2, "reward_eval_fraction": 0.0}
        if options.get("rl_algorithm") == "maac":
            options |= {"critic_model_name": model}
        if is_iterative(case):
            options |= {"num_iterations": 2, "comparator_policy": "api", "comparator_api_model": "m"}
            options |= {"comparator_api_url": endpoint.url}
        trainer = trainer_class(
            agent_model=model,
            reward_func=Numbers() if reward is None else reward,
            formatters=[lambda row: f"w1 {row['prompt']}", lambda row: f"w2 {row['prompt']}"],
            train_dataset=Dataset.from_dict({"prompt": TASKS}),
            args=preference_args(config_class, output_dir, **{**options, **kwargs}),
            **given,
        )
        stub_rollouts(monkeypatch, trainer, [[tokens(text) for text in SAID]])
        return trainer

    yield make
    endpoint.close()


def is_iterative(case) -> bool:
    return "iterative" in case


def pairs_of(output_dir, iteration: int = 0) -> set[tuple]:
    pairs = read_pairs(output_dir / "preferences" / f"iteration-{iteration}.jsonl")
    for pair in pairs:
        (prompt,), (winner,), (loser,) = pair.prompts, pair.winner_completions, pair.loser_completions
        for role in (1, 2):
            assert f"Prompt of agent {role - 1}:\nw{role} {TASKS[pair.task]}\n" in prompt
        assert (pair.winner_ids, pair.loser_ids) == ([tokens(winner)], [tokens(loser)])
    return {(pair.task, *pair.winner_completions, *pair.loser_completions) for pair in pairs}


def expected_pairs(case, rewards=REWARDS) -> set[tuple]:
    scored = list(zip(SAID, rewards, strict=True))
    both = list(zip(scored, scored[1:] + scored[:1], strict=True))  # answer i of the actor, and of the endpoint
    if not is_iterative(case):
        both = [(a, b) for a in scored for b in scored]
    known = [(a, b) for a, b in both if None not in (a[1], b[1]) and a[1] != b[1]]
    ordered = [sorted(pair, key=lambda answer: -answer[1]) for pair in known]
    return {(task, winner[0], loser[0]) for task in range(len(TASKS)) for winner, loser in ordered}


@EACH
def test_one_actor_is_trained_on_the_answers_of_all_roles(tmp_path, build, case):
    reward = Numbers()
    trainer = build(case, reward=reward)
    before = weights_hash(trainer.agents[0])
    trainer.train()
    assert len(trainer.agents) == 1 and weights_hash(trainer.agents[0]) != before
    assert all(math.isfinite(loss) for loss in logged(trainer, "loss"))
    of_iteration = [ROLES] * 2 + [ROLES_OF_OTHERS] * 2 if is_iterative(case) else [ROLES] * 2
    assert reward.calls == of_iteration * (2 if is_iterative(case) else 1)
    assert len(expected_pairs(case)) == 2 * (2 if is_iterative(case) else 5)
    for iteration in range(2 if is_iterative(case) else 1):
        assert pairs_of(tmp_path, iteration) == expected_pairs(case)


@EACH
def test_the_share_of_answers_that_cannot_be_read_is_logged(build, case):
    rows = Dataset.from_dict({"prompt": TASKS})
    trainer = build(case, eval_dataset=rows, num_generations_eval=3, per_device_eval_batch_size=3)
    metrics = trainer.evaluate()
    assert metrics["eval_rewards/numbers/mean"] == pytest.approx((3 + 3 + 7) / 3)
    trainer.train()
    of_collections = logged(trainer, "preferences/frac_unparsable")
    assert of_collections == pytest.approx([2 / 6] * (2 if is_iterative(case) else 1))  # an evaluation's do not count
    if case.startswith("MARLHF"):
        of_rollouts = logged(trainer, "frac_unparsable")
        assert of_rollouts == pytest.approx([2 / 6] * len(logged(trainer, "loss")))


@EACH
def test_answers_that_cannot_be_read_may_have_a_reward(tmp_path, build, case):
    rows = Dataset.from_dict({"prompt": TASKS})
    options = {"num_generations_eval": 6, "per_device_eval_batch_size": 12, "eval_dataset": rows}
    assert build(case, **options).evaluate()["eval_rewards/numbers/mean"] == pytest.approx((3 + 3 + 7 + 12) / 4)
    trainer = build(case, unparsable_reward=-1.0, **options)
    assert trainer.evaluate()["eval_rewards/numbers/mean"] == pytest.approx((3 + 3 + 7 - 1 - 1 + 12) / 6)
    trainer.train()
    expected = expected_pairs(case, [-1 if reward is None else reward for reward in REWARDS])
    assert len(expected) == 2 * (4 if is_iterative(case) else 13)
    assert pairs_of(tmp_path) == expected
    first = logged(trainer, "preferences/frac_unparsable")[0]
    assert first == pytest.approx(2 / 6)


@EACH_OF_RL
def test_the_learned_reward_reads_the_whole_answer(tmp_path, build, case):
    read = []

    def render(prompts, completions):
        read.append((*prompts, *completions))
        return " ".join((*prompts, *completions))

    trainer = build(case, reward_render=render, num_train_epochs=1)
    scored, score = [], trainer._reward_model_of_rows

    def spy(completions, batch_items):
        read.clear()
        scores = score(completions, batch_items=batch_items)
        scored.extend(zip(completions, batch_items, read, scores.tolist(), strict=True))
        return scores

    trainer._learned_reward.funcs[0] = spy
    trainer.train()
    assert {completion for completion, *_ in scored} == set(SAID)
    for completion, row, (prompt, text), value in scored:
        assert text == completion and f"Prompt of agent 1:\nw2 {row['prompt']}\n" in prompt and math.isfinite(value)
    assert "rewards/reward_model/mean" in trainer.state.log_history[0]


def test_where_the_learned_reward_labels_pairs_what_cannot_be_read_is_in_none(tmp_path, build):
    case, reward = "MARLHF, iterative", Numbers()
    trainer = build(case, reward=reward, preference_scoring_reward="reward_model")
    trainer.train()
    assert reward.calls == [ROLES] * 2 + [ROLES_OF_OTHERS] * 2  # in the first iteration alone
    parsable = {text for text, value in zip(SAID, REWARDS, strict=True) if value is not None}
    second = pairs_of(tmp_path, 1)
    assert second and {text for _, *texts in second for text in texts} <= parsable
    assert logged(trainer, "preferences/frac_unparsable") == pytest.approx([2 / 6] * 2)


@EACH
def test_the_export_is_one_actor(tmp_path, build, case):
    trainer = build(case)
    trainer.train()
    trainer.save_model(tmp_path / "export")
    others = {"MARLHF, maac": {"critic"}}.get(case, set()) | ({"reward_model"} if case.startswith("MARLHF") else set())
    directories = {path.name for path in (tmp_path / "export").iterdir() if path.is_dir()}
    assert directories == {"agent_0"} | others
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export" / "agent_0")
    trained = dict(trainer.agents[0].named_parameters())
    assert all(torch.equal(parameter, trained[name]) for name, parameter in loaded.named_parameters())
    assert AutoTokenizer.from_pretrained(tmp_path / "export" / "agent_0")(SAID[0])["input_ids"] == tokens(SAID[0])[:-1]


@EACH
def test_a_resumed_run_ends_as_the_whole_one(tmp_path, build, case):
    whole = build(case, tmp_path / "whole")
    whole.train(checkpoint_dir=tmp_path / "saved")
    moved = {"reward_model_device": "cpu"} if case.startswith("MARLHF") else {}
    resumed = build(case, tmp_path / "resumed", preference_dir=str(tmp_path / "pairs"), **moved)
    resumed.train(resume_from_checkpoint=tmp_path / "saved" / "checkpoint-1")
    assert weights_hash(resumed.model) == weights_hash(whole.model)
    assert logged(resumed, "preferences/frac_unparsable") == logged(whole, "preferences/frac_unparsable")
