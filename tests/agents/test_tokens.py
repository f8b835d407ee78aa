# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""From sampled token ids to masks, log-probabilities and losses, with actors whose answers are fixed."""

import copy
import math

import pytest
import torch
from datasets import Dataset
from tiny import (
    dataset,
    gpt2,
    gradient,
    lm,
    logged,
    parameters,
    record_batches,
    stub_rollouts,
    team_args,
    tok,
    word_reward,
)

from trl_multiagent import MAACConfig, MAACTrainer, MAGRPOConfig, MAGRPOTrainer


PAD, EOS = 1, 2


@pytest.fixture
def build(tmp_path):
    """A team of two Qwen2 actors, or others; options of the config by name."""

    def build(agents=None, tokenizer=None, reward_func=word_reward, train_dataset=None, peft_config=None, **options):
        return MAGRPOTrainer(
            agents=agents or [lm(0), lm(1)],
            tokenizer=tokenizer or tok(),
            reward_func=reward_func,
            args=team_args(MAGRPOConfig, tmp_path, **options),
            train_dataset=train_dataset or dataset(4),
            peft_config=peft_config,
        )

    return build


def stub_generate(agent, completions):
    """Let an actor's `generate` append these tensors of ids, as a batch of them comes from transformers: padded."""

    def generate(input_ids, **kwargs):
        return torch.cat([input_ids, torch.tensor(completions)], dim=1)

    agent.model.generate = generate


def completion_mask(batch, agent):
    """What enters the loss."""
    mask = batch[f"agent_{agent}/completion_mask"]
    return (mask * batch.get(f"agent_{agent}/tool_mask", torch.ones_like(mask))).tolist()


def token_logps(model, prompt, completion, temperature=1.0):
    """Log-probabilities of one completion, by one plain forward without any padding."""
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1)[range(len(completion)), completion]


def scored_logps(agent, batch, index):
    """TRL's log-probabilities of every row, as the loss computes them, and what masks them."""
    part = {k.removeprefix(f"agent_{index}/"): v for k, v in batch.items() if k.startswith(f"agent_{index}/")}
    ids = torch.cat([part["prompt_ids"], part["completion_ids"]], dim=1)
    attention = torch.cat([part["prompt_mask"], part["completion_mask"]], dim=1)
    logps, _, _ = agent._get_per_token_logps_and_entropies(agent.model, ids, attention, part["completion_ids"].size(1))
    return logps.detach(), part["completion_mask"]


class TestEos:
    """B14: masks come from lengths, never from comparing ids with the pad token."""

    rows = [[5, 6, EOS], [5, 6, 7, 8, EOS], [5, EOS], [9, 9, 9, 9, 9]]
    masks = [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1]]

    @pytest.mark.parametrize("pad", ["<pad>", "<eos>", None])
    def test_the_first_eos_is_learned_and_nothing_after_it(self, build, monkeypatch, pad):
        trainer = build(tokenizer=tok(pad=pad))
        stub_rollouts(monkeypatch, trainer, [self.rows, self.rows])
        batches = record_batches(trainer)
        trainer.train()
        assert completion_mask(batches[0], 0) == completion_mask(batches[0], 1) == self.masks

    @pytest.mark.parametrize("pad", ["<pad>", "<eos>"])
    def test_a_batch_from_generate_is_cut_after_its_first_eos(self, build, pad):
        fill = PAD if pad == "<pad>" else EOS
        trainer = build(tokenizer=tok(pad=pad))
        padded = [row + [fill] * (5 - len(row)) for row in self.rows]
        for agent in trainer.agent_trainers:
            stub_generate(agent, padded)
        batches = record_batches(trainer)
        trainer.train()
        assert completion_mask(batches[0], 0) == completion_mask(batches[0], 1) == self.masks

    def test_an_eos_within_the_prompt_is_attended_to(self, build, monkeypatch):
        data = dataset(2).map(lambda row, i: {"prompt": ["w0 <eos> w1 w2", "w3"][i]}, with_indices=True)
        trainer = build(tokenizer=tok(pad="<eos>"), train_dataset=data, shuffle_dataset=False)
        stub_rollouts(monkeypatch, trainer, [self.rows, self.rows])
        batches = record_batches(trainer)
        trainer.train()
        assert batches[0]["agent_0/prompt_ids"].tolist() == [[3, EOS, 4, 5]] * 2 + [[EOS, EOS, EOS, 6]] * 2
        assert batches[0]["agent_0/prompt_mask"].tolist() == [[1, 1, 1, 1]] * 2 + [[0, 0, 0, 1]] * 2

    def test_one_actor_may_pad_with_eos_and_the_other_not(self, build, monkeypatch):
        trainer = build(tokenizer=[tok(pad="<eos>"), tok()])
        stub_rollouts(monkeypatch, trainer, [self.rows, self.rows])
        batches = record_batches(trainer)
        trainer.train()
        assert [tokenizer.pad_token_id for tokenizer in trainer.tokenizers] == [EOS, PAD]
        assert completion_mask(batches[0], 0) == completion_mask(batches[0], 1) == self.masks
        assert batches[0]["agent_0/completion_ids"][0].tolist() == [5, 6, EOS, EOS, EOS]
        assert batches[0]["agent_1/completion_ids"][0].tolist() == [5, 6, EOS, PAD, PAD]

    def test_a_tokenizer_that_several_actors_share_stays_as_it_is(self, build):
        shared = tok(pad=None)
        trainer = build(tokenizer=shared)
        assert shared.pad_token is None
        assert all(tokenizer.pad_token_id == EOS for tokenizer in trainer.tokenizers)
        assert trainer.tokenizers[0] is not trainer.tokenizers[1]
        trainer.tokenizers[0].pad_token = "w0"
        assert trainer.tokenizers[1].pad_token_id == EOS

    def test_an_eos_is_learned(self, build, monkeypatch):
        """It is all that was said here, so without it in the loss nothing would change."""
        data = dataset(1).map(lambda row: {"prompt": "w0 w1"})
        trainer = build(
            train_dataset=data,
            tokenizer=tok(pad="<eos>"),
            reward_func=lambda a, b: [1.0, 0.0],
            optim="sgd",
            learning_rate=0.1,
        )
        stub_rollouts(monkeypatch, trainer, [[[EOS], []], [[EOS], []]])
        before = [token_logps(actor, [3, 4], [EOS]).item() for actor in trainer.agents]
        trainer.train()
        after = [token_logps(actor.eval(), [3, 4], [EOS]).item() for actor in trainer.agents]
        assert all(new > old + 1e-4 for new, old in zip(after, before, strict=True))


