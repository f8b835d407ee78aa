# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Iterative MADPO: comparators, replay, and where its files and checkpoints are."""

import math
from collections import Counter

import pytest
import torch
from datasets import Dataset
from endpoint import Endpoint, choices
from tiny import (
    dataset,
    llama,
    lm,
    logged,
    parameters,
    preference_args,
    stub_rollouts,
    tok,
    weights_hash,
    word_reward,
)
from transformers import TrainerCallback

from trl_multiagent import MADPOIterConfig, MADPOIterTrainer
from trl_multiagent.rollouts.preferences import read_pairs


def build(output_dir, reward=word_reward, callbacks=(), train_dataset=None, **kwargs) -> MADPOIterTrainer:
    given = {name: kwargs.pop(name) for name in ("tokenizer", "formatters") if name in kwargs}
    return MADPOIterTrainer(
        agents=[lm(0), llama(1)],
        reward_func=reward,
        train_dataset=dataset() if train_dataset is None else train_dataset,
        args=preference_args(MADPOIterConfig, output_dir, **{"num_iterations": 3, **kwargs}),
        callbacks=list(callbacks),
        **{"tokenizer": [tok(), tok()], **given},
    )


def pairs_of(output_dir, iteration: int):
    return read_pairs(output_dir / "preferences" / f"iteration-{iteration}.jsonl")


class AtIterations(TrainerCallback):
    """Hashes of the weights before the first step of each epoch."""

    def __init__(self):
        self.weights = []

    def on_epoch_begin(self, args, state, control, model=None, **kwargs):
        self.weights.append(weights_hash(model))


def test_every_iteration_answers_with_the_team_that_has_learned(tmp_path):
    watch = AtIterations()
    trainer = build(tmp_path, callbacks=[watch])
    trainer.train()
    assert len(set(watch.weights)) == 3
    assert [len(pairs_of(tmp_path, i)) for i in range(3)] == [16, 16, 16]
    assert trainer.env_step == 3 * 8 * (4 + 4)
    assert trainer.state.global_step == trainer.state.max_steps == 6
    for pair in pairs_of(tmp_path, 1):
        assert {pair.winner_source, pair.loser_source} == {"current", "comparator"}
        assert pair.winner_reward > pair.loser_reward


def test_each_iteration_has_an_equal_share_of_the_schedule(tmp_path):
    """Iterations with 4, 1 and 2 steps of a linear schedule from 1: planned by the first as 12 steps."""
    counts = iter([4, 1, 2])
    trainer = build(tmp_path, learning_rate=1.0, per_device_train_batch_size=1, optim="sgd", max_grad_norm=1e-6)
    collect = trainer._collect_pairs
    trainer._collect_pairs = lambda iteration: collect(iteration)[: next(counts)]
    trainer.train()
    rates = [row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row]
    done = [0, 1, 2, 3, 4, 8, 10]  # of 12: a step of the second iteration counts for four, one of the third for two
    assert rates == pytest.approx([1 - step / 12 for step in done])
    assert trainer.state.max_steps == 7


def test_an_iteration_without_pairs_is_passed_over(tmp_path):
    trainer = build(tmp_path)
    collect = trainer._collect_pairs
    trainer._collect_pairs = lambda iteration: [] if iteration == 1 else collect(iteration)
    trainer.train()
    assert trainer.state.global_step == 4
    assert pairs_of(tmp_path, 1) == []


def test_history_compares_with_the_policy_of_the_iteration_before(tmp_path):
    watch, seen = AtIterations(), []
    trainer = build(tmp_path, callbacks=[watch], comparator_policy="history", comparator_history_k=1)
    collect = trainer._collect_pairs

    def frozen(sources):
        actors = type(trainer)._frozen(trainer, sources)
        module = torch.nn.ModuleList(actor.model for actor in actors)
        seen.append(parameters(module))
        return actors

    before = [parameters(trainer.model)]
    trainer._frozen = frozen

    def collected(iteration):
        if iteration:
            before.append(parameters(trainer.model))
        return collect(iteration)

    trainer._collect_pairs = collected
    trainer.train()
    for found, expected in zip(seen, [before[0], before[0], before[1]], strict=True):
        torch.testing.assert_close(found, expected, atol=0, rtol=0)
    assert sorted(path.name for path in (tmp_path / "policies").iterdir()) == ["iteration-1", "iteration-2"]


