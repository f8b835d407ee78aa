# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""The joint reward model's trainer: TRL's on a team of one, what it learns, logs, and exports."""

import json
import logging
import random
import subprocess
import sys

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from tiny import gradient, llama, lm, logged, parameters, reward_model, tok, weights_hash
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    TrainerCallback,
)
from trl import RewardConfig, RewardTrainer

from trl_multiagent import JointRewardConfig, JointRewardTrainer
from trl_multiagent.models.joint_reward import JointRewardScorer, load_reward_model


LORA = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"])


def config(output_dir, config_class=JointRewardConfig, **kwargs):
    defaults = dict(
        output_dir=str(output_dir),
        use_cpu=True,
        bf16=False,
        max_steps=3,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        gradient_checkpointing=False,
    )
    return config_class(**{**defaults, **kwargs})


def words(rng, low, high):
    return " ".join(f"w{rng.randrange(20)}" for _ in range(rng.randint(low, high)))


def joint_rows(count=10, actors=2, seed=0):
    rng = random.Random(seed)
    sides = ("prompts", "winner_completions", "loser_completions")
    return Dataset.from_dict(
        {side: [[words(rng, 1, 5) for _ in range(actors)] for _ in range(count)] for side in sides}
    )


def build(tmp_path, model=None, dataset=None, tokenizer=None, **kwargs):
    arguments = {name: kwargs.pop(name) for name in ("render", "peft_config", "eval_dataset") if name in kwargs}
    return JointRewardTrainer(
        reward_model() if model is None else model,
        config(tmp_path, **kwargs),
        train_dataset=joint_rows() if dataset is None else dataset,
        tokenizer=tok() if tokenizer is None else tokenizer,
        **arguments,
    )


class Gradients(TrainerCallback):
    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.steps.append(gradient(model))


# A team of one


@pytest.mark.parametrize(
    "options", [{}, {"center_rewards_coefficient": 0.1, "gradient_accumulation_steps": 2}], ids=str
)
def test_a_team_of_one_is_trls_trainer_bit_for_bit(options, tmp_path):
    rows = joint_rows(actors=1)
    same = Dataset.from_dict(
        {
            "prompt": [prompt + " " for (prompt,) in rows["prompts"]],
            "chosen": [text for (text,) in rows["winner_completions"]],
            "rejected": [text for (text,) in rows["loser_completions"]],
        }
    )
    rows = rows.map(lambda row: {"prompts": [row["prompts"][0] + " "]})
    runs = []
    for trainer_class, config_class, data in [
        (RewardTrainer, RewardConfig, same),
        (JointRewardTrainer, JointRewardConfig, rows),
        (JointRewardTrainer, JointRewardConfig, same),
    ]:
        gradients, tokenizer = Gradients(), tok()
        trainer = trainer_class(
            reward_model(),
            config(tmp_path, config_class, **options),
            train_dataset=data,
            eval_dataset=data.select(range(8)),
            processing_class=tokenizer,
            callbacks=[gradients],
        )
        trainer.train()
        metrics = trainer.evaluate()
        runs.append((trainer, gradients.steps, metrics))
    (stock, stock_gradients, stock_metrics), *ours = runs
    names = ("loss", "grad_norm", "min_reward", "max_reward", "num_tokens")
    for trainer, gradients, metrics in ours:
        assert weights_hash(trainer.model) == weights_hash(stock.model)
        assert len(gradients) == len(stock_gradients) == 3
        assert all(torch.equal(a, b) and a.abs().sum() > 0 for a, b in zip(gradients, stock_gradients, strict=True))
        for name in names:
            assert logged(trainer, name) == logged(stock, name) != []
            if name != "grad_norm":
                assert metrics[f"eval_{name}"] == stock_metrics[f"eval_{name}"]
        for name in ("accuracy", "margin", "mean_reward"):
            assert logged(trainer, name) == pytest.approx(logged(stock, name), abs=1e-6)
            assert metrics[f"eval_{name}"] == pytest.approx(stock_metrics[f"eval_{name}"], abs=1e-6)
    assert weights_hash(stock.model) != weights_hash(reward_model())


# What is learned


def gold_reward(completions):
    return sum(text.split().count("w3") - 2 * text.split().count("w7") for text in completions)