class TestPaddingIsInert:
    """B15: a row that was cut short is the same alone and beside a longer one."""

    def test_the_padding_of_a_row_without_eos_is_out_of_the_loss(self, build, monkeypatch):
        trainer = build()
        rows = [[5, 6], [5, 6, 7, 8]]
        stub_rollouts(monkeypatch, trainer, [rows, rows])
        batches = record_batches(trainer)
        trainer.train()
        assert completion_mask(batches[0], 0) == [[1, 1, 0, 0], [1, 1, 1, 1]] * 2

    def test_so_is_the_padding_that_generate_puts_after_a_row_that_stopped_without_eos(self, build):
        """Rows may end by another rule than EOS (a time limit, a stop string); only real tokens count."""
        trainer = build(generation_kwargs={"max_time": 60.0})
        for agent in trainer.agent_trainers:
            stub_generate(agent, [[5, 6, PAD, PAD], [5, 6, 7, 8], [5, PAD, 6, PAD], [PAD] * 4])
        batches = record_batches(trainer)
        trainer.train()
        for index in range(2):
            assert completion_mask(batches[0], index) == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]]
        assert batches[0]["agent_0/num_items_in_batch"].item() == 9

    @pytest.mark.parametrize("make", [lm, gpt2], ids=["rotary_positions", "learned_positions"])
    def test_log_probabilities_are_those_of_the_row_alone(self, build, monkeypatch, make):
        """Prompts and completions of different lengths: padding on both sides."""
        data = dataset(2).map(lambda row, i: {"prompt": ["w0 w1 w2 w3 w4", "w5"][i]}, with_indices=True)
        trainer = build([make(0), make(1)], train_dataset=data, shuffle_dataset=False)
        rows = [[5, 6], [5, 6, 7, 8, 9], [10, 11], [12, 13, 14, 15, EOS]]
        stub_rollouts(monkeypatch, trainer, [rows, rows[::-1]])
        plain = [copy.deepcopy(actor).eval() for actor in (make(0), make(1))]
        batches = record_batches(trainer)
        trainer.args.learning_rate = 0.0
        trainer.train()
        prompts = [[3, 4, 5, 6, 7]] * 2 + [[8]] * 2
        for index, completions in enumerate([rows, rows[::-1]]):
            logps, mask = scored_logps(trainer.agent_trainers[index], batches[0], index)
            for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
                expected = token_logps(plain[index], prompt, completion)
                torch.testing.assert_close(logps[row][mask[row].bool()], expected, rtol=0, atol=1e-5)
                assert (logps[row] * mask[row]).sum().item() == pytest.approx(expected.sum().item(), abs=1e-5)

    @pytest.mark.parametrize("make", [lm, gpt2], ids=["rotary_positions", "learned_positions"])
    def test_a_critics_value_is_that_of_the_text_alone(self, tmp_path, make):
        trainer = MAACTrainer(
            agents=[lm(0), lm(1)],
            critic_model=make(5),
            tokenizer=tok(),
            reward_func=word_reward,
            args=team_args(MAACConfig, tmp_path),
            train_dataset=Dataset.from_dict({"prompt": ["w0 w1 w2 w3 w4", "w5"]}),
        )
        batches = record_batches(trainer)
        trainer.args.critic_learning_rate = 0.0
        critic = copy.deepcopy(trainer.critics[0]).eval()
        trainer.train()
        ids, mask = batches[0]["critic/input_ids"], batches[0]["critic/attention_mask"].bool()
        assert not mask.all()
        for row, value in enumerate(batches[0]["critic/old_values"].tolist()):
            alone = ids[row][mask[row]][None]
            assert critic(alone, torch.ones_like(alone)).item() == pytest.approx(value, abs=1e-5)

    def test_the_longest_row_does_not_change_what_the_others_teach(self, build, monkeypatch):
        """The same two rows, once with a padded width of 2 and once of 6: the third row has no advantage."""
        gradients = []
        for longest in ([7, 8], [7, 8, 9, 10, 11, 12]):
            trainer = build(
                [lm(0), lm(1)],
                reward_func=lambda a, b, batch_items: [0.0, 1.0] if batch_items[0]["gold"] == "w0" else [1.0, 1.0],
                train_dataset=dataset(2),
                loss_type="grpo",
                optim="sgd",
                learning_rate=0.0,
                max_grad_norm=0.0,
                shuffle_dataset=False,
            )
            rows = [[5, 6], [13, 14], longest, longest]
            stub_rollouts(monkeypatch, trainer, [rows, rows])
            before = trainer.training_step

            def step(model, inputs, num_items_in_batch=None, before=before, trainer=trainer):
                loss = before(model, inputs, num_items_in_batch)
                gradients.append(gradient(trainer.agents[0]))
                return loss

            trainer.training_step = step
            trainer.train()
        assert gradients[0].abs().max() > 1e-3
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-6)


