# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Independent actor-critic: values, credit and losses, against numbers worked out by hand and slow loops."""

import pandas as pd
import pytest
import torch
from datasets import Dataset
from known_values import (
    EOS,
    SHAPES,
    WORD,
    Rewards,
    Step,
    Talk,
    by_turn,
    credit_of_turns,
    first_rows,
    followers,
    heads,
    link,
    next_words,
    read_first_coordinate,
    table,
    table_lm,
)
from tiny import (
    RecordGradients,
    dataset,
    gpt2,
    llama,
    lm,
    logged,
    record_batches,
    stub_rollouts,
    team_args,
    tok,
    word_reward,
)
from transformers import TrainerCallback

from trl_multiagent import IACConfig, IACTrainer


TABLES = [table(1), table(2)]
SEPARATE = pytest.mark.parametrize("separate", [True, False], ids=["separate", "shared"])


@pytest.fixture
def build(tmp_path):
    """A team of two actors; options of the config by name, arguments of the trainer in `kwargs`."""

    def build(separate, reward_func=word_reward, kwargs=None, **options):
        kwargs = {"agents": [lm(0), lm(1)], "tokenizer": tok(), "train_dataset": dataset(4), **(kwargs or {})}
        if separate:
            kwargs.setdefault("critics", [lm(5), lm(6)])
        elif "critics" in kwargs:
            kwargs["agents"] = kwargs.pop("critics")  # the same values, read from the actors
        options = {"advantage_normalization": False, "influence_steps": 0, **options}
        args = team_args(IACConfig, tmp_path, use_separate_critic=separate, **options)
        return IACTrainer(reward_func=reward_func, args=args, **kwargs)

    return build


@pytest.fixture
def build_known(build):
    """The same with values from a table: those of the token that is read last."""

    def build_known(separate, reward_func, kwargs=None, tables=TABLES, **options):
        kwargs = {"critics": [table_lm(values, seed) for seed, values in enumerate(tables)], **(kwargs or {})}
        trainer = build(separate, reward_func, kwargs, **options)
        for head in heads(trainer):
            read_first_coordinate(head)
        return trainer

    return build_known


def run(monkeypatch, trainer, talks):
    """Train on what the actors are made to say; returns the first generation batch."""
    stub_rollouts(monkeypatch, trainer, talks)
    batches = record_batches(trainer)
    trainer.train()
    return batches[0]


# Turns


@SEPARATE
@pytest.mark.parametrize("own", [True, False], ids=["own rewards", "team reward"])
@pytest.mark.parametrize("critic_type", ["v", "q"])
@pytest.mark.parametrize("shape", SHAPES)
def test_credit_of_turns_equals_a_slow_recursion(shape, critic_type, own, separate, build_known, monkeypatch):
    turns, rollout_mode, threshold, generations = SHAPES[shape]
    rewards = Rewards(10, own)
    trainer = build_known(
        separate,
        rewards,
        {"external_transition": next_words, "train_dataset": dataset(1)} if turns > 1 else {},
        num_turns=turns,
        rollout_mode=rollout_mode,
        early_termination_threshold=threshold,
        critic_type=critic_type,
        discount=0.9,
        gae_lambda=0.5,
        num_generations=generations,
        per_device_train_batch_size=generations,
    )
    talks = [Talk(1), Talk(2)]
    batch = run(monkeypatch, trainer, talks)
    assert len(rewards.turns) == turns
    for agent, talk in enumerate(talks):
        values = [TABLES[agent][ids[-1]] for ids in (talk.asked if critic_type == "v" else talk.said)]
        advantages, targets = credit_of_turns(shape, critic_type, rewards.turns, agent, values, discount=0.9, lam=0.5)
        count = len(targets)
        assert first_rows(batch, f"agent_{agent}/advantages", count) == pytest.approx(advantages, abs=1e-4)
        assert first_rows(batch, f"critic_{agent}/returns", count) == pytest.approx(targets, abs=1e-4)
        assert first_rows(batch, f"critic_{agent}/old_values", count) == pytest.approx(values, abs=1e-5)
        valid = batch[f"critic_{agent}/valid"]
        assert valid[:count].all() and not valid[count:].any()
        assert (len(valid) > count) == (shape == "chain that ends early")
        assert not batch[f"agent_{agent}/advantages"][count:].any()


