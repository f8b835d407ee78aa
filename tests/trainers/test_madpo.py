# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""MADPO: DPO of the joint policy, on pairs that are sampled or given."""

import json
import math

import datasets
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tiny import (
    CHAT_TEMPLATE,
    dataset,
    gpt2,
    llama,
    lm,
    parameters,
    preference_args,
    stub_rollouts,
    tok,
    weights_hash,
    word_reward,
)
from trl import DPOConfig, DPOTrainer

from trl_multiagent import MADPOConfig, MADPOTrainer


def config(output_dir, **kwargs) -> MADPOConfig:
    return preference_args(MADPOConfig, output_dir, **kwargs)


def pairs_of_two(rows: int = 6) -> Dataset:
    """Pairs of two actors with completions of different lengths."""
    return Dataset.from_list(
        [
            {
                "prompts": [f"w{i} w1", f"w2 w{i} w3"],
                "winner_completions": [f"w{i + 4}", f"w5 w{i} w6 w7"],
                "loser_completions": [f"w9 w{i}", "w8"],
            }
            for i in range(rows)
        ]
    )


def pairs_of_one(rows: int = 6) -> Dataset:
    joint = pairs_of_two(rows)
    return Dataset.from_list(
        [
            {"prompt": r["prompts"][1], "chosen": r["winner_completions"][1], "rejected": r["loser_completions"][1]}
            for r in joint
        ]
    )


def two_actors(output_dir, train_dataset=None, agents=None, **kwargs) -> MADPOTrainer:
    given = {name: kwargs.pop(name) for name in ("peft_config", "callbacks", "eval_dataset") if name in kwargs}
    offline = train_dataset is not None and "prompts" in train_dataset.column_names
    return MADPOTrainer(
        agents=[lm(0), llama(1)] if agents is None else agents,
        tokenizer=[tok(), tok(reverse=True)],
        reward_func=None if offline else word_reward,
        train_dataset=dataset() if train_dataset is None else train_dataset,
        args=config(output_dir, **kwargs),
        **given,
    )


def losses_of(trainer) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


# One actor is TRL's DPO


@pytest.mark.parametrize("loss_type, smoothing", [("sigmoid", 0.0), ("hinge", 0.0), ("ipo", 0.0)])
@pytest.mark.parametrize("make", [lm, gpt2])
def test_one_actor_has_the_loss_and_the_gradient_of_trl(tmp_path, make, loss_type, smoothing):
    common = dict(
        use_cpu=True,
        per_device_train_batch_size=6,
        num_train_epochs=3,
        beta=0.3,
        learning_rate=0.05,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        weight_decay=0.0,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        label_smoothing=smoothing,
    )
    args = DPOConfig(output_dir=str(tmp_path / "trl"), loss_type=[loss_type], bf16=False, **common)
    stock = DPOTrainer(
        model=make(3), ref_model=make(3), args=args, processing_class=tok(), train_dataset=pairs_of_one()
    )
    ours = MADPOTrainer(
        agents=[make(3)],
        tokenizer=tok(),
        train_dataset=pairs_of_one(),
        args=config(tmp_path, loss_type=loss_type, **common),
    )
    stock.train()
    ours.train()
    assert losses_of(ours) == pytest.approx(losses_of(stock), abs=1e-5)
    moved = parameters(stock.model) - parameters(make(3))
    assert moved.abs().max() > 1e-2
    torch.testing.assert_close(parameters(ours.agents[0]), parameters(stock.model), atol=1e-5, rtol=0)


def test_conversational_pairs_have_the_tokens_of_trl(tmp_path):
    rows = [
        {
            "prompt": [{"role": "user", "content": r["prompt"]}],
            "chosen": [{"role": "assistant", "content": r["chosen"]}],
            "rejected": [{"role": "assistant", "content": r["rejected"]}],
        }
        for r in pairs_of_one()
    ]
    tokenizer = tok(chat_template=CHAT_TEMPLATE)
    stock = DPOTrainer(
        model=lm(3),
        ref_model=lm(3),
        args=DPOConfig(output_dir=str(tmp_path / "trl"), use_cpu=True, bf16=False, report_to="none"),
        processing_class=tok(chat_template=CHAT_TEMPLATE),
        train_dataset=Dataset.from_list(rows),
    )
    ours = MADPOTrainer(
        agents=[lm(3)], tokenizer=tokenizer, train_dataset=Dataset.from_list(rows), args=config(tmp_path)
    )
    ours.get_train_dataloader()
    for row, pair in zip(stock.train_dataset, ours._pairs, strict=True):
        assert [pair.prompt_ids[0], pair.winner_ids[0], pair.loser_ids[0]] == [
            row["prompt_ids"],
            row["chosen_ids"],
            row["rejected_ids"],
        ]