def test_other_models_may_be_the_comparator(tmp_path):
    for name, model, tokenizer in (("a", lm(5), tok(reverse=True)), ("b", llama(6), tok())):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    trainer = build(
        tmp_path,
        num_iterations=1,
        comparator_policy="model",
        comparator_agents=[str(tmp_path / "a"), str(tmp_path / "b")],
        comparator_num_candidates=2,
        preference_pairs_per_sample=None,
    )
    trainer.train()
    assert trainer.env_step == 8 * (4 + 2)
    for pair in trainer._pairs:
        if pair.loser_source == "comparator":  # it ends as the actor would end it, unless it is too long
            assert all(ids[-1] == 2 or len(ids) == 6 for ids in pair.loser_ids)
    assert 0 < len(pairs_of(tmp_path, 0)) <= 8 * 2
    for pair in trainer._pairs:  # their texts, in the tokens of the actor that learns
        for index, tokenizer in enumerate(trainer.tokenizers):
            assert tokenizer.decode(pair.winner_ids[index], skip_special_tokens=True) == pair.winner_completions[index]


def test_replay_trains_on_earlier_pairs_too(tmp_path):
    trainer = build(tmp_path, preference_replay_mode="all_history", preference_replay_sample_size=40)
    trainer.train()
    logged = [row for row in trainer.state.log_history if "preferences/num_replayed_pairs" in row]
    assert [row["preferences/num_replayed_pairs"] for row in logged] == [40, 40, 40]
    assert [row["preferences/num_pairs"] for row in logged] == [16, 16, 16]
    texts = [
        {(pair.task, *pair.winner_completions, *pair.loser_completions) for pair in pairs_of(tmp_path, i)}
        for i in range(3)
    ]
    drawn = {(pair.task, *pair.winner_completions, *pair.loser_completions) for pair in trainer._pairs}
    assert all(drawn & of_iteration for of_iteration in texts)


def test_boundary_checkpoints_are_iterations_and_a_resume_writes_beside_what_is_there(tmp_path):
    options = dict(num_train_epochs=2, comparator_policy="history", comparator_history_k=2)
    whole = build(tmp_path / "whole", **options)
    whole.train(checkpoint_dir=tmp_path / "saved")
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [f"checkpoint-{i}" for i in (1, 2, 3)]
    again = build(tmp_path / "whole", **options)
    again.train(resume_from_checkpoint=tmp_path / "saved" / "checkpoint-1")
    assert weights_hash(again.model) == weights_hash(whole.model)
    directory = tmp_path / "whole" / "preferences"
    assert sorted(path.name for path in directory.iterdir()) == [
        *(f"iteration-{i}.jsonl" for i in range(3)),
        "resume-1",
    ]
    for i in (1, 2):
        assert read_pairs(directory / "resume-1" / f"iteration-{i}.jsonl") == pairs_of(tmp_path / "whole", i)


def test_a_run_may_get_more_iterations_but_not_longer_ones(tmp_path):
    def run(**kwargs):
        return build(tmp_path, lr_scheduler_type="constant", **kwargs)

    short = run(num_iterations=2)
    short.train(checkpoint_dir=tmp_path / "saved")
    longer = run(num_iterations=3)
    longer.train(resume_from_checkpoint=tmp_path / "saved" / "checkpoint-2")
    whole = build(tmp_path / "whole", lr_scheduler_type="constant", num_iterations=3)
    whole.train()
    assert weights_hash(longer.model) == weights_hash(whole.model)
    with pytest.raises(ValueError, match="epochs_of_an_iteration"):
        run(num_iterations=3, num_train_epochs=2).train(resume_from_checkpoint=tmp_path / "saved" / "checkpoint-2")


# The endpoint as comparator


