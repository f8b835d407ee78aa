# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""MARLHF: a reward model from preferences, then reinforcement learning on it."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import dataset, llama, lm, preference_args, reward_model, tok, weights_hash, word_reward
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from trl_multiagent import (
    IACTrainer,
    MAACTrainer,
    MAGRPOTrainer,
    MAREINFORCETrainer,
    MAReMaxTrainer,
    MARLHFConfig,
    MARLHFIterConfig,
    MARLHFIterTrainer,
    MARLHFTrainer,
    MARLOOTrainer,
)
from trl_multiagent.models.joint_reward import render_joint_response


TRAINERS = {
    "magrpo": MAGRPOTrainer,
    "mareinforce": MAREINFORCETrainer,
    "marloo": MARLOOTrainer,
    "maremax": MAReMaxTrainer,
    "maac": MAACTrainer,
    "iac": IACTrainer,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    directory = tmp_path_factory.mktemp("model")
    llama(3).save_pretrained(directory)
    tok().save_pretrained(directory)
    return str(directory)


def build(output_dir, model, iterative=False, **kwargs):
    given = {
        name: kwargs.pop(name)
        for name in ("reward_func", "agents", "tokenizer", "reward_peft_config", "eval_dataset")
        if name in kwargs
    }
    config_class, trainer_class = (MARLHFIterConfig, MARLHFIterTrainer) if iterative else (MARLHFConfig, MARLHFTrainer)
    if kwargs.get("rl_algorithm") in ("maac", "iac"):
        kwargs = {"critic_model_name": model, **kwargs}
    defaults = {"num_generations": 4, "preference_pairs_per_sample": 4, "reward_learning_rate": 1e-2}
    defaults |= {"num_iterations": 2} if iterative else {}
    return trainer_class(
        train_dataset=dataset(),
        args=preference_args(config_class, output_dir, **{**defaults, **kwargs}),
        **{"agents": [model, model], "reward_func": word_reward, **given},
    )


@pytest.mark.parametrize("algorithm", TRAINERS)
def test_every_algorithm_trains_on_the_learned_reward(tmp_path, model, algorithm):
    calls = []

    def reward(a, b):
        calls.append(len(a))
        return word_reward(a, b)

    trainer = build(tmp_path, model, rl_algorithm=algorithm, reward_func=reward)
    assert isinstance(trainer, MARLHFTrainer) and isinstance(trainer, TRAINERS[algorithm])
    before = [weights_hash(agent) for agent in trainer.agents]
    trainer.train()
    assert all(old != weights_hash(agent) for old, agent in zip(before, trainer.agents, strict=True))
    assert sum(calls) == 8 * 4  # the task's reward labels the pairs, and no more
    rows = [row for row in trainer.state.log_history if "reward" in row]
    assert all("rewards/reward_model/mean" in row for row in rows)
    assert 0 <= rows[0]["reward_model/train_accuracy"] <= 1
    assert rows[0]["preferences/num_pairs"] == 32
    assert not any(p.requires_grad and p.grad is not None for p in trainer._scorer.model.parameters())


def test_options_of_the_algorithm_are_taken(tmp_path, model):
    trainer = build(tmp_path, model, rl_algorithm="iac", critic_type="q", use_separate_critic=True)
    assert [critic.value_head.critic_type for critic in trainer.critics] == ["q", "q"]
    trainer = build(tmp_path, model, rl_algorithm="iac", use_separate_critic=False, critic_model_name=None)
    assert not len(trainer.critics) and all(hasattr(agent, "value_head") for agent in trainer.agents)


def test_the_reward_of_training_is_the_reward_models(tmp_path, model):
    trainer = build(tmp_path, model)
    seen = []
    trainer._get_learned = trainer._reward_model_of_rows

    def spy(*completions, batch_items):
        scores = trainer._get_learned(*completions, batch_items=batch_items)
        seen.append((completions, batch_items, scores))
        return scores

    trainer._learned_reward.funcs[0] = spy
    trainer.train()
    trainer.save_model()
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward_model").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "reward_model")
    (first, second), rows, scores = seen[0]
    for a, b, row, score in list(zip(first, second, rows, scores, strict=True))[:4]:
        text = render_joint_response([row["prompt"]] * 2, [a, b])
        ids = torch.tensor([tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]])
        assert loaded(input_ids=ids).logits.item() == pytest.approx(score.item(), abs=1e-5)


def test_evaluation_shows_the_reward_of_the_task(tmp_path, model):
    trainer = build(tmp_path, model, eval_dataset=dataset(4), eval_strategy="steps", eval_steps=2)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "eval_reward" in row]
    assert rows and all("eval_rewards/word_reward/mean" in row for row in rows)
    assert all("eval_rewards/reward_model/mean" not in row for row in rows)
    assert "eval_rewards/word_reward/mean" in trainer.evaluate()


def test_held_out_pairs_measure_the_reward_model(tmp_path, model):
    trainer = build(tmp_path, model, reward_eval_fraction=0.25, reward_num_train_epochs=2)
    trainer.train()
    row = next(row for row in trainer.state.log_history if "reward_model/accuracy" in row)
    assert 0 <= row["reward_model/accuracy"] <= 1 and 0 <= row["reward_model/calibration_error"] <= 1
    assert len(trainer._held_out_tasks()) == 2


def test_the_reward_model_may_be_an_adapter_or_only_a_head(tmp_path, model):
    lora = LoraConfig(r=2, target_modules=["q_proj"])
    trainer = build(tmp_path / "a", model, reward_peft_config=lora)
    trainer.train()
    trainer.save_model()
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "a" / "reward_model")
    trainer = build(tmp_path / "b", model, reward_freeze_backbone=True)
    trainer.train()
    backbone = trainer._scorer.model.model.state_dict()
    assert all(torch.equal(backbone[name], value) for name, value in llama(3).model.state_dict().items())