class TestEmptyCompletions:
    """B21: nothing was said, and nothing breaks."""

    @pytest.mark.parametrize(
        "rows",
        [
            ([[EOS]], [[]]),
            ([[EOS], [5, 6, EOS], [7, 8], [9]], [[], [5], [6, 7], [8, EOS]]),
            ([[]], [[5, 6]]),
        ],
        ids=["all", "one_of_four", "one_actor"],
    )
    @pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo", "dr_grpo"])
    def test_losses_and_weights_stay_finite_and_the_reward_function_sees_empty_texts(
        self, build, monkeypatch, rows, loss_type
    ):
        seen = []

        def reward(first, second):
            seen.extend(zip(first, second, strict=True))
            return [float(i) for i in range(len(first))]

        trainer = build(reward_func=reward, loss_type=loss_type, beta=0.1, max_steps=2)
        stub_rollouts(monkeypatch, trainer, rows)
        trainer.train()
        assert all(math.isfinite(loss) for loss in logged(trainer, "loss"))
        assert all(torch.isfinite(parameters(actor)).all() for actor in trainer.agents)
        for index, completions in enumerate(rows):
            said = " ".join(f"w{token - 3}" for token in completions[0] if token != EOS)
            assert seen[0][index] == said

    def test_an_eos_that_was_sampled_is_learned_and_one_that_stands_for_nothing_is_not(self, build, monkeypatch):
        trainer = build()
        stub_rollouts(monkeypatch, trainer, [[[EOS], [5, 6, EOS], [7], [8]], [[], [5], [6, 7], []]])
        batches = record_batches(trainer)
        trainer.train()
        assert completion_mask(batches[0], 0) == [[1, 0, 0], [1, 1, 1], [1, 0, 0], [1, 0, 0]]
        assert completion_mask(batches[0], 1) == [[0, 0], [1, 0], [1, 1], [0, 0]]
        assert batches[0]["agent_1/num_items_in_batch"].item() == 3

    @pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo", "dr_grpo"])
    def test_where_nothing_was_said_the_loss_is_exactly_zero_and_nothing_is_learned(
        self, build, monkeypatch, loss_type
    ):
        actors = [lm(0), lm(1)]
        before = [parameters(actor) for actor in actors]
        trainer = build(actors, reward_func=lambda a, b: [0.0, 1.0], loss_type=loss_type, max_steps=2)
        stub_rollouts(monkeypatch, trainer, [[[]], [[]]])
        trainer.train()
        assert logged(trainer, "loss") == [0.0, 0.0]
        assert logged(trainer, "grad_norm") == [0.0, 0.0]
        assert all(torch.equal(parameters(actor), old) for actor, old in zip(trainer.agents, before, strict=True))

    @pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo", "dr_grpo"])
    def test_where_every_completion_was_truncated_and_is_masked_the_loss_is_exactly_zero(
        self, build, monkeypatch, loss_type
    ):
        trainer = build(
            reward_func=lambda a, b: [0.0, 1.0], loss_type=loss_type, beta=0.1, mask_truncated_completions=True
        )
        before = [parameters(actor) for actor in trainer.agents]
        rows = [[5, 6, 7], [8, 9, 10]]
        stub_rollouts(monkeypatch, trainer, [rows, rows])
        trainer.train()
        assert logged(trainer, "loss") == [0.0]
        assert all(torch.equal(parameters(actor), old) for actor, old in zip(trainer.agents, before, strict=True))

    def test_where_some_are_truncated_and_masked_only_the_others_teach(self, build, monkeypatch):
        trainer = build(reward_func=lambda a, b: [0.0, 1.0], mask_truncated_completions=True)
        rows = [[5, 6, 7], [8, EOS]]
        stub_rollouts(monkeypatch, trainer, [rows, rows])
        batches = record_batches(trainer)
        trainer.train()
        assert completion_mask(batches[0], 0) == [[0, 0, 0], [1, 1, 0]] * 2
        assert batches[0]["agent_0/num_items_in_batch"].item() == 4
        assert math.isfinite(logged(trainer, "loss")[0])

    def test_one_new_token_is_enough(self, build):
        trainer = build(max_completion_length=1, max_steps=2, beta=0.1)
        trainer.train()
        assert all(math.isfinite(loss) for loss in logged(trainer, "loss"))
        assert all(torch.isfinite(parameters(actor)).all() for actor in trainer.agents)

    def test_a_critic_reads_empty_texts(self, monkeypatch, tmp_path):
        for critic_type in ("v", "q"):
            trainer = MAACTrainer(
                agents=[lm(0), lm(1)],
                critic_model=lm(2),
                tokenizer=tok(),
                reward_func=lambda a, b: [0.0, 1.0],
                args=team_args(MAACConfig, tmp_path, critic_type=critic_type),
                train_dataset=dataset(4),
            )
            stub_rollouts(monkeypatch, trainer, [[[]], [[EOS]]])
            trainer.train()
            assert math.isfinite(logged(trainer, "loss")[0])
            assert torch.isfinite(parameters(trainer.critics[0])).all()