@pytest.fixture
def serve(monkeypatch):
    """Starts servers, and gives the options of a trainer that asks them."""
    monkeypatch.setenv("TEAM_KEY", "sk-a-secret-key")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    endpoints = []

    def start(reply):
        endpoints.append(Endpoint(reply))
        return endpoints[-1], {
            "num_iterations": 2,
            "comparator_policy": "api",
            "comparator_api_url": endpoints[-1].url,
            "comparator_api_model": "judge",
            "comparator_api_key_env": "TEAM_KEY",
            "comparator_api_max_retries": 1,
        }

    yield start
    for endpoint in endpoints:
        endpoint.close()


def prompt_of(body) -> str:
    (message,) = body["messages"]
    return message["content"]


def numbers(first, second):
    """The sum of the numbers of all words."""
    return [float(sum(int(word[1:]) for word in f"{a} {b}".split())) for a, b in zip(first, second, strict=True)]


LONG = "w1 w1 w1 w1 w1 w1 w0"  # seven tokens, of which six are trained on
SAID = {  # what the endpoint answers to each actor's prompt of each task
    "w20 w1 w2": ["w2", "w9"],
    "w21 w1 w2": ["w6", "w4"],
    "w20 w3": ["w1", "w0"],
    "w21 w3": ["w5", LONG],
}


def test_an_endpoints_answers_are_compared_with_the_teams(tmp_path, monkeypatch, serve):
    endpoint, options = serve(lambda body: (200, choices(*SAID[prompt_of(body)][: body["n"]])))
    trainer = build(
        tmp_path,
        reward=numbers,
        train_dataset=Dataset.from_dict({"prompt": ["w1 w2", "w3"]}),
        tokenizer=[tok(), tok(reverse=True)],
        formatters=[lambda row: f"w20 {row['prompt']}", lambda row: f"w21 {row['prompt']}"],
        temperature=0.7,
        comparator_num_candidates=3,
        comparator_api_max_n_per_request=2,
        comparator_api_headers={"X-Team": "t"},
        comparator_api_extra_body={"min_p": 0.1},
        **options,
    )
    # The team says w1 to w4, and w5: the second actor's words have their ids in the opposite order
    stub_rollouts(monkeypatch, trainer, [[[4, 2], [5, 2], [6, 2], [7, 2]], [[26, 2]]])
    before = weights_hash(trainer.model)
    trainer.train()

    # In each iteration three answers for each actor and task, by two requests
    assert Counter((prompt_of(body), body["n"]) for body in endpoint.bodies) == Counter(
        {(prompt, count): 2 for prompt in SAID for count in (1, 2)}
    )
    sent = {"model": "judge", "max_tokens": 6, "temperature": 0.7, "top_p": 1.0, "min_p": 0.1}
    assert all({name: body[name] for name in sent} == sent for body in endpoint.bodies)
    assert {(headers["Authorization"], headers["X-Team"]) for headers in endpoint.headers} == {
        ("Bearer sk-a-secret-key", "t")
    }

    # Answers 0, 1, 2 of the endpoint are the first, the second, and again the first; their rewards are 8, 13, 8 and
    # 6, 6, 6, the team's 6, 7, 8 in both tasks. Equal ones are no pair; the endpoint's best come first.
    team, others = [["w1", "w5"], ["w2", "w5"], ["w3", "w5"]], [["w2", "w6"], ["w9", "w4"], ["w1", "w5"], ["w0", LONG]]
    expected = [
        (0, others[1], 13, "comparator", team[1], 7, "current"),
        (0, others[0], 8, "comparator", team[0], 6, "current"),
        (1, team[2], 8, "current", others[2], 6, "comparator"),
        (1, team[1], 7, "current", others[3], 6, "comparator"),
    ]
    ids = [
        ([[12, 2], [27, 2]], [[5, 2], [26, 2]]),
        ([[5, 2], [25, 2]], [[4, 2], [26, 2]]),
        ([[6, 2], [26, 2]], [[4, 2], [26, 2]]),
        ([[5, 2], [26, 2]], [[3, 2], [30, 30, 30, 30, 30, 30, 31, 2]]),
    ]
    for iteration in (0, 1):
        pairs = pairs_of(tmp_path, iteration)
        found = [
            (p.task, *(p.winner_completions, p.winner_reward, p.winner_source))
            + (p.loser_completions, p.loser_reward, p.loser_source)
            for p in pairs
        ]
        assert found == expected
        assert [(pair.winner_ids, pair.loser_ids) for pair in pairs] == ids
        assert [pair.prompt_ids for pair in pairs] == [[[23, 4, 5], [10, 30, 29]]] * 2 + [[[23, 6], [10, 28]]] * 2
    assert trainer._pairs[-1].loser_ids == [[3, 2], [30] * 6]
    assert trainer.env_step == 2 * 2 * (4 + 3)
    losses = logged(trainer, "loss")
    assert len(losses) == 2 and all(math.isfinite(loss) for loss in losses)
    assert weights_hash(trainer.model) != before