VALUE_OF = {"w0": 1.0, "w10": 2.0, "w11": -1.0, "w20": 3.0, "w21": 0.5}


def value_table(numbers):
    """Values of all tokens from those of some words."""
    values = [0.0] * 32
    for word, value in numbers.items():
        values[WORD + int(word[1:])] = value
    return values


@SEPARATE
def test_credit_of_a_tree_by_hand(separate, build_known, monkeypatch):
    """
    The first turn has the value 1; its samples get the rewards 1 and 2. The second turn's contexts have the values 2
    and -1, and the rewards 4, 0 and 3, 5.

    Second turn: advantages 4 - 2 = 2, 0 - 2 = -2, 3 + 1 = 4, 5 + 1 = 6; targets are the rewards.
    First turn:  1 + 0.9 * 2 - 1 = 1.8 and 0.9 * 0.5 * (2 - 2) / 2 = 0;  advantage 1.8, target 2.8.
                 2 - 0.9 * 1 - 1 = 0.1 and 0.9 * 0.5 * (4 + 6) / 2 = 2.25; advantage 2.35, target 3.35.
    """
    trainer = build_known(
        separate,
        Rewards(0, given=[[[1.0, 2.0]] * 2, [[4.0, 0.0, 3.0, 5.0]] * 2]),
        {
            "external_transition": lambda prompt, agent_completions, num_agents: agent_completions,
            "train_dataset": Dataset.from_dict({"prompt": ["w5 w0"]}),
        },
        tables=[value_table(VALUE_OF)] * 2,
        num_turns=2,
        discount=0.9,
        gae_lambda=0.5,
        per_device_train_batch_size=2,
    )
    first = [[WORD + 10], [WORD + 11]]
    batch = run(monkeypatch, trainer, [Talk(0, first), Talk(0, first)])
    for agent in range(2):
        advantages, targets = batch[f"agent_{agent}/advantages"], batch[f"critic_{agent}/returns"]
        assert advantages.tolist() == pytest.approx([1.8, 2.35, 2.0, -2.0, 4.0, 6.0], abs=1e-5)
        assert targets.tolist() == pytest.approx([2.8, 3.35, 4.0, 0.0, 3.0, 5.0], abs=1e-5)


@SEPARATE
@pytest.mark.parametrize(
    ("rows", "generations", "expected"),
    [
        # Q 2, -1, 3, 0.5 of one context: the rewards less 2.5 / 3, 5.5 / 3, 1.5 / 3, 4 / 3
        (1, 4, [1 - 2.5 / 3, 2 - 5.5 / 3, 3 - 0.5, 6 - 4 / 3]),
        # Each is alone in its context: the same others, of other contexts
        (4, 1, [1 - 2.5 / 3, 2 - 5.5 / 3, 3 - 0.5, 6 - 4 / 3]),
        # Two contexts: the rewards less the other's Q
        (2, 2, [1 + 1.0, 2 - 2.0, 3 - 0.5, 6 - 3.0]),
    ],
    ids=["one context", "alone in the context", "two contexts"],
)
def test_a_q_critics_baseline_by_hand(rows, generations, expected, separate, build_known, monkeypatch):
    rewards = iter([1.0, 2.0, 3.0, 6.0])
    trainer = build_known(
        separate,
        lambda first, second: [next(rewards) for _ in first],
        {"train_dataset": dataset(rows)},
        tables=[value_table(VALUE_OF)] * 2,
        critic_type="q",
        num_generations=generations,
        gae_lambda=0.5,
    )
    said = [[WORD + number] for number in (10, 11, 20, 21)]
    batch = run(monkeypatch, trainer, [said, said])
    for agent in range(2):
        assert batch[f"agent_{agent}/advantages"].tolist() == pytest.approx(expected, abs=1e-5)
        assert batch[f"critic_{agent}/returns"].tolist() == pytest.approx([1, 2, 3, 6], abs=1e-5)