def gold_pairs(count, seed):
    """Pairs of two actors, of which the better one has more of one word and less of another, in both answers."""
    rng, rows = random.Random(seed), {"prompts": [], "winner_completions": [], "loser_completions": []}
    while len(rows["prompts"]) < count:
        sides = [[" ".join(f"w{rng.randrange(10)}" for _ in range(6)) for _ in range(2)] for _ in range(2)]
        loser, winner = sorted(sides, key=gold_reward)
        if gold_reward(loser) < gold_reward(winner):
            for column, value in zip(rows, ([f"w{rng.randrange(20)}", "w11"], winner, loser), strict=True):
                rows[column].append(value)
    return Dataset.from_dict(rows)


def test_a_known_reward_is_learned(tmp_path):
    held_out = gold_pairs(200, seed=1)
    trainer = build(
        tmp_path,
        dataset=gold_pairs(800, seed=0),
        eval_dataset=held_out,
        max_steps=150,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=64,
        logging_steps=50,
    )
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert before["eval_accuracy"] < 0.8
    assert after["eval_accuracy"] >= 0.95
    assert after["eval_calibration_error"] < before["eval_calibration_error"]
    scorer = trainer.scorer(batch_size=32)
    winners, losers = (scorer.score(held_out["prompts"], held_out[f"{s}_completions"]) for s in ("winner", "loser"))
    assert (winners > losers).double().mean().item() == after["eval_accuracy"]
    assert (winners - losers).mean().item() == pytest.approx(after["eval_margin"], abs=1e-4)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_with_a_frozen_backbone_the_head_alone_is_trained(checkpointing, tmp_path):
    model = reward_model()
    before = weights_hash(model.model), model.score.weight.detach().clone()
    trainer = build(tmp_path, model, freeze_backbone=True, gradient_checkpointing=checkpointing)
    trainer.train()
    assert weights_hash(model.model) == before[0]
    assert not torch.equal(model.score.weight, before[1])
    assert all(parameter.grad is None for parameter in model.model.parameters())


def test_an_adapter_trains_the_head_too(tmp_path, caplog):
    peft_config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    with caplog.at_level(logging.INFO, "trl_multiagent"):
        trainer = build(tmp_path, peft_config=peft_config)
    assert "['score'] in `modules_to_save`" in caplog.text
    assert (peft_config.modules_to_save, peft_config.task_type) == (None, "CAUSAL_LM")
    trained = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    frozen = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if not p.requires_grad}
    assert [name.rsplit(".model.", 1)[-1].split(".", 1)[0] for name in trained] == ["layers", "layers", "score"]
    trainer.train()
    now = dict(trainer.model.named_parameters())
    assert all(torch.equal(now[name], before) for name, before in frozen.items())
    moved = [name for name, before in trained.items() if not torch.equal(now[name], before)]
    assert any("lora_B" in name for name in moved) and any("score" in name for name in moved)


def test_all_parts_of_a_head_are_trained_beside_an_adapter(tmp_path):
    model = DistilBertForSequenceClassification(
        DistilBertConfig(vocab_size=32, dim=16, hidden_dim=32, n_layers=1, n_heads=2, num_labels=1, pad_token_id=1)
    )
    trainer = build(tmp_path, model, peft_config=LoraConfig(r=2, target_modules=["q_lin"]))
    trainer.train()
    trained = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    for part in ("pre_classifier", "classifier"):
        assert f"base_model.model.{part}.modules_to_save.default.weight" in trained


def test_an_adapter_whose_base_has_no_name_is_noticed(tmp_path, caplog):
    build(tmp_path, peft_config=LORA)
    assert "cannot be found by name" in caplog.text
    merged = build(tmp_path, peft_config=LORA)
    merged.train()
    rows = joint_rows(4, seed=2)
    rows = rows["prompts"][:], rows["winner_completions"][:]
    scores = merged.scorer().score(*rows)
    merged.model.merge_and_unload().save_pretrained(tmp_path / "merged")
    loaded = JointRewardScorer(load_reward_model(str(tmp_path / "merged")), merged.processing_class)
    torch.testing.assert_close(loaded.score(*rows), scores, rtol=0, atol=1e-5)


def test_an_adapter_whose_head_is_not_trained_is_noticed(tmp_path, caplog):
    build(tmp_path, get_peft_model(reward_model(), LORA))
    assert "does not train its head" in caplog.text and "['score']" in caplog.text


# Metrics


