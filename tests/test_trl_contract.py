# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""
What the package relies on in TRL and transformers without their promise. When an upstream release changes one of
these, this file fails first, and by name.
"""

import inspect
from importlib import import_module

import pytest
import torch
from tiny import dataset, lm, tok, weights_hash, word_reward
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer

from trl_multiagent import _compat
from trl_multiagent._compat import TRL_CONTRACT, reference_is_a_copy_of
from trl_multiagent.agents.grpo_agent import GRPOAgent


def resolve(path: str):
    """The object at a dotted path: a module, then attributes."""
    parts = path.split(".")
    for size in range(len(parts), 0, -1):
        try:
            found = import_module(".".join(parts[:size]))
        except ModuleNotFoundError:
            continue
        for name in parts[size:]:
            found = getattr(found, name)
        return found
    raise ModuleNotFoundError(path)


# Names and signatures


def test_the_contract_names_each_thing_once_with_its_reasons():
    assert len({entry.where for entry in TRL_CONTRACT}) == len(TRL_CONTRACT) > 5
    assert all(entry.why and entry.drop_when for entry in TRL_CONTRACT)


@pytest.mark.parametrize("entry", TRL_CONTRACT, ids=lambda entry: entry.where)
def test_upstream_has_what_the_contract_names(entry):
    try:
        found = resolve(entry.where)
    except (ModuleNotFoundError, AttributeError) as error:
        pytest.fail(f"{entry.where} is gone ({error}). It is used because: {entry.why}.")
    names = list(inspect.signature(found).parameters)
    missing = [name for name in entry.parameters if name not in names]
    assert not missing, f"{entry.where}{inspect.signature(found)} has no {missing}. It is used because: {entry.why}."
    listed = [name for name in names if name in entry.parameters]
    assert listed == list(entry.parameters), f"{entry.where}{inspect.signature(found)} has another order."


@pytest.mark.parametrize("name", sorted(set(_compat.__all__) - {"TRL_ATTRIBUTES", "TRL_CONTRACT"}))
def test_every_borrowed_name_is_callable(name):
    assert callable(getattr(_compat, name))


def test_a_changed_name_or_order_is_noticed():
    changed = _compat.Contract("trl.trainer.utils.split_tensor_dict", ("num_chunks", "tensor_dict"), "why", "when")
    with pytest.raises(AssertionError, match=r"trl\.trainer\.utils\.split_tensor_dict.*another order"):
        test_upstream_has_what_the_contract_names(changed)
    gone = _compat.Contract("trl.trainer.utils.split_tensors", (), "micro-batches", "when")
    with pytest.raises(pytest.fail.Exception, match=r"trl\.trainer\.utils\.split_tensors is gone.*micro-batches"):
        test_upstream_has_what_the_contract_names(gone)


# Behaviour of the trainer


class RecordingTrainer(GRPOTrainer):
    """Keeps what TRL's own steps hand to each other."""

    def __init__(self, *args, **kwargs):
        self.generated, self.generated_turns, self.scored, self.reward_calls = [], [], [], []
        super().__init__(*args, **kwargs)

    def _send_telemetry(self):
        pass

    def _generate(self, prompts):
        self.generated.append((prompts, super()._generate(prompts)))
        return self.generated[-1][1]

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        self.generated_turns.append((prompt_ids, super()._generate_single_turn(prompt_ids, *args, **kwargs)))
        return self.generated_turns[-1][1]

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self.reward_calls.append((inputs, prompts, completions, completion_ids_list, rewards))
        return rewards

    def _generate_and_score_completions(self, inputs):
        self.scored.append((inputs, super()._generate_and_score_completions(inputs)))
        return self.scored[-1][1]


def words(completions, **kwargs):
    return word_reward(completions)


def nothing(completions, **kwargs):
    return [None] * len(completions)