# Tokens

# End, no end, empty, an end alone, and one that fills the limit and ends
COMPLETIONS = [[5, 6, EOS], [7, 8, 9, 10], [], [EOS], [11, 12, 13, EOS], [14]]


def token_steps(asked, said, reward, values, end_value=None, penalties=()):
    """The steps of a completion: a value of what stands before each token, the reward with the last one."""
    if not said:
        step = Step(reward, None)
        return [step]
    steps = [
        Step(penalties[t] if penalties else 0.0, values[token]) for t, token in enumerate([asked[-1], *said[:-1]])
    ]
    steps[-1].reward += reward
    for step, later in zip(steps, steps[1:], strict=False):
        step.following.append(later)
    if end_value is not None:
        steps[-1].following.append(Step(end_value, end_value))
    return steps


def assert_tokens(batch, agent, rows, discount=0.9, gae_lambda=0.5, advantages_of=None):
    """Compare a batch with the steps of each row; nothing where no token is."""
    advantages = batch[f"agent_{agent}/advantages"]
    targets, valid = batch[f"critic_{agent}/returns"], batch[f"critic_{agent}/valid"]
    values = batch[f"critic_{agent}/old_values"]
    for row, steps in enumerate(rows):
        real = [step for step in steps if step.value is not None]
        count = len(real)
        expected = [step.advantage(discount, gae_lambda) for step in real]
        assert advantages[row, :count].tolist() == pytest.approx(expected, abs=1e-4)
        expected = [step.target(discount, gae_lambda) for step in real]
        assert targets[row, :count].tolist() == pytest.approx(expected, abs=1e-4)
        assert values[row, :count].tolist() == pytest.approx([step.value for step in real], abs=1e-5)
        assert valid[row].tolist() == [True] * count + [False] * (valid.size(1) - count)
        assert not advantages[row, count:].any()
    assert not valid[len(rows) :].any() and not advantages[len(rows) :].any()


@SEPARATE
def test_credit_of_tokens_by_hand(separate, build_known, monkeypatch):
    """
    Values before the tokens of "w10 w20 <eos>" after a prompt that ends with w0: 1, 2, 3; reward 5.
      third:  5 - 3 = 2;                            target 5
      second: 0.9 * 3 - 2 + 0.45 * 2 = 1.6;         target 3.6
      first:  0.9 * 2 - 1 + 0.45 * 1.6 = 1.52;      target 2.52
    Those of "w11 w21", which is cut: 1, -1; reward -2.
      second: -2 + 1 = -1;                          target -2
      first:  0.9 * -1 - 1 + 0.45 * -1 = -2.35;     target -1.35
    """
    trainer = build_known(
        separate,
        lambda first, second: [5.0, -2.0],
        {"train_dataset": Dataset.from_dict({"prompt": ["w5 w0"]})},
        tables=[value_table(VALUE_OF)] * 2,
        advantage_level="token",
        discount=0.9,
        gae_lambda=0.5,
        per_device_train_batch_size=2,
    )
    said = [[WORD + 10, WORD + 20, EOS], [WORD + 11, WORD + 21]]
    batch = run(monkeypatch, trainer, [said, said])
    for agent in range(2):
        advantages, targets = batch[f"agent_{agent}/advantages"], batch[f"critic_{agent}/returns"]
        assert advantages[0].tolist() == pytest.approx([1.52, 1.6, 2.0], abs=1e-5)
        assert advantages[1].tolist() == pytest.approx([-2.35, -1.0, 0.0], abs=1e-5)
        assert targets[0].tolist() == pytest.approx([2.52, 3.6, 5.0], abs=1e-5)
        assert targets[1].tolist() == pytest.approx([-1.35, -2.0, 0.0], abs=1e-5)
        assert batch[f"critic_{agent}/valid"].tolist() == [[True] * 3, [True, True, False]]