# The joint loss


def logp(model, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """Slow and alone: no padding, one token after the other."""
    total = torch.zeros(())
    for place in range(len(completion)):
        logits = model(input_ids=torch.tensor([prompt + completion[:place]])).logits[0, -1]
        total = total + logits.log_softmax(-1)[completion[place]]
    return total


@pytest.mark.parametrize("reference_free", [False, True])
@pytest.mark.parametrize("recompute", [True, False])
def test_two_actors_have_the_joint_gradient(tmp_path, recompute, reference_free):
    trainer = two_actors(
        tmp_path,
        pairs_of_two(),
        beta=0.2,
        recompute_activations=recompute,
        reference_free=reference_free,
        per_device_train_batch_size=6,
    )
    # Away from the references, where every actor's gradient depends on the other's margin
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    trainer.get_train_dataloader()
    trainer.model.train()
    trainer._pairs_in_step = len(trainer._pairs)
    loss = trainer.compute_loss(trainer.model, trainer._pairs)
    loss.backward()
    found = [p.grad.clone() for p in trainer.model.agents.parameters()]
    trainer.model.zero_grad()
    expected = torch.zeros(())
    for pair in trainer._pairs:
        margin = torch.zeros(())
        for i, agent in enumerate(trainer.agents):
            reference = trainer.agent_trainers[i].ref_model
            for ids, sign in ((pair.winner_ids[i], 1), (pair.loser_ids[i], -1)):
                margin = margin + sign * logp(agent, pair.prompt_ids[i], ids)
                if not reference_free:
                    margin = margin - sign * logp(reference, pair.prompt_ids[i], ids).detach()
        expected = expected - torch.nn.functional.logsigmoid(0.2 * margin) / len(trainer._pairs)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    for own, parameter in zip(found, trainer.model.agents.parameters(), strict=True):
        torch.testing.assert_close(own, parameter.grad, atol=1e-5, rtol=1e-4)


def trained_lora(seed: int):
    model = get_peft_model(lm(seed), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    return model


@pytest.mark.parametrize("start", ["full", "fresh adapter", "trained adapter"])
def test_b41_at_the_first_step_the_policy_is_its_reference(tmp_path, start):
    agents = [trained_lora(0), trained_lora(1)] if start == "trained adapter" else [lm(0), lm(1)]
    peft = LoraConfig(r=2, target_modules=["q_proj", "v_proj"]) if start == "fresh adapter" else None
    trainer = two_actors(tmp_path, pairs_of_two(), agents, peft_config=peft, per_device_train_batch_size=3)
    trainer.train()
    first, second = (row for row in trainer.state.log_history if "loss" in row)
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["rewards/margins"] == pytest.approx(0, abs=1e-6)
    assert abs(second["rewards/margins"]) > 1e-4  # it has moved, and its reference has not


@pytest.mark.parametrize("size, accumulation", [(1, 6), (2, 3), (4, 2)])
def test_accumulation_gives_the_weights_of_one_batch(tmp_path, size, accumulation):
    def weights(size, accumulation):
        trainer = two_actors(
            tmp_path,
            pairs_of_two(),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation,
            num_train_epochs=2,
            optim="sgd",
        )
        trainer.train()
        return parameters(trainer.model), losses_of(trainer)

    found, losses = weights(size, accumulation)
    expected, expected_losses = weights(6, 1)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    assert losses == pytest.approx(expected_losses, abs=1e-5)


def test_precomputed_references_give_the_same_training(tmp_path):
    def weights(**kwargs):
        trainer = two_actors(tmp_path, pairs_of_two(), num_train_epochs=3, optim="sgd", **kwargs)
        trainer.train()
        return parameters(trainer.model)

    torch.testing.assert_close(weights(precompute_ref_log_probs=True), weights(), atol=1e-6, rtol=0)


def test_a_frozen_actor_stays_as_it_is_and_adds_nothing(tmp_path):
    trainer = two_actors(tmp_path, pairs_of_two(), trainable_agents=[True, False], num_train_epochs=3)
    before = [weights_hash(agent) for agent in trainer.agents]
    trainer.train()
    after = [weights_hash(agent) for agent in trainer.agents]
    assert after[0] != before[0] and after[1] == before[1]
    assert all(row["agent_1/rewards/margins"] == 0 for row in trainer.state.log_history if "loss" in row)


def test_training_separates_the_pairs(tmp_path):
    trainer = two_actors(tmp_path, pairs_of_two(), eval_dataset=pairs_of_two(), num_train_epochs=20)
    trainer.train()
    metrics = trainer.evaluate()
    assert metrics["eval_rewards/accuracies"] == 1
    assert metrics["eval_loss"] < 0.5
    assert metrics["eval_rewards/margins"] == pytest.approx(
        metrics["eval_agent_0/rewards/margins"] + metrics["eval_agent_1/rewards/margins"]
    )


# Sampled pairs


def test_pairs_are_made_of_the_sampled_tokens(tmp_path, monkeypatch):
    trainer = two_actors(tmp_path, dataset(2), preference_pairs_per_sample=None, preference_batch_size=8)
    # w4 ends by itself, w5 w6 ... is cut at the limit
    stub_rollouts(monkeypatch, trainer, [[[7, 2], [8, 9, 10, 11, 12, 13], [2], [7, 2]]] * 2)
    trainer.get_train_dataloader()
    ids = {tuple(ids) for pair in trainer._pairs for ids in (pair.winner_ids[0], pair.loser_ids[0])}
    assert ids == {(7, 2), (8, 9, 10, 11, 12, 13), (2,)}
    assert all(pair.winner_reward > pair.loser_reward for pair in trainer._pairs)
    texts = {text for pair in trainer._pairs for text in (pair.winner_completions[0], pair.loser_completions[0])}
    assert "" in texts  # EOS alone
    assert len(trainer._pairs) == 2 * 5  # of four candidates two are alike: 6 pairs less a tie


def test_b21_pairs_without_a_token_are_dropped(tmp_path, monkeypatch, caplog):
    trainer = two_actors(tmp_path, dataset(2), preference_pairs_per_sample=None)
    stub_rollouts(monkeypatch, trainer, [[[7, 2], [], [8, 2], [9, 2]], [[7, 2]]])
    trainer.train()
    assert "are dropped" in caplog.text
    assert all(ids for pair in trainer._pairs for ids in (*pair.winner_ids, *pair.loser_ids))
    assert all(math.isfinite(loss) for loss in losses_of(trainer))


def test_equal_rewards_are_no_pairs_and_say_so(tmp_path):
    trainer = two_actors(tmp_path)
    trainer.reward.funcs[0] = lambda a, b: [1.0] * len(a)
    trainer.reward._takes[0] = set()
    with pytest.raises(ValueError, match="no preference pair to train on"):
        trainer.train()


def test_the_file_of_pairs_is_a_dataset_that_trains(tmp_path):
    trainer = two_actors(tmp_path)
    trainer.get_train_dataloader()
    path = tmp_path / "preferences" / "iteration-0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == len(trainer._pairs) == 16
    rows = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    again = two_actors(tmp_path / "again", rows)
    again.train()
    assert [pair.winner_ids for pair in again._pairs] == [pair.winner_ids for pair in trainer._pairs]


def test_prompts_of_two_kinds_are_a_dataset_too(tmp_path):
    """One actor is asked by messages, the other by text: a column has one type, so both are written as text."""
    chat = tok(chat_template=CHAT_TEMPLATE)
    formatters = [lambda row: [{"role": "user", "content": row["prompt"]}], lambda row: row["prompt"]]
    given = {"tokenizer": [chat, tok()], "reward_func": word_reward, "agents": [lm(0), lm(1)]}
    args = config(tmp_path, max_steps=1)
    trainer = MADPOTrainer(**given, args=args, train_dataset=dataset(4), formatters=formatters)
    trainer.train()
    path = tmp_path / "preferences" / "iteration-0.jsonl"
    rows = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    asked = dataset(4)[rows[0]["task"]]["prompt"]
    assert rows[0]["prompts"] == [f"user: {asked}", asked]
    assert rows[0]["prompt_ids"] == [chat(f"user : {asked} assistant :")["input_ids"], chat(asked)["input_ids"]]
    again = MADPOTrainer(
        **{**given, "agents": [lm(0), lm(1)]}, args=config(tmp_path / "b", max_steps=1), train_dataset=rows
    )
    again.train()
    assert weights_hash(again.model) == weights_hash(trainer.model)


def test_tokens_of_another_tokenizer_are_refused(tmp_path):
    trainer = two_actors(tmp_path)
    trainer.get_train_dataloader()
    rows = Dataset.from_list([vars(pair) for pair in trainer._pairs])
    other = MADPOTrainer(
        agents=[lm(0), llama(1)], tokenizer=tok(), train_dataset=rows, args=config(tmp_path / "other")
    )
    with pytest.raises(ValueError, match="of another tokenizer"):
        other.train()


def test_candidates_count_as_evaluations_of_the_reward(tmp_path):
    trainer = two_actors(tmp_path)
    trainer.train()
    assert trainer.env_step == 8 * 4


def test_evaluation_on_tasks_has_rewards_and_no_loss(tmp_path):
    trainer = two_actors(tmp_path, pairs_of_two(), eval_dataset=pairs_of_two())
    assert "eval_loss" in trainer.evaluate()
    trainer = two_actors(tmp_path, eval_dataset=dataset(4))
    metrics = trainer.evaluate()
    assert "eval_reward" in metrics and "eval_loss" not in metrics


# Centralized


def test_one_actor_answers_for_all_roles(tmp_path):
    seen = []

    def reward(a, b):
        seen.append((list(a), list(b)))
        return [len(text) for text in a]

    class Spaces:
        """Sections that a word-level tokenizer can write: before and after the word w5."""

        def build_prompt(self, row, prompts):
            return " ".join(prompts)

        def parse(self, completion, num_roles):
            parts = completion.split("w5")
            return parts if len(parts) == num_roles else None

    trainer = MADPOTrainer(
        agent_model=lm(0, vocab=10),
        num_agents=2,
        tokenizer=tok(10),
        reward_func=reward,
        train_dataset=dataset(4).map(lambda row: {"prompt": "w1 w2"}),
        response_format=Spaces(),
        args=config(tmp_path, collaboration_mode="centralized", num_agents=2, preference_num_candidates=16),
    )
    assert len(trainer.agents) == 1
    trainer.train()
    first = next(row for row in trainer.state.log_history if "loss" in row)
    scored = sum(len(a) for a, _ in seen)
    assert 0 < scored < 64
    assert first["preferences/frac_unparsable"] == pytest.approx(1 - scored / 64)
    assert all("w5" in pair.winner_completions[0] for pair in trainer._pairs)


# Errors


@pytest.mark.parametrize(
    "rows, message",
    [
        ([{"prompts": ["w1"], "winner_completions": ["w2"], "loser_completions": ["w3"]}], "expected a list of 2"),
        ([{"prompt": "w1", "chosen": "w2", "rejected": "w3"}], "of one actor, but the team has 2"),
        ([{"chosen": "w2", "rejected": "w3"}], "extract_prompt"),
        (
            [{"prompts": ["w1", "w1"], "winner_completions": ["w2", None], "loser_completions": ["w3", "w3"]}],
            "expected a text for each actor",
        ),
    ],
)
def test_wrong_pairs_are_refused_at_construction(tmp_path, rows, message):
    with pytest.raises(ValueError, match=message):
        MADPOTrainer(
            agents=[lm(0), lm(1)], tokenizer=tok(), train_dataset=Dataset.from_list(rows), args=config(tmp_path)
        )


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(beta=0.2, dpo_beta=0.3), "two words for one thing"),
        (dict(beta=0.0), "leaves no loss"),
        (dict(num_turns=2), "single answers"),
        (dict(num_generations=4), "preference_num_candidates"),
        (dict(label_smoothing=0.1, loss_type="ipo"), "for loss_type='sigmoid'"),
        (dict(loss_type="grpo"), "sigmoid"),
        (dict(pair_selection="comparator_reward"), "reward_gap"),
        (dict(preference_num_candidates=1), "preference_num_candidates"),
        (dict(reference_kl_coef=0.1), "strength of the references"),
        (dict(unparsable_reward=-1.0), "centralized"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **options)


def test_both_words_for_beta(tmp_path):
    assert config(tmp_path).beta == 0.1
    assert config(tmp_path, dpo_beta=0.25).beta == 0.25