def calibration_by_hand(margins):
    bins = {}
    for margin in margins:
        confidence = 1 / (1 + 2.718281828459045 ** -abs(margin))
        bins.setdefault(min(9, int((confidence - 0.5) * 20)), []).append((confidence, float(margin > 0)))
    return sum(abs(sum(c - right for c, right in pairs)) for pairs in bins.values()) / len(margins)


def test_an_evaluation_takes_the_means_over_its_pairs(tmp_path):
    rows = joint_rows(9)  # the last batch has one pair, which would weigh as much as four others
    trainer = build(tmp_path, reward_model(), eval_dataset=rows)
    metrics = trainer.evaluate()
    scorer = trainer.scorer()
    winners, losers = (scorer.score(rows["prompts"], rows[f"{s}_completions"]) for s in ("winner", "loser"))
    margins = (winners - losers).tolist()
    assert metrics["eval_accuracy"] == pytest.approx(sum(m > 0 for m in margins) / 9)
    assert metrics["eval_margin"] == pytest.approx(sum(margins) / 9, abs=1e-5)
    assert metrics["eval_mean_reward"] == pytest.approx(torch.cat([winners, losers]).mean().item(), abs=1e-5)
    assert metrics["eval_loss"] == pytest.approx(-torch.tensor(margins).sigmoid().log().mean().item(), abs=1e-5)
    assert metrics["eval_calibration_error"] == pytest.approx(calibration_by_hand(margins), abs=1e-5)
    assert abs(sum(margins[:4]) / 4 + sum(margins[4:8]) / 4 + margins[8]) / 3 != pytest.approx(sum(margins) / 9)
    assert trainer.evaluate()["eval_margin"] == metrics["eval_margin"]


def test_training_logs_the_pairs_since_the_last_log(tmp_path):
    trainer = build(tmp_path, learning_rate=0.0, max_steps=5, logging_steps=5, per_device_train_batch_size=2)
    trainer.train()
    margins = trainer.evaluate(joint_rows())
    # Five batches of two are the ten pairs, in any order
    for name in ("accuracy", "margin", "calibration_error", "mean_reward"):
        assert logged(trainer, name) == [pytest.approx(margins[f"eval_{name}"], abs=1e-6)]


# Data


def ids_of(trainer, column, row=0):
    return trainer.train_dataset[row][column]


def test_a_joint_row_is_rendered_for_the_winner_and_the_loser(tmp_path):
    rows = Dataset.from_dict(
        {
            "prompts": [["w1", "w2"]],
            "winner_completions": [["w3", "w4"]],
            "loser_completions": [["w5", "w6"]],
            "margin": [0.5],
            "note": ["x"],
        }
    )
    trainer = build(tmp_path, dataset=rows, render=lambda prompts, completions: " ".join([*completions, *prompts]))
    assert trainer.train_dataset.column_names == ["margin", "chosen_ids", "rejected_ids"]
    assert (ids_of(trainer, "chosen_ids"), ids_of(trainer, "rejected_ids")) == ([6, 7, 4, 5, 2], [8, 9, 4, 5, 2])
    # In the default text labels and line breaks are unknown words
    trainer = build(tmp_path, dataset=rows)
    assert ids_of(trainer, "chosen_ids") == [0, 0, 4, 0, 0, 5, 0, 0, 6, 0, 0, 7, 2]


def test_messages_and_streams_are_taken(tmp_path):
    rows = Dataset.from_dict(
        {
            "prompts": [[[{"role": "user", "content": "w1"}], [{"role": "user", "content": "w2"}]]] * 4,
            "winner_completions": [["w3", "w4"]] * 4,
            "loser_completions": [["w5", ""]] * 4,
        }
    )
    trainer = build(tmp_path, dataset=rows.to_iterable_dataset(), eval_dataset={"a": rows, "b": rows})
    assert next(iter(trainer.train_dataset))["rejected_ids"] == [0, 0, 0, 4, 0, 0, 0, 5, 0, 0, 8, 0, 0, 2]
    trainer.train()
    trainer.evaluate()
    assert len(logged(trainer, "loss")) == 3


def test_long_texts_are_shortened_in_every_format(tmp_path):
    joint = Dataset.from_dict(
        {"prompts": [["w1 w2 w3 "]], "winner_completions": [["w4 w5"]], "loser_completions": [["w6"]]}
    )
    explicit = Dataset.from_dict({"prompt": ["w1 w2 w3 "], "chosen": ["w4 w5"], "rejected": ["w6"]})
    tokenized = Dataset.from_dict({"chosen_ids": [[4, 5, 6, 7, 8, 2]], "rejected_ids": [[4, 5, 6, 9, 2]]})
    for rows in (joint, explicit, tokenized):
        trainer = build(tmp_path, dataset=rows, max_length=3)
        assert (ids_of(trainer, "chosen_ids"), ids_of(trainer, "rejected_ids")) == ([7, 8, 2], [6, 9, 2])
        assert trainer.args.max_length == 3