@SEPARATE
@pytest.mark.parametrize("bootstrap", [True, False], ids=["bootstrap", "no bootstrap"])
def test_credit_of_the_tokens_of_all_kinds_of_completions(bootstrap, separate, build_known, monkeypatch):
    """The second and the last are cut: if asked, the value behind their last token counts as what follows."""
    rewards = Rewards(3, own=True)
    trainer = build_known(
        separate,
        rewards,
        {"train_dataset": dataset(1)},
        advantage_level="token",
        bootstrap_truncated=bootstrap,
        max_completion_length=4,
        discount=0.9,
        gae_lambda=0.5,
        num_generations=6,
        per_device_train_batch_size=6,
    )
    talks = [Talk(0, COMPLETIONS), Talk(0, COMPLETIONS[::-1])]
    batch = run(monkeypatch, trainer, talks)
    for agent, talk in enumerate(talks):
        rows = []
        for asked, said, reward in zip(talk.asked, talk.said, rewards.turns[0][agent], strict=True):
            cut = bootstrap and said and said[-1] != EOS
            end_value = TABLES[agent][said[-1]] if cut else None
            rows.append(token_steps(asked, said, reward, TABLES[agent], end_value))
        assert_tokens(batch, agent, rows)


# Answers of each turn, in order
SAID = [[5, EOS], [6, 7, 8], [], [9, 10], [11], [12, 13, EOS], [14, 15, 16], [17, 18], [19, EOS], [], [20, 21, 22]]


@SEPARATE
@pytest.mark.parametrize("bootstrap", [True, False], ids=["bootstrap", "no bootstrap"])
@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "one turn"])
def test_the_first_token_of_the_next_turn_follows_the_last_of_this_one(
    shape, bootstrap, separate, build_known, monkeypatch
):
    turns, rollout_mode, threshold, generations = SHAPES[shape]
    rewards = Rewards(10, own=True)
    trainer = build_known(
        separate,
        rewards,
        {"external_transition": next_words, "train_dataset": dataset(1)},
        num_turns=turns,
        rollout_mode=rollout_mode,
        early_termination_threshold=threshold,
        advantage_level="token",
        bootstrap_truncated=bootstrap,
        max_completion_length=3,
        discount=0.9,
        gae_lambda=0.5,
        num_generations=generations,
        per_device_train_batch_size=generations,
    )
    talks = [Talk(1, SAID), Talk(2, SAID[::-1])]
    batch = run(monkeypatch, trainer, talks)
    following = followers(rewards.turns, generations, rollout_mode == "tree", threshold)
    for agent, talk in enumerate(talks):
        values = TABLES[agent]
        rows_of_turns = []
        for number, (asked, said) in enumerate(
            zip(by_turn(talk.asked, rewards.turns), by_turn(talk.said, rewards.turns), strict=True)
        ):
            rows = []
            for row, reward in enumerate(rewards.turns[number][agent]):
                over = not following[number][row]
                cut = bootstrap and over and said[row] and said[row][-1] != EOS
                rows.append(token_steps(asked[row], said[row], reward, values, values[said[row][-1]] if cut else None))
            rows_of_turns.append(rows)
        link(
            [[row[-1] for row in t] for t in rows_of_turns], [[row[0] for row in t] for t in rows_of_turns], following
        )
        rows = [row for rows in rows_of_turns for row in rows]
        assert (len(batch[f"agent_{agent}/advantages"]) > len(rows)) == (shape == "chain that ends early")
        assert_tokens(batch, agent, rows)