def stock(tmp_path, **kwargs):
    args = {"beta": 0.1, "num_iterations": 2, **kwargs}
    lm(0).save_pretrained(tmp_path / "model")
    config = GRPOConfig(
        output_dir=str(tmp_path / "run"),
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=5,
        max_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        **args,
    )
    model = lm(0).from_pretrained(tmp_path / "model")
    return RecordingTrainer(
        model=model,
        reward_funcs=[words, nothing],
        args=config,
        train_dataset=dataset(4),
        processing_class=tok(),
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    trainer = stock(tmp_path_factory.mktemp("stock"))
    trainer.train()
    return trainer


@pytest.mark.parametrize("name", _compat.TRL_ATTRIBUTES)
def test_a_trainer_has_the_attributes_that_are_used(name, trained):
    assert hasattr(trained, name)


def test_generate_returns_ids_tool_mask_and_texts_in_an_8_tuple(trained):
    prompts, rollout = trained.generated[0]
    assert len(rollout) == 8
    prompt_ids, ids, tool_mask, texts = rollout[:4]
    assert len(prompts) == len(prompt_ids) == len(ids) == len(texts) == 4
    assert all(isinstance(token, int) for row in ids for token in row)
    assert tool_mask is None
    tokenizer = trained.processing_class
    assert texts == [tokenizer.decode(row, skip_special_tokens=True) for row in ids]
    assert prompts == [tokenizer.decode(row, skip_special_tokens=True) for row in prompt_ids]


def test_a_turn_returns_ids_up_to_the_end_and_no_log_probabilities(trained):
    prompt_ids, (ids, logprobs) = trained.generated_turns[0]
    assert logprobs is None
    assert len(ids) == len(prompt_ids) == 4
    assert ids == trained.generated[0][1][1]
    assert all(2 not in row[:-1] for row in ids)  # nothing after the end-of-sequence token


def test_rewards_have_a_column_for_each_function_with_nan_where_there_is_none(trained):
    inputs, prompts, completions, ids, rewards = trained.reward_calls[0]
    assert rewards.shape == (4, 2)
    assert len(inputs) == len(prompts) == len(completions) == len(ids) == 4
    torch.testing.assert_close(rewards[:, 0], torch.tensor(word_reward(completions)))
    assert rewards[:, 1].isnan().all()


def test_scoring_returns_what_the_losses_need(trained):
    rows, scored = trained.scored[0]
    assert [row["prompt"] for row in rows] == trained.generated[0][0]
    assert {
        "prompt_ids",
        "prompt_mask",
        "completion_ids",
        "completion_mask",
        "advantages",
        "num_items_in_batch",
        "old_per_token_logps",  # of the second iteration
        "ref_per_token_logps",
    } <= set(scored)
    lengths = [len(row) for row in trained.generated[0][1][1]]
    assert scored["completion_mask"].sum(dim=1).tolist() == lengths
    assert scored["completion_ids"].shape == scored["completion_mask"].shape == (4, max(lengths))
    assert scored["prompt_ids"].shape == scored["prompt_mask"].shape
    assert scored["num_items_in_batch"] == sum(lengths)
    rewards = trained.reward_calls[0][-1][:, 0].view(2, 2)
    by_hand = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    torch.testing.assert_close(scored["advantages"], by_hand.flatten())


def test_a_tool_mask_keeps_tokens_out_of_the_loss(tmp_path, monkeypatch):
    """An empty completion is a lone end-of-sequence token, masked by item 2 of the rollout."""
    trainer = stock(tmp_path)
    generate = GRPOTrainer._generate

    def with_a_mask(self, prompts):
        rollout = generate(self, prompts)
        ids = [[2], *rollout[1][1:]]
        mask = [[0], *([1] * len(row) for row in rollout[1][1:])]
        return (rollout[0], ids, mask, *rollout[3:])

    monkeypatch.setattr(GRPOTrainer, "_generate", with_a_mask)
    trainer.train()
    _, scored = trainer.scored[0]
    mask = scored["completion_mask"] * scored.get("tool_mask", 1)
    assert mask[0].sum() == 0 and (mask[1:].sum(dim=1) > 0).all()


def test_the_loss_takes_advantages_of_a_row_and_of_a_token(trained):
    _, scored = trained.scored[0]
    trained.model.train()
    loss_of = lambda advantages: trained._compute_loss(trained.model, {**scored, "advantages": advantages})  # noqa: E731
    by_row = scored["advantages"]  # (B,)
    by_token = by_row.unsqueeze(1).expand(scored["completion_ids"].shape).clone()  # (B, T)
    torch.testing.assert_close(loss_of(by_token), loss_of(by_row))
    by_token[0, 0] += 1.0
    assert loss_of(by_token) != loss_of(by_row)  # every token's own counts


def test_groups_of_one_have_no_advantage_and_a_share_without_spread(tmp_path, monkeypatch):
    """So a batch without groups can be scored: its advantages come later."""
    trainer = stock(tmp_path)
    score = GRPOTrainer._generate_and_score_completions

    def without_groups(self, inputs):
        self.num_generations = 1
        try:
            return score(self, inputs)
        finally:
            self.num_generations = 2

    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", without_groups)
    trainer.train()
    assert trainer.scored[0][1]["advantages"].tolist() == [0.0] * 4
    assert [entry["frac_reward_zero_std"] for entry in trainer.state.log_history[:1]] == [1.0]


LOSS_TYPES = ("grpo", "sapo", "dr_grpo", "luspo", "bnpo", "cispo", "dapo", "vespo")


class TestHowALossIsScaled:
    """What `GRPOAgent.loss` undoes: how rows that are padding, and smaller micro-batches, change each kind of loss."""

    @pytest.fixture
    def loss_of(self, trained, monkeypatch):
        def loss_of(loss_type, inputs, accumulation=1, steps=1):
            monkeypatch.setattr(trained, "loss_type", loss_type)
            monkeypatch.setattr(trained, "current_gradient_accumulation_steps", accumulation)
            monkeypatch.setattr(trained.args, "steps_per_generation", steps)
            trained.model.train()
            return trained._compute_loss(trained.model, inputs).item()

        return loss_of

    @staticmethod
    def tensors(trained):
        scored = dict(trained.scored[0][1])
        scored["advantages"] = torch.tensor([1.0, -0.5, 2.0, 0.25])
        return scored

    @pytest.mark.parametrize("loss_type", LOSS_TYPES)
    def test_by_rows_that_are_masked(self, trained, loss_of, loss_type):
        scored = self.tensors(trained)
        padded = {k: torch.cat([v, v]) if getattr(v, "ndim", 0) else v for k, v in scored.items()}
        padded["completion_mask"] = padded["completion_mask"].clone()
        padded["completion_mask"][4:] = 0
        padded["advantages"][4:] = 0.0
        kept = 0.5 if loss_type in GRPOAgent.ROW_MEANS else 1.0
        assert loss_of(loss_type, padded) == pytest.approx(kept * loss_of(loss_type, scored), rel=1e-5)

    @pytest.mark.parametrize("loss_type", LOSS_TYPES)
    def test_by_finer_accumulation(self, trained, loss_of, loss_type):
        scored = self.tensors(trained)
        kept = 1.0 if loss_type in GRPOAgent.TOKEN_TOTALS else 0.5
        assert loss_of(loss_type, scored, 2, 2) == pytest.approx(kept * loss_of(loss_type, scored), rel=1e-5)


def test_the_loss_runs_on_the_bare_model_and_reaches_its_parameters(trained):
    _, scored = trained.scored[0]
    trained.model.zero_grad()
    trained._compute_loss(trained.model, scored).backward()
    assert all(parameter.grad is not None for parameter in trained.model.parameters())


def test_the_trainer_keeps_what_the_team_reads_and_sets(trained):
    tokenizer = trained._tokenizer
    assert tokenizer.pad_token_id == 1 and tokenizer.eos_token_id == 2
    assert list(trained.eos_token_ids) == [2]
    assert trained._step == trained.state.global_step == 1
    assert trained.current_gradient_accumulation_steps == 1
    assert trained.reward_weights.tolist() == [1.0, 1.0] and len(trained.reward_func_names) == 2
    assert trained.beta == 0.1 and trained.ref_model is not None
    assert trained._entropy_bonus_enabled is False and trained.aux_loss_enabled is False
    assert all(isinstance(values, list) for values in trained._metrics["train"].values())
    assert trained.num_generations == trained.num_generations_eval == 2
    assert trained.generation_config.do_sample is True and trained.entropy_coef == 0.0
    assert trained.loss_type == trained.args.loss_type
    assert trained.state.num_input_tokens_seen > 0


# The reference


def test_a_reference_is_a_copy_of_the_model_and_the_original_comes_back(tmp_path):
    original = grpo_trainer.create_model_from_path
    model = lm(5)  # built from a config: it has no name to be loaded by
    with reference_is_a_copy_of(model):
        assert grpo_trainer.create_model_from_path is not original
        copied = grpo_trainer.create_model_from_path("nowhere", dtype="float32")
    assert grpo_trainer.create_model_from_path is original
    assert copied is not model and weights_hash(copied) == weights_hash(model)
    assert not copied.training
    assert not {p.data_ptr() for p in copied.parameters()} & {p.data_ptr() for p in model.parameters()}


def test_the_original_comes_back_after_an_error():
    original = grpo_trainer.create_model_from_path
    with pytest.raises(KeyError):
        with reference_is_a_copy_of(lm(0)):
            raise KeyError("while an actor is built")
    assert grpo_trainer.create_model_from_path is original


def test_the_trainer_loads_its_reference_through_the_name_that_is_replaced(tmp_path):
    with reference_is_a_copy_of(lm(5)):
        trainer = stock(tmp_path)
    assert weights_hash(trainer.ref_model) == weights_hash(lm(5)) != weights_hash(trainer.model)