@pytest.mark.parametrize("pad", ["<eos>", None])
def test_a_pad_token_that_would_hide_eos_is_replaced(pad, tmp_path):
    tokenizer = tok(pad=pad)
    trainer = build(tmp_path, reward_model(pad_token_id=2), tokenizer=tokenizer)
    assert (tokenizer.pad_token, tokenizer.padding_side) == (pad, "left")
    assert trainer.processing_class.pad_token == "<unk>" and trainer.processing_class.padding_side == "right"
    assert trainer.model.config.pad_token_id == trainer.data_collator.pad_token_id == 0
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(4)])
    with torch.no_grad():
        rewards = trainer.model(**batch).logits[:, 0]
        for ids, mask, reward in zip(batch["input_ids"], batch["attention_mask"], rewards, strict=True):
            ids = ids[mask.bool()]
            assert ids[-1] == 2
            hidden = trainer.model.model(input_ids=ids[None]).last_hidden_state[0, -1]
            torch.testing.assert_close(reward, trainer.model.score.weight[0] @ hidden, rtol=0, atol=1e-5)


# Exports

RELOAD = """
import json, sys
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from peft import AutoPeftModelForSequenceClassification
from trl_multiagent.models.joint_reward import JointRewardScorer
directory, kind, rows = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
tokenizer = AutoTokenizer.from_pretrained(directory)
kwargs = dict(num_labels=1, pad_token_id=tokenizer.pad_token_id) if kind == "adapter" else {}
auto = AutoPeftModelForSequenceClassification if kind == "adapter" else AutoModelForSequenceClassification
model = auto.from_pretrained(directory, **kwargs).eval()
def stock(prompts, completions):
    from trl_multiagent.models.joint_reward import render_joint_response
    text = render_joint_response(prompts, completions) + tokenizer.eos_token
    encoded = tokenizer([text, text + " w1 w2" + tokenizer.eos_token], return_tensors="pt", padding=True)
    encoded.pop("token_type_ids", None)
    return model(**encoded).logits[0, 0].item()
print(json.dumps([JointRewardScorer(model, tokenizer).score(*rows).tolist(), [stock(*row) for row in zip(*rows)]]))
"""


@pytest.mark.parametrize("kind", ["full", "adapter"])
def test_an_export_gives_the_same_scores_in_another_process(kind, tmp_path):
    llama(1, pad_token_id=2).save_pretrained(tmp_path / "base")
    tok(pad="<eos>").save_pretrained(tmp_path / "base")
    peft_config = {"peft_config": LORA} if kind == "adapter" else {}
    trainer = JointRewardTrainer(
        tmp_path / "base", config(tmp_path / "run", max_steps=2), train_dataset=joint_rows(), **peft_config
    )
    trainer.train()
    trainer.save_model(tmp_path / "export")
    assert (tmp_path / "export" / "config.json").exists() == (kind == "full")
    rows = joint_rows(5, seed=3)
    rows = [rows["prompts"][:], rows["winner_completions"][:]]
    scores = trainer.scorer().score(*rows)
    run = [sys.executable, "-c", RELOAD, str(tmp_path / "export"), kind, json.dumps(rows)]
    output = subprocess.run(run, check=True, capture_output=True, text=True).stdout
    for again in json.loads(output.splitlines()[-1]):
        torch.testing.assert_close(torch.tensor(again), scores, rtol=0, atol=1e-5)
    assert scores.unique().numel() == 5
    # It is a source too
    again = JointRewardTrainer(
        tmp_path / "export", config(tmp_path / "again", max_steps=1), train_dataset=joint_rows()
    )
    torch.testing.assert_close(again.scorer().score(*rows), scores, rtol=0, atol=1e-5)
    again.train()
    assert not torch.equal(again.scorer().score(*rows), scores)
    loaded = JointRewardScorer(load_reward_model(str(tmp_path / "export")), trainer.processing_class)
    torch.testing.assert_close(loaded.score(*rows), scores, rtol=0, atol=1e-5)


