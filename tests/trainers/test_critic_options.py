# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Options of critics and values: each by what it does, in numbers worked out by hand, and what is refused."""

import math
import statistics

import pytest
import torch
from datasets import Dataset
from known_values import WORD, next_words, read_first_coordinate, table, table_lm
from tiny import (
    RecordGradients,
    dataset,
    lm,
    logged,
    record_batches,
    stub_rollouts,
    team_args,
    tok,
    word_reward,
)
from transformers import TrainerCallback

from trl_multiagent import (
    ActorCriticConfig,
    ActorCriticTrainer,
    IACConfig,
    IACTrainer,
    MAACConfig,
    MAACTrainer,
)
from trl_multiagent.models.value_head import ValueHead


CONFIGS = [MAACConfig, IACConfig]
KINDS = {
    "maac": (MAACConfig, {}),
    "maac q": (MAACConfig, {"critic_type": "q"}),
    "iac separate": (IACConfig, {}),
    "iac separate q": (IACConfig, {"critic_type": "q"}),
    "iac shared": (IACConfig, {"use_separate_critic": False}),
    "iac shared tokens": (IACConfig, {"use_separate_critic": False, "advantage_level": "token"}),
}
ALL_KINDS = pytest.mark.parametrize("kind", KINDS)
PLACES = pytest.mark.parametrize("kind", ["maac", "iac separate", "iac shared"])
ANSWERS = [[WORD + 5], [WORD + 6], [WORD + 7], [WORD + 8]]
REWARDS = [1.0, 2.0, 3.0, 6.0]


@pytest.fixture
def build(tmp_path):
    """A team of two actors of a kind; options of the config by name, arguments of the trainer in `kwargs`."""

    def build(kind, reward_func=word_reward, kwargs=None, **options):
        config_class, own = KINDS[kind]
        options = {"influence_steps": 0, "lr_scheduler_type": "constant", **own, **options}
        kwargs = {"agents": [lm(0), lm(1)], "tokenizer": tok(), "train_dataset": dataset(4), **(kwargs or {})}
        trainer_class = MAACTrainer if config_class is MAACConfig else IACTrainer
        if options.get("use_separate_critic", True):
            kwargs.setdefault("critics", [lm(5)] if config_class is MAACConfig else [lm(5), lm(6)])
        args = team_args(config_class, tmp_path / "out", **options)
        return trainer_class(reward_func=reward_func, args=args, **kwargs)

    return build


def heads(trainer):
    """All value heads of a team: of its critics, or on its actors."""
    return [module for module in trainer.model.modules() if isinstance(module, ValueHead)]


def fixed(*batches):
    """A reward function that gives the first call, the second, ... these values."""
    left = list(batches)

    def fixed_reward(first, second):
        return left.pop(0) if len(left) > 1 else left[0]

    return fixed_reward


def one_prompt(rewards=REWARDS, **options):
    """A generation batch that is one prompt with these rewards."""
    return {
        "reward_func": fixed(rewards),
        "kwargs": {"train_dataset": dataset(1)},
        "num_generations": len(rewards),
        "per_device_train_batch_size": len(rewards),
        **options,
    }


def fix_values(trainer, at_sampling, in_training=None):
    """
    Let all values be one number, and another one while learning; the bias of the last layer, which is 0, is added,
    so that it has the gradient of the values.
    """
    for head in heads(trainer):

        def forward(hidden, bias=head.net[-1].bias):
            value = at_sampling if in_training is None or not torch.is_grad_enabled() else in_training
            return torch.full(hidden.shape[:-1], value) + bias

        head.forward = forward


def run(monkeypatch, trainer, answers=(ANSWERS, ANSWERS)):
    """Train on what the actors are made to say; returns what the generation batches gave to the losses."""
    stub_rollouts(monkeypatch, trainer, answers)
    batches = record_batches(trainer)
    trainer.train()
    return batches


def parts(team):
    """What is optimized by itself, as flat vectors: actors, critics, and heads apart from actors."""
    return {
        name: torch.cat([p.detach().clone().reshape(-1) for p in members]) for name, members in team.optimized_parts()
    }


def predicts(name):
    """Whether a part predicts values."""
    return name.startswith("critic") or name.endswith("/value_head")


def valuations(kind):
    """Names of the critics' inputs, and of their metrics."""
    if kind.startswith("maac"):
        return [("critic", "critic")]
    return [(f"critic_{index}", f"agent_{index}/critic") for index in range(2)]


class Watch(TrainerCallback):
    """Keeps all parts after each step, and the optimizer's state of the actors."""

    def __init__(self):
        self.after, self.states = [], []

    def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.after.append(parts(model))
        self.states.append(
            {name: [dict(optimizer.state.get(p, {})) for p in members] for name, members in model.optimized_parts()}
        )


# What is refused

