# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""What a run keeps does not grow with its steps, and what a step of MADPO keeps not with the number of actors."""

import gc
import weakref

import pytest
import torch
from datasets import Dataset
from tiny import dataset, gpt2, lm, preference_args, stub_rollouts, team_args, tok, word_reward
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import TrainerCallback

from trl_multiagent import (
    IACConfig,
    IACTrainer,
    MAACConfig,
    MAACTrainer,
    MADPOConfig,
    MADPOTrainer,
    MAGRPOConfig,
    MAGRPOTrainer,
)
from trl_multiagent.trainers import multi_agent_trainer


class CountTensors(TrainerCallback):
    """Number of live tensors after steps 10 and 50."""

    def __init__(self):
        self.counts = {}

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step in (10, 50):
            gc.collect()
            self.counts[state.global_step] = sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())


TRAINERS = {
    "MAAC": (MAACTrainer, MAACConfig, {"critic_tokenizer": tok()}, {}),
    "IAC, separate": (IACTrainer, IACConfig, {}, {}),
    "IAC, shared": (IACTrainer, IACConfig, None, {"use_separate_critic": False}),
    "IAC, shared, with all": (
        IACTrainer,
        IACConfig,
        None,
        {
            "use_separate_critic": False,
            "advantage_level": "token",
            "value_normalization": True,
            "beta": 0.1,
            "kl_in_reward": True,
            "critic_warmup_steps": 5,
        },
    ),
}


@pytest.mark.parametrize(("trainer_class", "config_class", "kwargs", "options"), TRAINERS.values(), ids=TRAINERS)
def test_the_number_of_live_tensors_is_the_same_at_step_10_and_at_step_50(
    trainer_class, config_class, kwargs, options, tmp_path
):
    """B48"""
    counter = CountTensors()
    args = team_args(
        config_class, tmp_path, max_steps=50, log_completions=True, logging_steps=5, eval_strategy="no", **options
    )
    trainer = trainer_class(
        agents=[lm(0), lm(1)],
        tokenizer=tok(),
        reward_func=word_reward,
        train_dataset=dataset(),
        args=args,
        callbacks=[counter],
        **({} if kwargs is None else {"critic_model": gpt2(2), **kwargs}),
    )
    trainer.train()
    assert counter.counts[10] > 0
    assert counter.counts[50] == counter.counts[10]


# What a step keeps


class CountBytes(TorchDispatchMode):
    """
    Bytes of the storages that operations inside make, as long as they live: activations, whoever holds them, and
    intermediate results; neither parameters nor gradients, which are there before.
    """

    def __init__(self, *modules):
        super().__init__()
        self.now = self.most = 0
        for parameter in (parameter for module in modules for parameter in module.parameters()):
            parameter.grad = torch.zeros_like(parameter)  # to be added to
        self._before = {thing.untyped_storage().data_ptr() for module in modules for thing in _tensors_of(module)}
        self._known: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return results

    def _count(self, storage) -> None:
        address, size = storage.data_ptr(), storage.nbytes()
        known = self._known.get(address)
        if address in self._before or not size or (known is not None and known() is not None):
            return

        def freed(reference):
            self.now -= size
            if self._known.get(address) is reference:
                del self._known[address]

        self._known[address] = weakref.ref(storage, freed)
        self.now += size
        self.most = max(self.most, self.now)


def _tensors_of(module):
    for tensor in (*module.parameters(), *module.buffers()):
        yield from (tensor,) if tensor.grad is None else (tensor, tensor.grad)


def bytes_of_a_step(trainer, batch) -> tuple[int, int]:
    """What is held after the forward pass, and the most that is held in forward and backward pass."""
    references = [agent.ref_model for agent in trainer.agent_trainers if agent.ref_model is not None]
    trainer.model.train()
    with CountBytes(trainer.model, *references) as count:
        loss = trainer.compute_loss(trainer.model, batch)
        held = count.now
        loss.backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in trainer.model.parameters())
    return held, count.most