def test_a_checkpoint_is_gone_on_from(tmp_path):
    whole = build(tmp_path / "whole", max_steps=4)
    whole.train()
    build(tmp_path / "half", max_steps=4, save_strategy="steps", save_steps=2).train()
    resumed = build(tmp_path / "half", max_steps=4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "half" / "checkpoint-2"))
    torch.testing.assert_close(parameters(resumed.model), parameters(whole.model))


# Refusals


def test_nothing_is_sent_outside(tmp_path, monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    sent = []
    monkeypatch.setattr("trl.trainer.base_trainer.send_telemetry", lambda **kwargs: sent.append(kwargs))
    build(tmp_path)
    assert sent == []


def columns(**changes):
    rows = {
        "prompts": [["w1", "w2"]] * 3,
        "winner_completions": [["w3", "w4"]] * 3,
        "loser_completions": [["w5", "w6"]] * 3,
    }
    return Dataset.from_dict({**rows, **changes})


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (columns().remove_columns("prompts"), "train dataset has the columns .*, expected prompts, winner"),
        (columns().select_columns("prompts"), r"has the columns \['prompts'\]"),
        (
            columns(loser_completions=[["w5", "w6"], ["w5", "w6"], ["w5"]]),
            "Row 2 of the train dataset: `prompts` has 2, .*, `loser_completions` has 1 entries",
        ),
        (columns(prompts=[["w1", "w2"], ["w1", "w2", "w3"], ["w1", "w2"]]), "Row 1 .*`prompts` has 3"),
        (
            columns(prompts=[[]] * 3, winner_completions=[[]] * 3, loser_completions=[[]] * 3),
            "Row 0 .*`prompts` has 0",
        ),
        (columns(winner_completions=["w3 w4"] * 3), "Row 0 .*`winner_completions` is a str, expected a list"),
        (columns(winner_completions=[["w3", None]] * 3), "Row 0 .*`winner_completions` holds a NoneType for actor 1"),
        (columns(prompts=[[1, 2]] * 3), "Row 0 .*actor 0: the prompt is a int"),
        (
            Dataset.from_dict({"chosen_ids": [[3, 1]], "rejected_ids": [[3]]}),
            "Row 0 .*`chosen_ids` is empty or ends with the pad token",
        ),
    ],
    ids=range(9),
)
def test_rows_that_do_not_fit_are_named_at_construction(dataset, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        build(tmp_path, dataset=dataset)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"model": lm()}, "language model without a reward head"),
        ({"model": reward_model(num_labels=2)}, "num_labels=2"),
        ({"model": get_peft_model(reward_model(), LORA), "freeze_backbone": True}, "the model has adapters"),
        ({"freeze_backbone": True, "peft_config": LORA}, "freeze_backbone=True trains the head alone, `peft_config`"),
        ({"peft_config": PrefixTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=2)}, "PrefixTuningConfig puts"),
        ({"pad_token": "<eos>"}, "pad_token='<eos>' is the EOS token"),
        ({"pad_token": "w3", "eos_token": "w3"}, "pad_token='w3' is the EOS token"),
        ({"max_length": 0}, "max_length=0"),
        ({"tokenizer": tok(size=33)}, "33 tokens, but the model embeds only 32"),
        ({"render": lambda prompts, completions: 3}, "rendered as int"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_contradictions_are_refused(kwargs, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        build(tmp_path, **kwargs)


def test_arguments_are_checked(tmp_path):
    with pytest.raises(TypeError, match="JointRewardConfig, got RewardConfig"):
        JointRewardTrainer(reward_model(), config(tmp_path, RewardConfig), train_dataset=joint_rows(), tokenizer=tok())
    with pytest.raises(ValueError, match="has no tokenizer"):
        JointRewardTrainer(reward_model(), config(tmp_path), train_dataset=joint_rows())
    both = {"tokenizer": tok(), "processing_class": tok(pad=None)}
    with pytest.raises(ValueError, match="two words for one thing"):
        JointRewardTrainer(reward_model(), config(tmp_path), train_dataset=joint_rows(), **both)
    with pytest.raises(TypeError, match="`render` must map"):
        build(tmp_path, render="text")


def test_the_default_config_works_on_a_cpu(tmp_path):
    args = JointRewardConfig(str(tmp_path), use_cpu=True)
    assert (args.bf16, args.freeze_backbone, args.max_length, args.learning_rate) == (False, False, 1024, 1e-4)