def test_iterations_learn_the_reward_anew(tmp_path, model):
    trainer = build(tmp_path, model, iterative=True, num_train_epochs=1, preference_scoring_reward="reward_model")
    learned, learn = [], trainer._learn_reward

    def spy():
        scorer = learn()
        learned.append(weights_hash(scorer.model))
        return scorer

    trainer._learn_reward = spy
    trainer.train()
    assert len(set(learned)) == 2
    assert trainer.state.epoch == 2
    assert sorted(path.name for path in (tmp_path / "preferences").iterdir()) == [
        "iteration-0.jsonl",
        "iteration-1.jsonl",
    ]


def test_boundaries_are_phases(tmp_path, model):
    trainer = build(tmp_path, model)
    trainer.train(checkpoint_dir=tmp_path / "saved")
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["checkpoint-1", "checkpoint-2"]
    for number in (1, 2):
        resumed = build(tmp_path / f"from {number}", model)
        resumed._learn_reward = None  # it is not learned again
        resumed.train(resume_from_checkpoint=tmp_path / "saved" / f"checkpoint-{number}")
        assert weights_hash(resumed.model) == weights_hash(trainer.model)


def test_models_without_a_name_need_the_reward_models(tmp_path, model):
    with pytest.raises(ValueError, match="needs `reward_model_name`"):
        build(tmp_path, model, agents=[lm(0), lm(1)], tokenizer=tok())
    build(tmp_path, model, agents=[lm(0), lm(1)], tokenizer=tok(), reward_model_name=model)


# A reward model that is used as it is


def saved(directory, model) -> str:
    model.save_pretrained(directory)
    tok().save_pretrained(directory)
    return str(directory)


def test_a_reward_model_may_be_used_as_it_is(tmp_path, model):
    source = saved(tmp_path / "reward", reward_model(7))
    trainer = build(tmp_path / "run", model, reward_model_name=source, reward_num_train_epochs=0)
    seen, score = [], trainer._reward_model_of_rows

    def spy(*completions, batch_items):
        scores = score(*completions, batch_items=batch_items)
        seen.append((completions, batch_items, scores))
        return scores

    trainer._learned_reward.funcs[0] = spy
    before = weights_hash(trainer.model)
    trainer.train()
    assert weights_hash(trainer.model) != before
    loaded = reward_model(7).eval()
    assert weights_hash(trainer._scorer.model) == weights_hash(loaded)
    for (first, second), rows, scores in seen:
        for a, b, row, found in zip(first, second, rows, scores, strict=True):
            text = render_joint_response([row["prompt"]] * 2, [a, b])
            ids = [int(word[1:]) + 3 if word[0] == "w" else 0 for word in text.split()]  # labels are unknown words
            with torch.no_grad():
                hidden = loaded.model(input_ids=torch.tensor([[*ids, 2]])).last_hidden_state[0, -1]
            assert found.item() == pytest.approx((loaded.score.weight[0] @ hidden).item(), abs=1e-5)
    assert len({value for *_, scores in seen for value in scores.tolist()}) > 4


@pytest.mark.parametrize("iterative", [False, True])
def test_an_adapter_of_a_reward_model_may_be_used_as_it_is(tmp_path, model, iterative):
    base = saved(tmp_path / "base", reward_model(7))
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="SEQ_CLS", modules_to_save=["score"])
    peft = get_peft_model(AutoModelForSequenceClassification.from_pretrained(base), lora)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                parameter.normal_()
    source = saved(tmp_path / "adapter", peft)
    trainer = build(
        tmp_path / "run", model, iterative, reward_model_name=source, reward_num_train_epochs=0, num_train_epochs=1
    )
    trainer.train()
    prompts, completions = [["w1", "w2"], ["w3", "w3"]], [["w4", "w5"], ["w6", "w7 w8"]]
    texts = [render_joint_response(*joint).split() for joint in zip(prompts, completions, strict=True)]
    ids = [[int(word[1:]) + 3 if word[0] == "w" else 0 for word in words] + [2] for words in texts]
    expected = [peft.eval()(input_ids=torch.tensor([row])).logits.item() for row in ids]
    assert trainer._scorer.score(prompts, completions).tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: lm(0), "Qwen2ForCausalLM"),
        (lambda: reward_model(num_labels=2), "LlamaForSequenceClassification with num_labels=2"),
        (lambda: reward_model(num_labels=3), "LlamaForSequenceClassification with num_labels=3"),
        (lambda: reward_model().model, "LlamaModel"),
        (lambda: get_peft_model(lm(0), LoraConfig(task_type="CAUSAL_LM")), "an adapter with task_type='CAUSAL_LM'"),
        (lambda: get_peft_model(lm(0), LoraConfig(target_modules=["q_proj"])), "an adapter with task_type=None"),
    ],
    ids=["language model", "two labels", "three labels", "no head", "adapter", "adapter of no task"],
)
def test_without_training_a_reward_model_must_have_a_head(tmp_path, model, make, found):
    source = saved(tmp_path / "source", make())
    for weights in (tmp_path / "source").glob("*.safetensors"):
        weights.unlink()  # they are not looked at
    with pytest.raises(ValueError, match=f"reward_num_train_epochs=0.*{source}.*is {found}, expected.*one label"):
        build(tmp_path / "run", model, reward_model_name=source, reward_num_train_epochs=0)
    build(tmp_path / "run", model, reward_model_name=source, reward_num_train_epochs=1)


def test_without_training_the_actors_own_source_is_no_reward_model(tmp_path, model):
    with pytest.raises(ValueError, match="LlamaForCausalLM, expected.*`reward_model_name`"):
        build(tmp_path, model, reward_num_train_epochs=0)