class TestTemperature:
    """B22: log-probabilities are those of the distribution that was sampled from."""

    @pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
    def test_logits_are_divided_by_it(self, build, monkeypatch, temperature):
        data = dataset(2).map(lambda row: {"prompt": "w0 w1"})
        trainer = build(temperature=temperature, train_dataset=data, num_iterations=2, beta=0.1)
        rows = [[5, 6], [7, 8, 9]]
        stub_rollouts(monkeypatch, trainer, [rows, rows])
        batches = record_batches(trainer)
        plain = lm(1).eval()
        trainer.train()
        for row in range(2):
            expected = token_logps(plain, [3, 4], rows[row], temperature).detach()
            for name in ("old_per_token_logps", "ref_per_token_logps"):
                logps = batches[0][f"agent_1/{name}"][row, : len(rows[row])]
                torch.testing.assert_close(logps, expected, rtol=0, atol=1e-5)

    @pytest.mark.parametrize("temperature", [0.5, 2.0])
    def test_the_first_ratio_is_one(self, build, temperature):
        ratios = first_ratios(build(temperature=temperature, num_iterations=2, beta=0.1))
        assert_on_policy(ratios)


def first_ratios(trainer):
    """(ratio to the sampling policy, KL to the reference) of each actor in the first micro-step, on kept tokens."""
    seen = []
    for agent in trainer.agent_trainers:

        def loss(
            model,
            inputs,
            agent=agent,
            stock=agent.loss,
            logps_of=agent._get_per_token_logps_and_entropies,
            **scales,
        ):
            current = []

            def recording(*args, **kwargs):
                result = logps_of(*args, **kwargs)
                current.append(result[0].detach())
                return result

            agent._get_per_token_logps_and_entropies = recording
            value = stock(model, inputs, **scales)
            agent._get_per_token_logps_and_entropies = logps_of
            kept = inputs["completion_mask"].bool()
            ratio = (current[0] - inputs["old_per_token_logps"]).exp()[kept]
            gap = (inputs["ref_per_token_logps"] - current[0])[kept]
            seen.append((ratio, gap.exp() - gap - 1))
            return value

        agent.loss = loss
    trainer.train()
    return seen[: len(trainer.agent_trainers)]