def test_a_run_goes_on_from_its_last_iteration_when_the_endpoint_is_well_again(tmp_path, serve):
    def words(body):
        start = int(prompt_of(body).split()[0][1:])
        return 200, choices(*(f"w{start} w{index}" for index in range(body["n"])))

    working, options = serve(words)
    whole = build(tmp_path / "whole", **options)
    whole.train(checkpoint_dir=tmp_path / "whole saved")
    assert len(working.bodies) == 2 * 2 * 8  # iterations, actors, tasks

    failing, options = serve(lambda body: words(body) if len(failing.bodies) <= 2 * 8 else (500, {}))
    broken = build(tmp_path / "run", **options)
    with pytest.raises(RuntimeError, match=rf"the comparator of agent_0: {failing.url}/ gave no answer.*'judge'.*500"):
        broken.train(checkpoint_dir=tmp_path / "saved")
    lost = Counter(prompt_of(body) for body in failing.bodies[2 * 8 :])
    assert max(lost.values()) == 2  # tried again once
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["checkpoint-1"]
    assert [path.name for path in (tmp_path / "run" / "preferences").iterdir()] == ["iteration-0.jsonl"]
    assert pairs_of(tmp_path / "run", 0) == pairs_of(tmp_path / "whole", 0)

    working, options = serve(words)  # at another address, and asked in another way
    options |= {"comparator_api_max_retries": 5, "comparator_api_headers": {"X-Team": "t"}}
    resumed = build(tmp_path / "run", **options)
    resumed.train(resume_from_checkpoint=tmp_path / "saved" / "checkpoint-1", checkpoint_dir=tmp_path / "saved")
    assert len(working.bodies) == 2 * 8  # those of the second iteration alone
    assert weights_hash(resumed.model) == weights_hash(whole.model)
    again = tmp_path / "run" / "preferences" / "resume-1" / "iteration-1.jsonl"
    assert read_pairs(again) == pairs_of(tmp_path / "whole", 1)
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["checkpoint-1", "checkpoint-2"]


def test_a_missing_key_is_found_at_construction(tmp_path, monkeypatch, serve):
    endpoint, options = serve(lambda body: (200, choices("w1")))
    monkeypatch.delenv("TEAM_KEY")
    with pytest.raises(ValueError, match="TEAM_KEY is not set or empty.*the comparator of agent_0"):
        build(tmp_path, **options)
    assert endpoint.bodies == []


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(comparator_policy="history"), "comparator_history_k"),
        (dict(comparator_history_k=1), "comparator_policy='history' only"),
        (dict(comparator_policy="model"), "either `comparator_model_name` or `comparator_agents`"),
        (dict(comparator_model_name="m"), "comparator_policy='model' only"),
        (dict(comparator_policy="api"), "comparator_api_model"),
        (dict(comparator_api_url="http://x"), "comparator_policy='api' only"),
        (dict(preference_replay_mode="nearest_k"), "preference_replay_k"),
        (dict(preference_replay_lambda=0.5), "preference_replay_lambda"),
        (dict(num_iterations=0), "num_iterations"),
        (dict(max_steps=5), "num_iterations"),
        (dict(num_train_epochs=1.5), "num_iterations"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        MADPOIterConfig(output_dir=str(tmp_path), use_cpu=True, **options)


def test_a_dataset_of_pairs_has_no_iterations(tmp_path):
    rows = Dataset.from_list(
        [{"prompts": ["w1", "w1"], "winner_completions": ["w2", "w2"], "loser_completions": ["w3", "w3"]}]
    )
    with pytest.raises(ValueError, match="samples its pairs anew"):
        build(tmp_path, train_dataset=rows)