@SEPARATE
def test_the_kl_of_each_token_is_a_penalty_of_that_token(separate, build_known, monkeypatch):
    """The actors' logits depend on the last token alone, so each log-probability is computed from one state."""
    beta, rewards = 0.3, Rewards(5, own=True)
    trainer = build_known(
        separate,
        rewards,
        {"train_dataset": dataset(1), "agents": [table_lm(values, 7) for values in TABLES]},
        advantage_level="token",
        beta=beta,
        kl_in_reward=True,
        max_completion_length=4,
        discount=0.9,
        gae_lambda=0.5,
        num_generations=6,
        per_device_train_batch_size=6,
    )
    logits = []  # for each actor those of the start and those of now, after each token
    for actor in trainer.agents:
        weight = actor.lm_head.weight
        states = actor.get_input_embeddings().weight.detach()  # the norm leaves them as they are
        before = states @ weight.detach().T
        with torch.no_grad():
            weight.add_(0.2 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)))
        logits.append((before.log_softmax(-1), (states @ weight.detach().T).log_softmax(-1)))
    talks = [Talk(0, COMPLETIONS), Talk(0, COMPLETIONS[::-1])]
    batch = run(monkeypatch, trainer, talks)
    for agent, talk in enumerate(talks):
        start, now = logits[agent]
        rows, sizes = [], []
        for asked, said, reward in zip(talk.asked, talk.said, rewards.turns[0][agent], strict=True):
            before = [asked[-1], *said[:-1]]
            ratios = [(now[b, t] - start[b, t]).item() for b, t in zip(before, said, strict=False)]
            sizes += [abs(ratio) for ratio in ratios]
            penalties = [-beta * ratio for ratio in ratios]
            rows.append(token_steps(asked, said, reward, TABLES[agent], penalties=penalties))
        assert max(sizes) > 0.1
        assert_tokens(batch, agent, rows)


@SEPARATE
def test_a_missing_reward_teaches_no_token(separate, build_known, monkeypatch):
    trainer = build_known(
        separate,
        lambda first, second: [None, 5.0],
        {"train_dataset": Dataset.from_dict({"prompt": ["w5 w0"]})},
        advantage_level="token",
        per_device_train_batch_size=2,
    )
    batch = run(monkeypatch, trainer, [[[5, 6, EOS], [7, 8, EOS]]] * 2)
    for agent in range(2):
        assert batch[f"critic_{agent}/valid"].tolist() == [[False] * 3, [True] * 3]
        assert not batch[f"agent_{agent}/advantages"][0].any() and batch[f"agent_{agent}/advantages"][1].all()


def test_the_table_of_completions_shows_the_mean_advantage_of_a_completions_own_tokens(
    build_known, monkeypatch, tmp_path
):
    """Those worked out above; how long the batch's other completions are changes nothing, and no token gives 0."""
    trainer = build_known(
        True,
        lambda first, second: [5.0, -2.0, 1.0],
        {"train_dataset": Dataset.from_dict({"prompt": ["w5 w0"]})},
        tables=[value_table(VALUE_OF)] * 2,
        advantage_level="token",
        discount=0.9,
        gae_lambda=0.5,
        num_generations=3,
        per_device_train_batch_size=3,
        log_completions=True,
    )
    said = [[WORD + 10, WORD + 20, EOS], [WORD + 11, WORD + 21], []]
    run(monkeypatch, trainer, [said, said])
    frame = pd.read_parquet(tmp_path / "completions" / "completions_00001.parquet")
    for agent in range(2):
        shown = frame[f"agent_{agent}/advantage"].tolist()
        assert shown == pytest.approx([(1.52 + 1.6 + 2.0) / 3, (-2.35 - 1.0) / 2, 0.0], abs=1e-5)


# What a value reads

PROMPTS = ["w1 w2 w3 w4 w5", "w6", "w7 w8"]
BUILDERS = {"qwen2": lm, "llama": llama, "gpt2": gpt2}


def draw_heads(trainer, seed=0):
    """Values that are far from 0; returns the weights of each head."""
    generator = torch.Generator().manual_seed(seed)
    drawn = []
    for head in heads(trainer):
        (layer,) = head.net
        with torch.no_grad():
            layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator))
            layer.bias.fill_(0.5)
        drawn.append(layer.weight.detach()[0].clone())
    return drawn


def value_alone(model, weight, ids):
    """The value of a text that is fed alone, from its last state."""
    states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1]
    return states[0, -1] @ weight + 0.5