def assert_on_policy(ratios):
    for ratio, kl in ratios:
        assert ratio.numel() > 0
        torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=1e-5)
        torch.testing.assert_close(kl, torch.zeros_like(kl), rtol=0, atol=1e-6)


def trained_lora(seed, dropout=0.0):
    """An adapter that was trained before: its B is not zero."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        lm(seed), LoraConfig(r=2, lora_dropout=dropout, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    return model


class TestDropout:
    """B29: with dropout configured, old and reference log-probabilities still fit the first step's."""

    @pytest.mark.parametrize(
        "make",
        [
            lambda seed: lm(seed, attention_dropout=0.5),
            lambda seed: gpt2(seed, dropout=0.5),
            lambda seed: trained_lora(seed, dropout=0.5),
        ],
        ids=["functional_attention_dropout", "dropout_modules", "lora_dropout"],
    )
    def test_the_first_ratio_is_one_and_the_first_kl_zero(self, build, make):
        trainer = build([make(0), make(1)], num_iterations=2, beta=0.1)
        assert_on_policy(first_ratios(trainer))
        assert [logged(trainer, f"agent_{i}/kl")[0] for i in range(2)] == pytest.approx([0.0, 0.0], abs=1e-6)

    @pytest.mark.parametrize(
        "make",
        [lambda: lm(5, attention_dropout=0.5), lambda: gpt2(5, dropout=0.5)],
        ids=["functional_attention_dropout", "dropout_modules"],
    )
    def test_a_critics_first_values_are_those_at_sampling_time(self, tmp_path, make):
        trainer = MAACTrainer(
            agents=[lm(0), lm(1)],
            critic_model=make(),
            tokenizer=tok(),
            reward_func=word_reward,
            args=team_args(MAACConfig, tmp_path, value_clip_range=0.2),
            train_dataset=dataset(4),
        )
        seen, stock = [], trainer.critics[0].forward

        def forward(input_ids, attention_mask):
            values = stock(input_ids, attention_mask)
            seen.append(values.detach())
            return values

        trainer.critics[0].forward = forward
        trainer.train()
        assert len(seen) == 2  # at sampling time, and in the loss
        torch.testing.assert_close(seen[1].sort().values, seen[0].sort().values, rtol=0, atol=1e-5)


class TestGradientCheckpointing:
    """B45."""

    def test_completions_are_the_same_with_and_without_it(self, build):
        said = {}
        for checkpointing in (True, False):
            texts = []

            def reward(*completions, texts=texts):
                texts.extend(zip(*completions, strict=True))
                return word_reward(*completions)

            trainer = build([lm(0), gpt2(1)], reward_func=reward, gradient_checkpointing=checkpointing, max_steps=2)
            trainer.train()
            said[checkpointing] = texts
        assert said[True] == said[False]
        assert len(set(said[True])) > 1

    @pytest.mark.parametrize("checkpointing", [True, False])
    def test_the_models_come_back_as_they_were(self, build, checkpointing):
        actors = [lm(0), gpt2(1)]
        before = [actor.config.use_cache for actor in actors]
        trainer = build(actors, gradient_checkpointing=checkpointing)
        modes = []
        stock = trainer.training_step

        def step(model, *args, **kwargs):
            loss = stock(model, *args, **kwargs)
            modes.append([actor.training for actor in trainer.agents])
            return loss

        trainer.training_step = step
        trainer.train()
        assert modes == [[True, True]]
        assert [actor.config.use_cache for actor in trainer.agents] == before
        assert all(actor.is_gradient_checkpointing == checkpointing for actor in trainer.agents)

    def test_generation_uses_a_cache_in_spite_of_it(self, build):
        trainer = build([lm(0), gpt2(1)], gradient_checkpointing=True)
        widths = {0: [], 1: []}
        for index, actor in enumerate(trainer.agents):
            stock = actor.prepare_inputs_for_generation

            def prepare(*args, index=index, stock=stock, **kwargs):
                inputs = stock(*args, **kwargs)
                widths[index].append(inputs["input_ids"].size(1))
                return inputs

            actor.prepare_inputs_for_generation = prepare
        trainer.train()
        for seen in widths.values():
            assert seen[0] == 3 and set(seen[1:]) == {1}  # after the prompt, one token at a time
