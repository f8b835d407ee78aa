# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""One actor: sampling in parts, scoring them together with padding, and a loss that padding does not change."""

import copy

import pytest
import torch
from tiny import dataset, gradient, lm, team_args, tok, word_reward

from trl_multiagent import MAGRPOConfig, MAGRPOTrainer


PROMPTS = ["w0 w1", "w2 w3 w4", "w5", "w6 w7"]


@pytest.fixture
def build(tmp_path):
    def build(**options):
        team = MAGRPOTrainer(
            agents=[lm(0)],
            tokenizer=tok(),
            reward_func=word_reward,
            train_dataset=dataset(4),
            args=team_args(MAGRPOConfig, tmp_path, **options),
        )
        team.model.train()
        team.current_gradient_accumulation_steps = 1  # what the training loop sets
        (agent,) = team.agent_trainers
        agent.follow(team)
        return agent

    return build


def rewards(*values):
    return torch.tensor(values).unsqueeze(1)


class TestSampling:
    def test_only_what_counts_is_given_back_and_kept(self, build):
        agent = build()
        assert len(agent.sample(PROMPTS, num_kept=3)) == 3
        inputs = agent.score(PROMPTS[:3], rewards(1.0, 2.0, 3.0), num_rows=3, grouped=False)
        assert inputs["completion_ids"].size(0) == 3

    def test_several_calls_are_scored_together_in_their_order(self, build):
        agent = build()
        texts = agent.sample(PROMPTS[:2]) + agent.sample(PROMPTS[2:])
        inputs = agent.score(PROMPTS, rewards(1.0, 2.0, 3.0, 4.0), num_rows=4)
        decoded = [
            tok().decode(ids[mask.bool()], skip_special_tokens=True)
            for ids, mask in zip(inputs["completion_ids"], inputs["completion_mask"], strict=True)
        ]
        assert decoded == texts

    def test_a_call_of_which_nothing_counts_leaves_no_row(self, build):
        agent = build()
        assert agent.sample(PROMPTS[:2], num_kept=0) == []
        agent.sample(PROMPTS[:2])
        inputs = agent.score(PROMPTS[:2], rewards(1.0, 2.0), num_rows=2)
        assert inputs["completion_ids"].size(0) == 2

    def test_a_discarded_rollout_is_forgotten(self, build):
        agent = build()
        agent.sample(PROMPTS)
        agent.discard()
        agent.sample(PROMPTS[:2])
        assert agent.score(PROMPTS[:2], rewards(1.0, 2.0), num_rows=2)["completion_ids"].size(0) == 2


class TestPrompts:
    """What cannot be generated from is an error that names the actor, also where an environment brings it."""

    @pytest.mark.parametrize("prompts", [[""], ["w0 w1", "", "w2"], ["w0", "  "]])
    def test_a_prompt_without_a_token(self, build, prompts):
        agent = build(agent_names=["coder"])
        empty = next(prompt for prompt in prompts if not prompt.strip())
        with pytest.raises(ValueError, match=f"coder gets a prompt without any token: {empty!r}"):
            agent.sample(prompts)

    def test_messages_without_a_chat_template(self, build):
        with pytest.raises(ValueError, match="coder gets a conversational prompt.*no chat template"):
            build(agent_names=["coder"]).sample([[{"role": "user", "content": "w0"}]])

    def test_every_actor_has_its_name_for_errors(self, tmp_path):
        team = MAGRPOTrainer(
            agents=[lm(0), lm(1)],
            tokenizer=tok(),
            reward_func=word_reward,
            train_dataset=dataset(4),
            args=team_args(MAGRPOConfig, tmp_path, agent_names=["planner", "coder"]),
        )
        assert [agent.name for agent in team.agent_trainers] == ["planner", "coder"]

    def test_without_names_it_is_the_number(self, build):
        with pytest.raises(ValueError, match="^agent_0 gets a prompt without any token"):
            build().sample([""])

    @pytest.mark.parametrize(
        ("reply", "problem"), [("", "without any token"), ([{"role": "user", "content": "w1"}], "no chat template")]
    )
    def test_an_environment_that_brings_one(self, tmp_path, reply, problem):
        team = MAGRPOTrainer(
            agents=[lm(0), lm(1)],
            tokenizer=tok(),
            reward_func=word_reward,
            external_transition=lambda prompt, agent_completions, num_agents: ["w1", reply],
            train_dataset=dataset(4),
            args=team_args(MAGRPOConfig, tmp_path, agent_names=["planner", "coder"], num_turns=2),
        )
        with pytest.raises(ValueError, match=f"coder gets a .*{problem}"):
            team.train()