@SEPARATE
@pytest.mark.parametrize("level", ["token", "turn", "q"])
@pytest.mark.parametrize("architecture", BUILDERS)
def test_a_value_is_that_of_what_stands_before_it(architecture, level, separate, build, monkeypatch):
    """Prompts of different lengths, padded on the left, and completions, padded on the right, change nothing."""
    make = BUILDERS[architecture]
    trainer = build(
        separate,
        kwargs={"critics": [make(5), make(6)], "train_dataset": Dataset.from_dict({"prompt": PROMPTS})},
        advantage_level="token" if level == "token" else "turn",
        critic_type="q" if level == "q" else "v",
        per_device_train_batch_size=6,
    )
    weights = draw_heads(trainer)
    talks = [Talk(0, COMPLETIONS), Talk(0, COMPLETIONS[::-1])]
    batch = run(monkeypatch, trainer, talks)
    spread = []
    for agent, talk in enumerate(talks):
        model = make(5 + agent).eval()
        for row, (asked, said) in enumerate(zip(talk.asked, talk.said, strict=True)):
            texts = {"token": [asked + said[:t] for t in range(len(said))], "turn": [asked], "q": [asked + said]}[
                level
            ]
            with torch.no_grad():
                expected = [value_alone(model, weights[agent], text).item() for text in texts]
            got = batch[f"critic_{agent}/old_values"][row]
            got = got[: len(said)] if level == "token" else got[None]
            assert got.tolist() == pytest.approx(expected, abs=1e-4)
            spread += expected
    assert max(spread) - min(spread) > 0.5


@pytest.mark.parametrize("level", ["token", "turn", "q"])
def test_a_limit_of_the_critic_cuts_the_beginning_of_the_prompt(level, build, monkeypatch):
    """
    Six tokens at most. The response is read whole, so the prompt of five words loses as many as the response has
    beyond one; a value of the history has room for it. Learned positions count from what is left.
    """
    trainer = build(
        True,
        kwargs={"critics": [gpt2(5), gpt2(6)], "train_dataset": Dataset.from_dict({"prompt": PROMPTS})},
        advantage_level="token" if level == "token" else "turn",
        critic_type="q" if level == "q" else "v",
        max_completion_length=4,
        critic_max_length=6 if level != "turn" else 3,
        per_device_train_batch_size=6,
    )
    weights = draw_heads(trainer)
    talks = [Talk(0, COMPLETIONS), Talk(0, COMPLETIONS[::-1])]
    batch = run(monkeypatch, trainer, talks)
    assert batch["critic_0/input_ids"].size(1) == (3 if level == "turn" else 6)
    cuts = 0
    for agent, talk in enumerate(talks):
        model = gpt2(5 + agent).eval()
        for row, (asked, said) in enumerate(zip(talk.asked, talk.said, strict=True)):
            kept = asked[-3:] if level == "turn" else asked[-(6 - len(said)) :]
            cuts += len(kept) < len(asked)
            texts = {"token": [kept + said[:t] for t in range(len(said))], "turn": [kept], "q": [kept + said]}[level]
            with torch.no_grad():
                expected = [value_alone(model, weights[agent], text).item() for text in texts]
            got = batch[f"critic_{agent}/old_values"][row]
            got = got[: len(said)] if level == "token" else got[None]
            assert got.tolist() == pytest.approx(expected, abs=1e-4)
    assert cuts > 1


# The training step


class Steps(TrainerCallback):
    """The weights of every entity before each optimizer step."""

    def __init__(self):
        self.weights = []

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        self.weights.append(
            {
                name: {key: value.detach().clone() for key, value in module.state_dict().items()}
                for name, module in model.entities()
            }
        )


def restored(make, weights):
    """A fresh model with saved weights, and its value head's weight and bias, which gradients are asked of."""
    prefix = "backbone." if any(name.startswith("backbone.") for name in weights) else ""
    model = make().eval()
    model.load_state_dict({name: weights[prefix + name] for name in model.state_dict()})
    weight, bias = (weights.get(f"value_head.net.0.{name}") for name in ("weight", "bias"))
    if weight is None:
        return model, None
    return model, (weight[0].clone().requires_grad_(), bias[0].clone().requires_grad_())