NO_EFFECT = "has no effect with use_separate_critic="
ONE_SAMPLE = {"num_generations": 1, "per_device_train_batch_size": 1, "advantage_normalization": False}
REFUSED = [
    (
        CONFIGS,
        {"critic_type": "q", **ONE_SAMPLE},
        "critic_type='q' takes the mean value of the other samples as the baseline, but a generation batch has one "
        "sample. Raise num_generations or per_device_train_batch_size, or set critic_type='v'.",
    ),
    (CONFIGS, {"critic_type": "V"}, "critic_type='V', expected one of 'v', 'q'."),
    (CONFIGS, {"critic_type": None}, "critic_type=None, expected one of 'v', 'q'."),
    (
        CONFIGS,
        {"value_head_dtype": "half"},
        "value_head_dtype='half', expected one of 'float32', 'bfloat16', 'float16'.",
    ),
    *[
        (CONFIGS, {name: value}, f"{name}={value!r}, expected a whole number, 1 or more.")
        for name in ("critic_max_length", "critic_value_head_hidden_dim")
        for value in (0, -1, 1.5, "8", True)
    ],
    *[
        (
            CONFIGS,
            {"critic_warmup_steps": value},
            f"critic_warmup_steps={value!r}, expected a whole number, 0 or more.",
        )
        for value in (-1, 1.5, "8", True, None)
    ],
    *[
        (CONFIGS, {"gae_lambda": value}, f"gae_lambda={value!r}, expected a number from 0 to 1.")
        for value in (-0.1, 1.1, math.nan, "0.9", None)
    ],
    *[
        (CONFIGS, {name: value}, f"{name}={value!r}, expected a number, 0 or more.")
        for name in ("value_loss_coef", "critic_learning_rate")
        for value in (-0.1, math.nan, math.inf, "1", None)
    ],
    *[
        (CONFIGS, {"value_clip_range": value}, f"value_clip_range={value!r}, expected a positive number, or None.")
        for value in (0, 0.0, -0.2)
    ],
    *[
        (CONFIGS, {"value_clip_range": value}, f"value_clip_range={value!r}, expected a number.")
        for value in (math.nan, math.inf, "0.2", True)
    ],
    (
        CONFIGS,
        {"num_generations": 1, "per_device_train_batch_size": 1},
        "advantage_normalization=True compares the advantages of a generation batch, but there is one in each "
        "(per_device_train_batch_size=1, steps_per_generation=1). Raise one of them, or turn it off.",
    ),
    (
        CONFIGS,
        {"kl_in_reward": True},
        "kl_in_reward=True needs its coefficient, but beta=0.0. Set `beta` above 0.",
    ),
    (
        CONFIGS,
        {"critic_warmup_steps": 2, "ddp_find_unused_parameters": False},
        "critic_warmup_steps=2, but ddp_find_unused_parameters=False: in these steps the actors' parameters are not "
        "used. Leave ddp_find_unused_parameters out.",
    ),
    ([IACConfig], {"advantage_level": "word"}, "advantage_level='word', expected one of 'turn', 'token'."),
    (
        [IACConfig],
        {"advantage_level": "token", "critic_type": "q"},
        "advantage_level='token' needs values of what stands before each token: set critic_type='v'.",
    ),
    (
        [IACConfig],
        {"bootstrap_truncated": True},
        "bootstrap_truncated=True needs advantage_level='token': a turn that was cut is over, and its reward is "
        "known.",
    ),
    (
        [IACConfig],
        {"bootstrap_truncated": True, "advantage_level": "token", "mask_truncated_completions": True},
        "bootstrap_truncated=True and mask_truncated_completions=True: nothing is learned from truncated completions "
        "then. Set one of them.",
    ),
    *[
        ([IACConfig], {"value_head_hidden_dim": value}, f"value_head_hidden_dim={value!r}, expected a whole number")
        for value in (0, "8")
    ],
    (
        [IACConfig],
        {"value_head_hidden_dim": 8},
        f"value_head_hidden_dim=8 {NO_EFFECT}True. Set `critic_value_head_hidden_dim`.",
    ),
    (
        [IACConfig],
        {"critic_value_head_hidden_dim": 8, "use_separate_critic": False},
        f"critic_value_head_hidden_dim=8 {NO_EFFECT}False. Set `value_head_hidden_dim`.",
    ),
    (
        [IACConfig],
        {"critic_max_length": 8, "use_separate_critic": False},
        f"critic_max_length=8 {NO_EFFECT}False. Leave it out: the head reads what the actor reads.",
    ),
    (
        [IACConfig],
        {"mask_truncated_completions": True, "critic_type": "q", "use_separate_critic": False},
        "mask_truncated_completions=True hides truncated completions from the backbone, so a head on it cannot value "
        "them. Set critic_type='v' or use_separate_critic=True.",
    ),
]