class TestGreedy:
    def test_answers_are_the_most_probable_tokens(self, build):
        agent = build(max_completion_length=4)
        (text,) = agent.sample(["w0 w1"], greedy=True)
        ids, model = [3, 4], copy.deepcopy(agent.model).eval()
        for _ in range(4):
            ids.append(model(torch.tensor([ids])).logits[0, -1].argmax().item())
            if ids[-1] == 2:
                break
        assert text == tok().decode(ids[2:], skip_special_tokens=True)

    def test_they_leave_rollouts_metrics_random_numbers_and_settings_as_they_were(self, build):
        agent = build(temperature=0.7, top_p=0.9)
        agent.sample(PROMPTS)
        metrics, config = copy.deepcopy(dict(agent._metrics["train"])), agent.generation_config
        state = torch.get_rng_state()
        agent.sample(PROMPTS[:1], greedy=True)
        assert torch.equal(torch.get_rng_state(), state)
        assert dict(agent._metrics["train"]) == metrics
        assert agent.generation_config is config and config.do_sample and config.temperature == 0.7
        assert agent.score(PROMPTS, rewards(1.0, 2.0, 3.0, 4.0), num_rows=4)["completion_ids"].size(0) == 4


class TestPadding:
    def test_rows_that_fill_up_are_out_of_every_loss(self, build):
        agent = build()
        agent.sample(PROMPTS[:2])
        inputs = agent.score(PROMPTS[:2], torch.cat([rewards(1.0, 2.0), rewards(*[torch.nan] * 2)]), 4, grouped=False)
        mask = inputs["completion_mask"] * inputs.get("tool_mask", torch.ones_like(inputs["completion_mask"]))
        assert mask.size(0) == 4 and (mask[:2].sum(dim=1) > 0).all() and mask[2:].sum() == 0

    def test_without_groups_advantages_are_zero_and_no_share_without_spread_is_logged(self, build):
        agent = build()
        agent.sample(PROMPTS)
        inputs = agent.score(PROMPTS, rewards(1.0, 2.0, 3.0, 9.0), 4, grouped=False)
        assert inputs["advantages"].tolist() == [0.0] * 4
        assert agent.num_generations == 2 and "frac_reward_zero_std" not in agent._metrics["train"]

    @pytest.mark.parametrize("loss_type", ["grpo", "sapo", "dr_grpo", "bnpo", "cispo", "dapo", "vespo"])
    @pytest.mark.parametrize("beta", [0.0, 0.5])
    def test_two_micro_batches_with_padding_give_the_gradient_of_the_rows_alone(self, build, loss_type, beta):
        """Three rows at once; and in two parts of two, one of them padding, as if accumulation were finer."""
        agent = build(loss_type=loss_type, beta=beta, num_iterations=2)
        if beta:  # else the policy is its reference, and the KL term has no gradient
            with torch.no_grad():
                next(agent.model.parameters()).mul_(1.1)
        advantages = torch.tensor([1.0, -0.5, 2.0, 0.0])
        gradients = []
        for num_rows in (3, 4):
            torch.manual_seed(0)
            agent.sample(PROMPTS[:3])
            values = torch.full((num_rows, 1), 1.0)
            inputs = agent.score(PROMPTS[:3], values, num_rows, grouped=False)
            inputs["advantages"] = advantages[:num_rows]
            agent.model.zero_grad()
            agent.model.train()
            if num_rows == 3:
                if loss_type == "bnpo":  # its mean is over the tokens of a micro-batch, so the parts must be the same
                    parts = [part(inputs, slice(0, 2)), part(inputs, slice(2, 3))]
                    agent.current_gradient_accumulation_steps = 2
                    for piece in parts:
                        agent.loss(agent.model, piece).backward()
                    agent.current_gradient_accumulation_steps = 1
                else:
                    agent.loss(agent.model, inputs).backward()
            else:
                for piece in (part(inputs, slice(0, 2)), part(inputs, slice(2, 4))):
                    agent.loss(agent.model, piece, num_splits=2, row_scale=4 / 3).backward()
            gradients.append(gradient(agent.model))
        scale = gradients[0].abs().max().item()
        assert scale > 1e-4
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-5 * scale)

    @pytest.mark.parametrize("loss_type", ["grpo", "sapo", "dr_grpo", "bnpo", "cispo", "dapo", "vespo"])
    @pytest.mark.parametrize("entropy_coef", [0.0, 0.5])
    def test_a_micro_batch_of_padding_alone_changes_neither_gradient_nor_metrics(self, build, loss_type, entropy_coef):
        """One row at once; and as one of two micro-batches, the other of padding alone."""
        agent = build(loss_type=loss_type, beta=0.5, num_iterations=2, entropy_coef=entropy_coef)
        with torch.no_grad():
            next(agent.model.parameters()).mul_(1.1)
        gradients, metrics = [], []
        for num_rows in (1, 2):
            torch.manual_seed(0)
            agent.sample(PROMPTS[:1])
            values = torch.full((num_rows, 1), torch.nan)
            values[0] = 1.0
            inputs = agent.score(PROMPTS[:1], values, num_rows, grouped=False)
            inputs["advantages"] = torch.tensor([2.0, 0.0])[:num_rows]
            agent.model.zero_grad()
            agent.model.train()
            agent._metrics["train"].clear()
            if num_rows == 1:
                agent.loss(agent.model, inputs).backward()
            else:
                scales = dict(num_splits=2, row_scale=2.0, part_scale=2.0)
                agent.loss(agent.model, part(inputs, slice(0, 1)), **scales).backward()
                agent.loss(agent.model, part(inputs, slice(1, 2)), **scales, has_rows=False).backward()
            gradients.append(gradient(agent.model))
            metrics.append({name: list(numbers) for name, numbers in agent._metrics["train"].items()})
        scale = gradients[0].abs().max().item()
        assert scale > 1e-4
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-5 * scale)
        assert metrics[0] and metrics[1].keys() == metrics[0].keys()
        for name, numbers in metrics[0].items():
            assert metrics[1][name] == pytest.approx(numbers, rel=1e-5, abs=1e-6, nan_ok=True), name

    def test_a_loss_leaves_the_settings_as_they_were(self, build):
        agent = build(beta=0.5, loss_type="grpo", entropy_coef=0.25)
        agent.sample(PROMPTS[:2])
        inputs = agent.score(PROMPTS[:2], rewards(1.0, 2.0), 2)
        before = agent.beta, agent.entropy_coef, agent.args.steps_per_generation
        agent.loss(agent.model, inputs, num_splits=2, row_scale=2.0, part_scale=2.0)
        assert (agent.beta, agent.entropy_coef, agent.args.steps_per_generation) == before == (0.5, 0.25, 1)
        assert agent.current_gradient_accumulation_steps == 1


def part(inputs, rows):
    return {
        name: value[rows] if isinstance(value, torch.Tensor) and value.ndim else value
        for name, value in inputs.items()
    }