def log_probabilities(model, asked, said):
    """Of the tokens of an answer, from its text alone."""
    logits = model(torch.tensor([asked + said])).logits[0].log_softmax(-1)
    return torch.stack([logits[len(asked) - 1 + t, token] for t, token in enumerate(said)])


def policy_loss(model, rows, advantages, old, epsilon=0.2):
    """Minus the mean over all tokens of the clipped objective; `old` are log-probabilities at sampling time."""
    terms = []
    for row, (asked, said) in enumerate(rows):
        if not said:
            continue
        ratios = (log_probabilities(model, asked, said) - old[row]).exp()
        for t, ratio in enumerate(ratios):
            advantage = advantages[row][t] if isinstance(advantages[row], list) else advantages[row]
            terms.append(torch.minimum(ratio * advantage, ratio.clamp(1 - epsilon, 1 + epsilon) * advantage))
    return -torch.stack(terms).mean()


def squared_value_error(model, head, texts, targets):
    """The mean over texts that are read alone."""
    weight, bias = head
    errors = []
    for text, target in zip(texts, targets, strict=True):
        states = model(torch.tensor([text]), output_hidden_states=True).hidden_states[-1]
        errors.append((states[0, -1] @ weight + bias - target) ** 2)
    return torch.stack(errors).mean()


def all_gradients(loss, model, head):
    """The gradient of a loss as one flat vector over a model and its head, zeros where there is none."""
    wanted = [p for p in [*model.parameters(), *(head or ())] if p.requires_grad]
    grads = torch.autograd.grad(loss, wanted, allow_unused=True)
    return torch.cat(
        [(torch.zeros_like(p) if g is None else g).reshape(-1) for p, g in zip(wanted, grads, strict=True)]
    )


def what_is_valued(level, rows, batch, agent, learns):
    """The texts whose values are trained, with their targets."""
    texts, targets = [], []
    for row, (asked, said) in enumerate(rows):
        of_row = batch[f"critic_{agent}/returns"][row].tolist()
        if level == "token":
            texts += [asked + said[:t] for t in range(len(said))] if learns(said) else []
            targets += of_row[: len(said)] if learns(said) else []
        else:
            texts.append(asked + said if level == "q" else asked)
            targets.append(of_row)
    return texts, targets


STEPS = {
    "one update": {},
    "two updates": {"num_iterations": 2, "max_steps": 2},
    "truncated ones masked": {"mask_truncated_completions": True},
}