@pytest.mark.parametrize(
    ("config_class", "options", "message"),
    [(config_class, options, message) for classes, options, message in REFUSED for config_class in classes],
    ids=lambda value: ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_what_cannot_be_is_refused_with_what_was_given_and_what_to_do(config_class, options, message, tmp_path):
    with pytest.raises(ValueError) as caught:
        config_class(output_dir=str(tmp_path), use_cpu=True, **options)
    assert message in str(caught.value)


ALLOWED = [
    (CONFIGS, {"gae_lambda": 0, "value_loss_coef": 0, "critic_learning_rate": 0, "value_clip_range": 1}),
    (CONFIGS, {"gae_lambda": 1}),
    # Alone in its batch, but not compared with others, or with more steps than one
    (CONFIGS, {"num_generations": 1, "per_device_train_batch_size": 1, "advantage_normalization": False}),
    (CONFIGS, {"num_generations": 1, "per_device_train_batch_size": 1, "num_turns": 2}),
    (CONFIGS, {"num_generations": 1, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}),
    ([IACConfig], {"num_generations": 1, "per_device_train_batch_size": 1, "advantage_level": "token"}),
    ([IACConfig], {"mask_truncated_completions": True, "critic_type": "q"}),
    ([IACConfig], {"mask_truncated_completions": True, "use_separate_critic": False}),
    ([IACConfig], {"bootstrap_truncated": True, "advantage_level": "token", "use_separate_critic": False}),
]


@pytest.mark.parametrize(
    ("config_class", "options"),
    [(config_class, options) for classes, options in ALLOWED for config_class in classes],
    ids=lambda value: ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_what_is_close_to_a_refusal_but_makes_sense_is_taken(config_class, options, tmp_path):
    config = config_class(output_dir=str(tmp_path), use_cpu=True, **options)
    assert all(getattr(config, name) == value for name, value in options.items())


# Warm-up


@pytest.mark.parametrize("steps", [0, 2])
def test_critic_warmup_steps_tells_ddp_that_parameters_may_be_unused(steps, tmp_path):
    config = MAACConfig(output_dir=str(tmp_path), use_cpu=True, critic_warmup_steps=steps)
    assert bool(config.ddp_find_unused_parameters) is (steps > 0)


@pytest.mark.parametrize("config_class", CONFIGS)
def test_critic_warmup_steps_with_reentrant_checkpointing_are_refused_in_several_processes(
    config_class, tmp_path, monkeypatch
):
    """DDP marks a parameter ready twice there."""
    options = {"critic_warmup_steps": 2, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    team_args(config_class, tmp_path, **options)
    monkeypatch.setattr(config_class, "world_size", 2)
    team_args(config_class, tmp_path, **options, gradient_checkpointing=False)
    with pytest.raises(ValueError, match=r"critic_warmup_steps=2 does not go together with .*Leave use_reentrant out"):
        team_args(config_class, tmp_path, **options)


@pytest.mark.parametrize(("steps", "warns"), [(1, False), (2, True)])
def test_a_warm_up_as_long_as_the_run_is_warned_of(steps, warns, build, caplog):
    build("iac shared", critic_warmup_steps=steps, max_steps=2).train()
    said = [record.getMessage() for record in caplog.records if "critic_warmup_steps" in record.getMessage()]
    expected = "critic_warmup_steps=2, but the run has 2 steps: no actor learns in it. Lower it, or train longer."
    assert said == [expected] * warns


@ALL_KINDS
@pytest.mark.parametrize("changed", [{}, {"gradient_accumulation_steps": 2}, {"num_iterations": 2, "beta": 0.1}])
def test_critic_warmup_steps_hold_the_actors_still(kind, changed, build):
    """Bit for bit, also with weight decay; only heads and critics move. Then all of them do."""
    watch = Watch()
    trainer = build(
        kind,
        kwargs={"callbacks": [watch]},
        critic_warmup_steps=2,
        critic_learning_rate=1e-2,
        weight_decay=0.1,
        max_steps=4,
        **changed,
    )
    before = parts(trainer.model)
    trainer.train()
    assert len(watch.after) == 4
    for step, after in enumerate(watch.after):
        for name, now in after.items():
            assert torch.equal(now, before[name]) is (step < 2 and not predicts(name)), (step, name)
        before = after


@ALL_KINDS
def test_critic_warmup_steps_end_where_the_actors_moments_begin(kind, build):
    """The first step of an actor is the first of its AdamW, whose averages are then those of one gradient."""
    watch, recorder = Watch(), RecordGradients()
    trainer = build(
        kind, kwargs={"callbacks": [watch, recorder]}, critic_warmup_steps=2, critic_learning_rate=1e-2, max_steps=3
    )
    trainer.train()
    for name in ("agent_0", "agent_1"):
        assert not any(watch.states[1][name])
        first = watch.states[2][name]
        gradient = recorder.steps[2][name]
        averages = torch.cat([state["exp_avg"].reshape(-1) for state in first])
        assert {float(state["step"]) for state in first} == {1.0}
        assert averages.abs().max() > 0
        torch.testing.assert_close(averages, 0.1 * gradient[: len(averages)], rtol=1e-5, atol=1e-9)
    for name, states in watch.states[2].items():
        if predicts(name):
            # None where no gradient comes: output embeddings, which no value reads
            assert {float(state["step"]) for state in states if state} == {3.0}


# Learning rates


@ALL_KINDS
@pytest.mark.parametrize("still", ["critics", "actors"])
def test_critic_learning_rate_is_that_of_critics_and_heads_alone(kind, still, build):
    rates = {"learning_rate": 1e-2, "critic_learning_rate": 3e-3}
    rates["critic_learning_rate" if still == "critics" else "learning_rate"] = 0.0
    trainer = build(kind, max_steps=2, weight_decay=0.1, **rates)
    before = parts(trainer.model)
    trainer.train()
    after = parts(trainer.model)
    assert len(after) == (3 if kind.startswith("maac") else 4)
    for name, now in after.items():
        assert torch.equal(now, before[name]) is (predicts(name) == (still == "critics")), name
    assert logged(trainer, "learning_rate")[0] == rates["learning_rate"]
    assert logged(trainer, "critic/learning_rate")[0] == rates["critic_learning_rate"]


# The value loss


@ALL_KINDS
def test_value_loss_coef_scales_the_critics_gradient_and_no_other(kind, build):
    gradients = {}
    for coef in (0.0, 0.5, 1.0):
        recorder = RecordGradients()
        build(kind, kwargs={"callbacks": [recorder]}, value_loss_coef=coef, max_grad_norm=0.0).train()
        gradients[coef] = recorder.steps[0]
    for name, whole in gradients[1.0].items():
        none, half = gradients[0.0][name], gradients[0.5][name]
        if name.startswith("critic"):
            assert torch.equal(whole, 2 * half) and not none.any() and half.any()
        elif "shared" not in kind:
            assert torch.equal(whole, none) and torch.equal(half, none) and none.any()
        else:  # a sum of the actor's own gradient and the values'; of the head, whose weights come last, only theirs
            size = 16 + 1
            assert torch.equal(whole[-size:], 2 * half[-size:]) and not none[-size:].any()
            torch.testing.assert_close(whole - none, 2 * (half - none), rtol=1e-3, atol=1e-5)
            assert none[:-size].any() and (half - none)[:-size].any()


@ALL_KINDS
@pytest.mark.parametrize(
    ("clip", "value", "loss", "slope"),
    [
        # Errors of 2.5 for the rewards 1, 2, 3, 6
        (None, 2.5, (2.25 + 0.25 + 0.25 + 12.25) / 4, 2 * (1.5 + 0.5 - 0.5 - 3.5) / 4),
        (0.5, 2.5, (2.25 + 0.25 + 0.25 + 12.25) / 4, 2 * (1.5 + 0.5 - 0.5 - 3.5) / 4),
        # Held back at 2.25 they are 1.5625, 0.0625, 0.5625, 14.0625; the larger one counts, and what is held back has
        # no slope
        (0.25, 2.5, (2.25 + 0.25 + 0.5625 + 14.0625) / 4, 2 * (1.5 + 0.5) / 4),
        # Errors of 1.5; held back at 1.75 they are 0.5625, 0.0625, 1.5625, 18.0625
        (0.25, 1.5, (0.5625 + 0.25 + 2.25 + 20.25) / 4, 2 * (-0.5 - 1.5 - 4.5) / 4),
    ],
)
def test_value_clip_range_holds_values_near_those_at_sampling(kind, clip, value, loss, slope, build, monkeypatch):
    recorder = RecordGradients()
    options = one_prompt(value_clip_range=clip, value_loss_coef=0.25, max_grad_norm=0.0)
    options["kwargs"]["callbacks"] = [recorder]
    trainer = build(kind, **options)
    fix_values(trainer, 2.0, in_training=value)
    run(monkeypatch, trainer)
    for entity, metric in valuations(kind):
        assert logged(trainer, f"{metric}/loss") == [pytest.approx(loss)]
        assert logged(trainer, f"{metric}/clip_ratio") == ([] if clip is None else [float(clip < 0.5)])
        entity = entity.replace("critic", "agent") if "shared" in kind else entity
        assert recorder.steps[0][entity][-1].item() == pytest.approx(0.25 * slope)  # of the bias


# Normalised values

OTHERS = [10.0, 20.0, 30.0, 60.0]


def moments_of(numbers):
    """Count, mean and sum of squared deviations."""
    mean = statistics.fmean(numbers)
    return [len(numbers), mean, sum((number - mean) ** 2 for number in numbers)]


def silence(trainer):
    """Let the networks of all heads predict 0, which is the mean of the returns in the returns' units."""
    for head in heads(trainer):
        torch.nn.init.zeros_(head.net[-1].weight)


@ALL_KINDS
def test_value_normalization_counts_values_and_errors_in_units_of_the_returns_deviation(kind, build, monkeypatch):
    """
    The rewards 1, 2, 3, 6 have the mean 3 and the squared deviations 4, 1, 0, 9. A network that says 0 values the
    first batch at 0; when it learns, 0 has become 3, and the mean squared error in units of the deviation is 1. The
    second batch is valued at 3, and then all eight rewards have one mean and deviation.
    """
    options = one_prompt(
        value_normalization=True,
        critic_learning_rate=0.0,
        advantage_normalization=False,
        max_steps=2,
        gae_lambda=1.0,
    )
    trainer = build(kind, **{**options, "reward_func": fixed(REWARDS, OTHERS)})
    silence(trainer)
    first, second = run(monkeypatch, trainer)
    pooled = moments_of(REWARDS + OTHERS)
    deviation = (pooled[2] / 8) ** 0.5
    for agent in range(2):
        assert first[f"agent_{agent}/advantages"].flatten().tolist() == pytest.approx(REWARDS)
        assert second[f"agent_{agent}/advantages"].flatten().tolist() == pytest.approx([r - 3 for r in OTHERS])
    for name, metric in valuations(kind):
        assert first[f"{name}/returns"].flatten().tolist() == pytest.approx(REWARDS)
        assert first[f"{name}/old_values"].flatten().tolist() == pytest.approx([3.0] * 4)
        assert second[f"{name}/old_values"].flatten().tolist() == pytest.approx([pooled[1]] * 4)
        error = statistics.fmean(((r - pooled[1]) / deviation) ** 2 for r in OTHERS)
        assert logged(trainer, f"{metric}/loss") == pytest.approx([1.0, error])
        assert logged(trainer, f"{metric}/value_mean") == pytest.approx([0.0, 3.0])
        assert logged(trainer, f"{metric}/value_error") == pytest.approx([3.0, 27.0])
    for head in heads(trainer):
        assert head.get_extra_state().tolist() == pytest.approx(pooled)


@ALL_KINDS
def test_value_normalization_counts_the_clipping_interval_in_units_too(kind, build, monkeypatch):
    """A network that says 0.1 when it is sampled and 0.5 when it learns, which is held back at 0.1 + 0.2."""
    trainer = build(kind, **one_prompt(value_normalization=True, value_clip_range=0.2))
    for head in heads(trainer):

        def network(hidden, bias=head.net[-1].bias):
            return (0.5 if torch.is_grad_enabled() else 0.1) + bias + torch.zeros(*hidden.shape[:-1], 1)

        head.net.forward = network
    batch = run(monkeypatch, trainer)[0]
    units = [(reward - 3) / 3.5**0.5 for reward in REWARDS]
    expected = statistics.fmean(max((0.5 - unit) ** 2, (0.3 - unit) ** 2) for unit in units)
    for name, metric in valuations(kind):
        assert logged(trainer, f"{metric}/loss") == [pytest.approx(expected)]
        assert batch[f"{name}/old_values"].flatten().tolist() == pytest.approx([3 + 0.1 * 3.5**0.5] * 4)


@pytest.mark.parametrize("kind", ["maac q", "iac separate", "iac separate q"])
def test_value_normalization_makes_a_critics_gradient_the_same_for_rewards_in_other_units(kind, build):
    gradients = []
    for scale, offset in ((1.0, 0.0), (1024.0, 4096.0)):

        def reward(first, second, scale=scale, offset=offset):
            return [scale * value + offset for value in word_reward(first, second)]

        recorder = RecordGradients()
        trainer = build(
            kind, reward, {"callbacks": [recorder]}, value_normalization=True, max_grad_norm=0.0, learning_rate=0.0
        )
        trainer.train()
        gradients.append(recorder.steps[0])
    for name, _ in valuations(kind):
        assert gradients[0][name].abs().max() > 1e-3
        torch.testing.assert_close(gradients[1][name], gradients[0][name], rtol=1e-3, atol=1e-5)


@PLACES
def test_value_normalization_leaves_out_missing_rewards_and_evaluations(kind, build, monkeypatch):
    options = one_prompt([1.0, None, 3.0, 8.0], value_normalization=True)
    options["kwargs"]["eval_dataset"] = dataset(1)
    trainer = build(kind, num_generations_eval=4, **options)
    run(monkeypatch, trainer)
    expected = [3, 4.0, 9 + 1 + 16]
    assert all(head.get_extra_state().tolist() == pytest.approx(expected) for head in heads(trainer))
    trainer.evaluate()
    assert all(head.get_extra_state().tolist() == pytest.approx(expected) for head in heads(trainer))


def test_value_normalization_counts_each_token_and_each_predicted_reward(build, monkeypatch):
    """Three and one token of the rewards 1 and 5; and for a critic of all actors, the rewards of both."""
    answers = [[WORD, WORD + 1, 2], [2]]
    trainer = build("iac shared tokens", **one_prompt([1.0, 5.0], value_normalization=True, gae_lambda=1.0))
    run(monkeypatch, trainer, (answers, answers))
    assert all(head.get_extra_state().tolist() == pytest.approx([4, 2.0, 12.0]) for head in heads(trainer))
    own = [[1.0, 5.0], [2.0, 4.0]]
    trainer = build("maac", **one_prompt(own, value_normalization=True, individual_rewards=True))
    run(monkeypatch, trainer, (answers, answers))
    assert heads(trainer)[0].get_extra_state().tolist() == pytest.approx([4, 3.0, 10.0])


@PLACES
def test_value_normalization_is_saved_with_the_head_and_restored(kind, build, tmp_path, monkeypatch):
    options = one_prompt(value_normalization=True, critic_learning_rate=1e-2)
    trainer = build(kind, **options)
    run(monkeypatch, trainer)
    directory = tmp_path / "export"
    trainer.save_model(str(directory))
    homes = {
        "maac": [directory / "critic"],
        "iac separate": [directory / f"agent_{index}" / "critic" for index in range(2)],
        "iac shared": [directory / f"agent_{index}" for index in range(2)],
    }[kind]
    for home in homes:
        state = torch.load(home / "value_head.pt", weights_only=True)
        assert state["_extra_state"].tolist() == pytest.approx([4, 3.0, 14.0])
    places = {"maac": "critics", "iac separate": "critics", "iac shared": "agents"}
    options["kwargs"][places[kind]] = [str(home) for home in homes]
    again = build(kind, **{**options, "reward_func": fixed(OTHERS)})
    read = torch.tensor([[0.5, -1.0] * 8])
    for old, new in zip(heads(trainer), heads(again), strict=True):
        assert torch.equal(old(read), new(read))
    run(monkeypatch, again)
    for head in heads(again):
        assert head.get_extra_state().tolist() == pytest.approx(moments_of(REWARDS + OTHERS))


# KL in the reward


def move_away(trainer, scale=0.3):
    """Change the actors, so that they differ from their references."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for actor in trainer.agents:
            weight = actor.model.layers[0].mlp.down_proj.weight
            weight.add_(scale * torch.randn(weight.shape, generator=generator))


def log_ratios(trainer, agent, asked, said):
    """`log pi - log pi_ref` of each token of an answer that is read alone."""
    logps = []
    for model in (trainer.agents[agent], lm(agent)):
        model.eval()
        with torch.no_grad():
            logits = model(torch.tensor([asked + said])).logits[0, len(asked) - 1 : -1]
        logps.append([row.log_softmax(-1)[token].item() for row, token in zip(logits, said, strict=True)])
    return [now - start for now, start in zip(*logps, strict=True)]


LONGER = [[WORD + 5, 2], [WORD + 6, WORD + 9, WORD + 1], [2], [WORD + 8, WORD + 2, 2]]


@pytest.mark.parametrize(
    ("kind", "options", "summed"),
    [
        ("maac", {}, True),
        ("maac q", {}, True),
        ("maac", {"individual_rewards": True}, False),
        ("iac separate", {}, False),
        ("iac shared", {}, False),
    ],
    ids=["maac", "maac q", "maac with individual rewards", "iac separate", "iac shared"],
)
@pytest.mark.parametrize("frozen", [False, True], ids=["all learn", "one frozen"])
def test_kl_in_reward_takes_the_log_ratios_off_the_reward(kind, options, summed, frozen, build, monkeypatch):
    """`r - beta * (log pi - log pi_ref)`: of the actor alone, or for the team's reward of all actors; frozen: 0."""
    beta, answers = 0.3, (LONGER, LONGER[::-1])
    shared = one_prompt(
        beta=beta,
        kl_in_reward=True,
        advantage_normalization=False,
        trainable_agents=[True, not frozen],
        learning_rate=0.0,
        **options,
    )
    trainer = build(kind, **shared)
    fix_values(trainer, 0.5)
    move_away(trainer)
    batch = run(monkeypatch, trainer, answers)[0]
    asked = tok()(dataset(1)[0]["prompt"])["input_ids"]
    ratios = [[log_ratios(trainer, agent, asked, said) for said in answers[agent]] for agent in range(2)]
    if frozen:
        ratios[1] = [[0.0 for _ in row] for row in ratios[1]]
    assert max(abs(sum(row)) for row in ratios[0]) > 0.1
    for agent in range(1 if frozen else 2):
        counted = range(2) if summed else [agent]
        penalties = [beta * sum(sum(ratios[other][row]) for other in counted) for row in range(4)]
        expected = [reward - penalty - 0.5 for reward, penalty in zip(REWARDS, penalties, strict=True)]
        assert batch[f"agent_{agent}/advantages"].tolist() == pytest.approx(expected, abs=1e-4)
        tokens = [ratio for row in ratios[agent] for ratio in row]
        assert logged(trainer, f"agent_{agent}/kl") == [pytest.approx(statistics.fmean(tokens), abs=1e-5)]
    assert logged(trainer, "reward") == [3.0]  # as the reward function gave it


@PLACES
@pytest.mark.parametrize("kl_in_reward", [True, False])
def test_kl_in_reward_leaves_no_such_term_in_the_loss(kind, kl_in_reward, build, monkeypatch):
    """Equal answers with equal rewards have equal penalties, and so no advantages: then there is nothing to learn."""
    options = one_prompt([1.0] * 4, beta=0.5, kl_in_reward=kl_in_reward, value_loss_coef=0.0)
    recorder = RecordGradients()
    options["kwargs"]["callbacks"] = [recorder]
    trainer = build(kind, **options)
    move_away(trainer)
    run(monkeypatch, trainer, ([LONGER[1]], [LONGER[3]]))
    for agent in range(2):
        assert recorder.steps[0][f"agent_{agent}"].any().item() is not kl_in_reward


def exact_kl(trainer, agent, asked):
    """The KL of the first token to the reference."""
    logps = []
    for model in (trainer.agents[agent], lm(agent)):
        model.eval()
        with torch.no_grad():
            logps.append(model(torch.tensor([asked])).logits[0, -1].log_softmax(-1))
    return (logps[0].exp() * (logps[0] - logps[1])).sum().item()


@ALL_KINDS
@pytest.mark.parametrize("kl_in_reward", [True, False])
def test_kl_in_reward_or_in_the_loss_draws_an_actor_to_its_start(kind, kl_in_reward, build):
    """B28: one plain gradient step without rewards lessens the KL; many answers of one token estimate it well."""
    trainer = build(
        kind,
        **one_prompt([0.0] * 128, beta=1.0, kl_in_reward=kl_in_reward),
        optim="sgd",
        learning_rate=2e-3,
        critic_learning_rate=0.0,
        value_loss_coef=0.0,
        max_completion_length=1,
        max_grad_norm=0.0,
    )
    silence(trainer)
    move_away(trainer)
    asked = tok()(dataset(1)[0]["prompt"])["input_ids"]
    before = [exact_kl(trainer, agent, asked) for agent in range(2)]
    trainer.train()
    after = [exact_kl(trainer, agent, asked) for agent in range(2)]
    assert min(before) > 0.01
    assert all(new < old for new, old in zip(after, before, strict=True)), (before, after)


# Advantages


def normalized(numbers):
    mean, deviation = statistics.fmean(numbers), statistics.stdev(numbers)
    return [(number - mean) / deviation for number in numbers]


@ALL_KINDS
@pytest.mark.parametrize("normalizes", [True, False])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_advantage_normalization_is_over_the_generation_batch(kind, normalizes, accumulation, build, monkeypatch):
    """However it is cut into micro-batches; of a missing reward the advantage is 0, and counts for nothing."""
    options = one_prompt([1.0, None, 3.0, 6.0], advantage_normalization=normalizes)
    options["per_device_train_batch_size"] = 4 // accumulation
    trainer = build(kind, gradient_accumulation_steps=accumulation, **options)
    fix_values(trainer, 0.5)
    batches = run(monkeypatch, trainer)
    raw = [0.5, 2.5, 5.5]
    expected = normalized(raw) if normalizes else raw
    for agent in range(2):
        advantages = batches[0][f"agent_{agent}/advantages"].flatten().tolist()
        assert advantages == pytest.approx([expected[0], 0.0, *expected[1:]], abs=1e-6)


def test_advantage_normalization_counts_each_token_once(build, monkeypatch):
    """One and three tokens of the rewards 1 and 6, with the value 0.5 before each: 0.5, then three times 5.5."""
    trainer = build("iac shared tokens", **one_prompt([1.0, 6.0], gae_lambda=1.0))
    fix_values(trainer, 0.5)
    batches = run(monkeypatch, trainer, ([[2], [WORD, WORD + 1, 2]],) * 2)
    low, high = normalized([0.5, 5.5, 5.5, 5.5])[:2]
    for agent in range(2):
        rows = batches[0][f"agent_{agent}/advantages"].tolist()
        assert [rows[0], rows[1]] == [pytest.approx([low, 0, 0]), pytest.approx([high] * 3)]


@pytest.mark.parametrize(
    ("kind", "options"), [("maac", {"individual_rewards": True}), ("iac separate", {}), ("iac shared", {})]
)
def test_advantage_normalization_is_each_actors_own(kind, options, build, monkeypatch):
    own = [[1.0, 2.0, 3.0, 6.0], [0.0, 100.0, 0.0, 50.0]]
    trainer = build(kind, **{**one_prompt(**options), "reward_func": fixed(own)})
    fix_values(trainer, 0.5)
    batches = run(monkeypatch, trainer)
    for agent in range(2):
        assert batches[0][f"agent_{agent}/advantages"].tolist() == pytest.approx(normalized(own[agent]), abs=1e-6)


@ALL_KINDS
@pytest.mark.parametrize("gae_lambda", [0.0, 0.5, 1.0])
def test_gae_lambda_weighs_the_advantage_of_the_next_turn(kind, gae_lambda, build, monkeypatch):
    """
    Two turns in a chain with the rewards 1, 2 and 3, 6, valued at 0.5 throughout, discount 0.5. Second turn: 2.5, 5.5.
    First turn: r + 0.5 * 0.5 - 0.5 + 0.5 * lambda * the next one.
    """
    trainer = build(
        kind,
        fixed([1.0, 2.0], [3.0, 6.0]),
        {"train_dataset": dataset(1), "external_transition": next_words},
        num_turns=2,
        rollout_mode="chain",
        per_device_train_batch_size=2,
        discount=0.5,
        gae_lambda=gae_lambda,
        advantage_normalization=False,
    )
    fix_values(trainer, 0.5)
    batches = run(monkeypatch, trainer)
    expected = [0.75 + 0.5 * gae_lambda * 2.5, 1.75 + 0.5 * gae_lambda * 5.5, 2.5, 5.5]
    for agent in range(2):
        assert batches[0][f"agent_{agent}/advantages"].flatten().tolist() == pytest.approx(expected)
    for name, _ in valuations(kind):
        assert batches[0][f"{name}/returns"].flatten().tolist() == pytest.approx([a + 0.5 for a in expected])


# Heads


@ALL_KINDS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_value_head_dtype_is_that_of_the_heads_alone(kind, dtype, build):
    trainer = build(kind, value_head_dtype=dtype, critic_learning_rate=1e-3, max_steps=2)
    before = parts(trainer.model)
    trainer.train()
    after = parts(trainer.model)
    for name, parameter in trainer.model.named_parameters():
        expected = getattr(torch, dtype) if "value_head" in name else torch.float32
        assert parameter.dtype == expected, name
    assert all(torch.isfinite(now).all() and not torch.equal(now, before[name]) for name, now in after.items())
    assert all(head(torch.ones(1, 16)).dtype == torch.float32 for head in heads(trainer))


WIDTHS = pytest.mark.parametrize(("width", "shapes"), [(None, [(1, 16)]), (5, [(5, 16), (1, 5)])])


def assert_all_layers_learn(trainer, shapes):
    assert heads(trainer)
    for head in heads(trainer):
        assert [tuple(p.shape) for p in head.parameters() if p.dim() == 2] == shapes
    before = {id(head): [p.detach().clone() for p in head.parameters()] for head in heads(trainer)}
    trainer.train()
    for head in heads(trainer):
        assert not any(torch.equal(p, old) for p, old in zip(head.parameters(), before[id(head)], strict=True))


@pytest.mark.parametrize("kind", ["maac", "iac separate"])
@WIDTHS
def test_critic_value_head_hidden_dim_is_the_width_of_a_critics_head(kind, width, shapes, build):
    assert_all_layers_learn(build(kind, critic_value_head_hidden_dim=width), shapes)


@pytest.mark.parametrize("kind", ["iac shared", "iac shared tokens"])
@WIDTHS
def test_value_head_hidden_dim_is_the_width_of_a_head_on_an_actor(kind, width, shapes, build):
    assert_all_layers_learn(build(kind, value_head_hidden_dim=width), shapes)


@pytest.mark.parametrize("separate", [True, False])
def test_use_separate_critic_says_where_values_come_from(separate, build):
    trainer = build("iac separate" if separate else "iac shared")
    assert len(trainer.critics) == (2 if separate else 0)
    assert [hasattr(actor, "value_head") for actor in trainer.agents] == [not separate] * 2
    names = [name for name, _ in trainer.model.entities()]
    assert names == ["agent_0", "agent_1", *(["critic_0", "critic_1"] if separate else [])]


# What is valued


@pytest.mark.parametrize("kind", ["maac", "iac separate", "iac shared"])
@pytest.mark.parametrize("critic_type", ["v", "q"])
def test_critic_type_says_whether_the_response_is_read(kind, critic_type, build, monkeypatch):
    """What is read ends with the prompt's last word, or with the answer's."""
    trainer = build(kind, **one_prompt(critic_type=critic_type))
    batch = run(monkeypatch, trainer)[0]
    asked = WORD + int(dataset(1)[0]["prompt"].split()[-1][1:])
    for name, _ in valuations(kind):
        ids, positions = batch[f"{name}/input_ids"], batch[f"{name}/positions"]
        read = [row[position].item() for row, position in zip(ids, positions, strict=True)]
        assert read == ([asked] * 4 if critic_type == "v" else [answer[-1] for answer in ANSWERS])


@pytest.mark.parametrize("kind", ["maac", "iac separate"])
@pytest.mark.parametrize("limit", [2, 3, None])
def test_critic_max_length_keeps_the_end_of_what_is_read(kind, limit, build, monkeypatch):
    """The prompt is w7 w8 w1 for each actor; a central critic also reads who was asked."""
    rows = Dataset.from_dict({"prompt": ["w7 w8 w1"]})
    trainer = build(kind, **{**one_prompt(critic_max_length=limit), "kwargs": {"train_dataset": rows}})
    batch = run(monkeypatch, trainer)[0]
    whole = [WORD + 7, WORD + 8, WORD + 1]
    if kind == "maac":
        whole = 2 * [0, 0, 0, 0, *whole]  # "[agent 0 is asked]" are four unknown words
    for name, _ in valuations(kind):
        assert batch[f"{name}/input_ids"].tolist() == [whole[-limit:] if limit else whole] * 4
        assert batch[f"{name}/attention_mask"].bool().all()


def test_individual_rewards_are_valued_one_by_one(build, monkeypatch):
    own = [[1.0, 2.0, 3.0, 6.0], [5.0, 0.0, 0.0, 0.0]]
    options = one_prompt(individual_rewards=True, advantage_normalization=False)
    trainer = build("maac", **{**options, "reward_func": fixed(own)})
    fix_values(trainer, 0.5)
    batch = run(monkeypatch, trainer)[0]
    for agent in range(2):
        assert batch[f"agent_{agent}/advantages"].tolist() == [reward - 0.5 for reward in own[agent]]
        assert batch[f"critic_{agent}/returns"].tolist() == own[agent]
        assert logged(trainer, f"agent_{agent}/critic/value_error") == [
            pytest.approx(statistics.fmean(abs(reward - 0.5) for reward in own[agent]))
        ]
    assert not logged(trainer, "critic/value_error")


@pytest.mark.parametrize("level", ["turn", "token"])
def test_advantage_level_gives_all_tokens_one_advantage_or_each_its_own(level, build, monkeypatch):
    """With lambda 0 and one value before all tokens, only the last token has the reward."""
    options = one_prompt([1.0, 6.0], advantage_level=level, gae_lambda=0.0, advantage_normalization=False)
    trainer = build("iac shared", **options)
    fix_values(trainer, 0.5)
    batch = run(monkeypatch, trainer, ([[2], [WORD, 2]],) * 2)[0]
    expected = [0.5, 5.5] if level == "turn" else [[0.5, 0.0], [0.0, 5.5]]
    assert batch["agent_0/advantages"].tolist() == batch["agent_1/advantages"].tolist() == expected


@pytest.mark.parametrize("kind", ["iac separate", "iac shared"])
@pytest.mark.parametrize("bootstrap", [True, False])
def test_bootstrap_truncated_adds_the_value_behind_a_cut_completion(kind, bootstrap, build, monkeypatch):
    """The first ends by itself, the second is cut: 0.5 more."""
    options = one_prompt([1.0, 6.0], advantage_normalization=False, gae_lambda=1.0)
    trainer = build(kind, advantage_level="token", bootstrap_truncated=bootstrap, max_completion_length=2, **options)
    fix_values(trainer, 0.5)
    batch = run(monkeypatch, trainer, ([[WORD, 2], [WORD, WORD]],) * 2)[0]
    for agent in range(2):
        assert batch[f"agent_{agent}/advantages"].tolist() == [[0.5] * 2, [6.0 if bootstrap else 5.5] * 2]


# Groups of one


@pytest.mark.parametrize("kind", ["maac", "iac separate"])
def test_groups_of_one_have_no_share_without_deviation(kind, build):
    """It would be 1 always, as if nothing was learned."""
    trainer = build(kind, num_generations=1)
    trainer.train()
    assert logged(trainer, "reward") and logged(trainer, "frac_reward_zero_std") == []


@ALL_KINDS
@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parametrize("rollout_mode", ["tree", "chain"])
def test_one_sample_of_each_prompt_is_enough(kind, turns, rollout_mode, build):
    """The baseline is learned, so nothing needs a group; also in a tree each turn has one joint response a prompt."""
    recorder = RecordGradients()
    trainer = build(
        kind,
        kwargs={"external_transition": next_words, "callbacks": [recorder]}
        if turns > 1
        else {"callbacks": [recorder]},
        num_generations=1,
        num_turns=turns,
        rollout_mode=rollout_mode,
    )
    trainer.train()
    assert logged(trainer, "env_step")[0] == 4 * turns
    assert all(torch.isfinite(gradient).all() and gradient.any() for gradient in recorder.steps[0].values())


@ALL_KINDS
def test_a_sample_alone_in_its_group_has_the_reward_less_the_value(kind, build, monkeypatch):
    trainer = build(kind, fixed([1.0], [2.0], [3.0], [6.0]), num_generations=1, advantage_normalization=False)
    fix_values(trainer, 0.5)
    batch = run(monkeypatch, trainer)[0]
    for agent in range(2):
        assert batch[f"agent_{agent}/advantages"].flatten().tolist() == [0.5, 1.5, 2.5, 5.5]


# What is logged

VALUES = table(1)


def explained(values, returns):
    errors = [r - v for r, v in zip(returns, values, strict=True)]
    return 1 - statistics.variance(errors) / statistics.variance(returns)


@pytest.mark.parametrize("kind", ["maac", "maac q", "iac separate", "iac separate q", "iac shared"])
@pytest.mark.parametrize("turns", [1, 2])
def test_values_are_measured_against_the_discounted_returns(kind, turns, build, monkeypatch):
    """
    A value is that of the word that is read last: the prompt's (w0, w3, w6, w9) or, for a Q, the answer's. Whatever
    lambda is, returns are rewards with the discounted ones of the second turn; one of them is missing.
    """
    rewards = [[1.0, 2.0, None, 6.0], [3.0, -1.0, 5.0, 4.0]][:turns]
    critics = [table_lm(VALUES, seed) for seed in (0, 1)]
    kwargs = {"agents": critics} if "shared" in kind else {"critics": critics[: 1 if "maac" in kind else 2]}
    calls = []

    def reward(first, second):
        calls.append(1)
        return rewards[len(calls) - 1]

    if turns > 1:
        kwargs["external_transition"] = lambda prompt, agent_completions, num_agents: ["w9 w2"] * 2
    trainer = build(
        kind,
        reward,
        kwargs,
        num_turns=turns,
        rollout_mode="chain",
        discount=0.5,
        gae_lambda=0.25,
        num_generations=1,
        batched_rewards=True,
        shuffle_dataset=False,
    )
    for head in heads(trainer):
        read_first_coordinate(head)
    run(monkeypatch, trainer)
    last_read = [ids[-1] for ids in ANSWERS] if "q" in kind.split() else [WORD, WORD + 3, WORD + 6, WORD + 9]
    values = [VALUES[token] for token in last_read]
    returns = list(rewards[0])
    if turns > 1:
        returns = [None if r is None else r + 0.5 * later for r, later in zip(*rewards, strict=True)] + rewards[1]
        values += values if "q" in kind.split() else [VALUES[WORD + 2]] * 4
    known = [(v, r) for v, r in zip(values, returns, strict=True) if r is not None]
    values, returns = zip(*known, strict=True)
    for _, metric in valuations(kind):
        assert logged(trainer, f"{metric}/return_mean") == [pytest.approx(statistics.fmean(returns), abs=1e-5)]
        assert logged(trainer, f"{metric}/explained_variance") == [pytest.approx(explained(values, returns), abs=1e-4)]
        error = statistics.fmean(abs(r - v) for v, r in known)
        assert logged(trainer, f"{metric}/value_error") == [pytest.approx(error, abs=1e-4)]
        assert logged(trainer, f"{metric}/value_mean") == [pytest.approx(statistics.fmean(values), abs=1e-4)]


def test_values_of_tokens_are_measured_one_by_one(build, monkeypatch):
    """The answers w5 w6 <eos> and w7 after w0, with the rewards 1 and 4 and the discount 0.5."""
    trainer = build(
        "iac shared tokens",
        **{
            **one_prompt([1.0, 4.0], discount=0.5, gae_lambda=0.25),
            "kwargs": {"agents": [table_lm(VALUES, seed) for seed in (0, 1)], "train_dataset": dataset(1)},
        },
    )
    for head in heads(trainer):
        read_first_coordinate(head)
    run(monkeypatch, trainer, ([[WORD + 5, WORD + 6, 2], [WORD + 7]],) * 2)
    values = [VALUES[WORD], VALUES[WORD + 5], VALUES[WORD + 6], VALUES[WORD]]
    returns = [0.25, 0.5, 1.0, 4.0]
    for agent in range(2):
        metric = f"agent_{agent}/critic"
        assert logged(trainer, f"{metric}/explained_variance") == [pytest.approx(explained(values, returns), abs=1e-4)]
        error = statistics.fmean(abs(r - v) for v, r in zip(values, returns, strict=True))
        assert logged(trainer, f"{metric}/value_error") == [pytest.approx(error, abs=1e-4)]


@ALL_KINDS
def test_where_returns_do_not_vary_there_is_nothing_to_explain(kind, build, monkeypatch):
    trainer = build(kind, **one_prompt([2.0] * 4))
    run(monkeypatch, trainer)
    for _, metric in valuations(kind):
        assert logged(trainer, f"{metric}/explained_variance") == [None]


# Accumulation


@ALL_KINDS
@pytest.mark.parametrize(
    "changed",
    [{}, {"value_clip_range": 0.05, "num_iterations": 2}, {"beta": 0.3, "kl_in_reward": True}],
    ids=["plain", "clipped", "kl"],
)
def test_two_micro_batches_give_the_weights_of_one_batch(kind, changed, build, monkeypatch):
    """Four steps, with answers of different lengths and a missing reward."""
    ends = []
    for size, accumulation in ((4, 1), (2, 2)):
        trainer = build(
            kind,
            lambda first, second: [
                None if "w9" in a and "w2" in b else float(len(a + b)) for a, b in zip(first, second, strict=True)
            ],
            {"train_dataset": dataset(2)},
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation,
            critic_learning_rate=1e-2,
            adam_epsilon=1e-3,  # or AdamW would turn the rounding of a gradient that is 0 into a step
            max_steps=4,
            **changed,
        )
        start = parts(trainer.model)
        run(monkeypatch, trainer, (LONGER, LONGER[::-1]))
        ends.append(parts(trainer.model))
    for name, expected in ends[0].items():
        assert (expected - start[name]).abs().max() > 1e-3, name
        torch.testing.assert_close(ends[1][name], expected, rtol=1e-5, atol=1e-6)


def test_the_shared_part_of_the_trainers_is_no_trainer(tmp_path):
    with pytest.raises(TypeError, match="abstract class ActorCriticTrainer"):
        ActorCriticTrainer(agents=[lm(0)], tokenizer=tok(), args=team_args(ActorCriticConfig, tmp_path))