PAIRS, PROMPT, COMPLETION = 16, 30, 21  # tokens, the completion's with its EOS


def bytes_of_madpo(output_dir, num_agents: int, **options) -> tuple[int, int]:
    def text(length, start):
        return " ".join(f"w{(start + place) % 20}" for place in range(length))

    rows = [
        {
            "prompts": [text(PROMPT, row)] * num_agents,
            "winner_completions": [text(COMPLETION - 1, row + 1)] * num_agents,
            "loser_completions": [text(COMPLETION - 1, row + 2)] * num_agents,
        }
        for row in range(PAIRS)
    ]
    trainer = MADPOTrainer(
        agents=[lm(seed) for seed in range(num_agents)],
        tokenizer=tok(),
        train_dataset=Dataset.from_list(rows),
        args=preference_args(MADPOConfig, output_dir, max_completion_length=COMPLETION, **options),
    )
    trainer.get_train_dataloader()
    trainer._pairs_in_step = PAIRS
    return bytes_of_a_step(trainer, trainer._pairs)


@pytest.mark.parametrize("options", [{}, {"reference_free": True}, {"precompute_ref_log_probs": True}], ids=str)
def test_madpo_holds_one_actors_activations_whatever_their_number(tmp_path, options):
    """
    After the forward pass nothing is held but what the backward pass begins with: each actor's token ids and masks,
    the state of the random numbers, and some numbers for each pair. In the backward pass the activations of one actor
    at a time come on top. So an actor more costs its ids and masks, here one percent of its activations; a team of
    one, which computes nothing twice, needs little less than one of two.
    """
    tokens = 2 * PAIRS * (PROMPT + COMPLETION)
    of_an_actor = (8 + 8 + 1) * tokens + torch.get_rng_state().nbytes + 64 * PAIRS  # int64 ids and mask, bool mask
    (one_held, one), (_, two), (four_held, four) = (
        bytes_of_madpo(tmp_path, number, **options) for number in (1, 2, 4)
    )
    assert four_held <= 4 * of_an_actor < one_held / 4
    assert four <= two + 2 * of_an_actor
    assert two <= 1.02 * one and four <= 1.05 * one


def test_without_recomputation_madpo_holds_the_activations_of_all_actors(tmp_path):
    (one_held, one), (four_held, four) = (
        bytes_of_madpo(tmp_path, number, recompute_activations=False) for number in (1, 4)
    )
    assert four_held == pytest.approx(4 * one_held, rel=0.02)
    assert four > 3 * one


@pytest.mark.parametrize(("one_backward", "as_large"), [(False, 1), (True, 4)])
def test_four_actors_that_learn_by_rewards_hold_the_activations_of_one_in_one_process(
    one_backward, as_large, tmp_path, monkeypatch
):
    """
    Elsewhere, where one backward pass serves all, they hold what one actor with four times the micro-batch does. What
    TRL's loss needs for a moment is left out.
    """
    if one_backward:
        monkeypatch.setattr(multi_agent_trainer, "takes_several_backwards", lambda accelerator: False)

    def held_by_magrpo(num_agents, size):
        trainer = MAGRPOTrainer(
            agents=[lm(seed) for seed in range(num_agents)],
            tokenizer=tok(),
            reward_func=word_reward,
            train_dataset=dataset(),
            args=team_args(MAGRPOConfig, tmp_path, per_device_train_batch_size=size, max_completion_length=20),
        )
        stub_rollouts(monkeypatch, trainer, [[[3 + row] * 19 + [2] for row in range(20)]] * num_agents)
        rows = [{"prompt": "w1 " * 30} for _ in range(size)]
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        (batch,) = trainer._micro_batches(rows)
        return bytes_of_a_step(trainer, batch)[0]

    assert held_by_magrpo(4, 8) == pytest.approx(held_by_magrpo(1, 8 * as_large), rel=0.05)