@pytest.mark.parametrize("architecture", ["qwen2", "gpt2"])
@pytest.mark.parametrize(
    ("kind", "level", "separate"),
    [
        pytest.param(kind, level, separate, id=f"{kind}-{level}-{'separate' if separate else 'shared'}")
        for kind in STEPS
        for level in ("token", "turn", "q")
        for separate in (True, False)
        if separate or (kind, level) != ("truncated ones masked", "q")  # an error at construction
    ],
)
def test_a_step_has_the_losses_and_gradients_of_texts_read_alone(
    kind, level, separate, architecture, build, monkeypatch
):
    """
    The loss of an actor and `value_loss_coef` times that of its critic; in a second update the targets and advantages
    are those of the first, and the ratio is that to the log-probabilities at sampling time.
    """
    options, masks = STEPS[kind], kind == "truncated ones masked"
    make, steps, gradients = BUILDERS[architecture], Steps(), RecordGradients()
    trainer = build(
        separate,
        lambda first, second: [float(len(text)) for text in first],
        {
            "agents": [make(0), make(1)],
            "critics": [make(5), make(6)],
            "train_dataset": Dataset.from_dict({"prompt": PROMPTS}),
            "callbacks": [steps, gradients],
        },
        advantage_level="token" if level == "token" else "turn",
        critic_type="q" if level == "q" else "v",
        gae_lambda=0.5,
        discount=0.9,
        max_grad_norm=0.0,
        value_loss_coef=0.7,
        per_device_train_batch_size=6,
        max_completion_length=4,
        learning_rate=1e-2,
        critic_learning_rate=1e-2,
        **options,
    )
    draw_heads(trainer)
    talks = [Talk(0, COMPLETIONS), Talk(0, COMPLETIONS[::-1])]
    batch = run(monkeypatch, trainer, talks)
    assert len(steps.weights) == len(gradients.steps) == len(logged(trainer, "loss")) == options.get("max_steps", 1)

    def learns(said):
        return bool(said) and not (masks and said[-1] != EOS)

    for step, (weights, recorded) in enumerate(zip(steps.weights, gradients.steps, strict=True)):
        total = 0.0
        for agent, talk in enumerate(talks):
            rows = list(zip(talk.asked, talk.said, strict=True))
            actor, head = restored(make, weights[f"agent_{agent}"])
            start, _ = restored(make, steps.weights[0][f"agent_{agent}"])
            with torch.no_grad():
                old = [log_probabilities(start, *row) if row[1] else None for row in rows]
            advantages = batch[f"agent_{agent}/advantages"].tolist()
            learned = [(asked, said if learns(said) else []) for asked, said in rows]
            of_actor = policy_loss(actor, learned, advantages, old)
            critic = actor
            if separate:
                critic, head = restored(make, weights[f"critic_{agent}"])
                critic.get_output_embeddings().weight.requires_grad_(architecture == "gpt2")  # there it is tied
            texts, targets = what_is_valued(level, rows, batch, agent, learns)
            of_critic = squared_value_error(critic, head, texts, targets)
            total += of_actor.item() + 0.7 * of_critic.item()
            assert logged(trainer, f"agent_{agent}/critic/loss")[step] == pytest.approx(of_critic.item(), rel=1e-4)
            if separate:
                expected = {
                    f"agent_{agent}": all_gradients(of_actor, actor, None),
                    f"critic_{agent}": all_gradients(0.7 * of_critic, critic, head),
                }
                recorded[f"critic_{agent}"] = without_frozen(trainer.critics[agent], recorded[f"critic_{agent}"])
            else:
                parts = [all_gradients(of_actor, actor, head), all_gradients(0.7 * of_critic, actor, head)]
                backbone = parts[1][: -(len(head[0]) + 1)]
                assert parts[0].abs().max() > 1e-3 and backbone.abs().max() > 1e-3  # both reach the backbone
                expected = {f"agent_{agent}": parts[0] + parts[1]}
            for name, gradient_of in expected.items():
                scale = gradient_of.abs().max().item()
                torch.testing.assert_close(recorded[name], gradient_of, rtol=1e-3, atol=1e-4 * scale)
            if step:
                with torch.no_grad():
                    moved = [log_probabilities(actor, *row) - old[i] for i, row in enumerate(rows) if row[1]]
                assert torch.cat(moved).abs().max() > 1e-2
        assert logged(trainer, "loss")[step] == pytest.approx(total, rel=1e-4, abs=1e-5)


def without_frozen(module, flat):
    """The entries of a flat gradient that belong to parameters that learn."""
    sizes = [p.numel() for p in module.parameters()]
    parts = zip(module.parameters(), flat.split(sizes), strict=True)
    return torch.cat([part for parameter, part in parts if parameter.requires_grad])


@SEPARATE
@pytest.mark.parametrize("level", ["token", "turn", "q"])
@pytest.mark.parametrize("micro_batch", [4, 2])
def test_each_backbone_runs_once_in_a_micro_step(micro_batch, level, separate, build, monkeypatch):
    """So values and log-probabilities of an actor that is its own critic come from one forward pass."""
    trainer = build(
        separate,
        advantage_level="token" if level == "token" else "turn",
        critic_type="q" if level == "q" else "v",
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=4 // micro_batch,
    )
    calls = dict.fromkeys(["agent_0", "agent_1", *(["critic_0", "critic_1"] if separate else [])], 0)

    def counts(name):
        def count(*args):
            calls[name] += torch.is_grad_enabled()

        return count

    for name, module in trainer.model.entities():
        getattr(module, "backbone", module).model.register_forward_pre_hook(counts(name))
    run(monkeypatch, trainer, [[[5, 6, EOS], [7, 8, 9]]] * 2)
    assert calls == dict.fromkeys(calls, 4 // micro_batch)
