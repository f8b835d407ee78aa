# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""References that follow their actors."""

import pytest
import torch
from tiny import dataset, lm, parameters, team_args, tok, word_reward

from trl_multiagent import IACConfig, IACTrainer, MAGRPOConfig, MAGRPOTrainer


@pytest.mark.parametrize(
    ("trainer_class", "config_class", "options"),
    [(MAGRPOTrainer, MAGRPOConfig, {}), (IACTrainer, IACConfig, {"use_separate_critic": False})],
)
def test_a_reference_is_mixed_with_its_actor_without_the_actors_head(trainer_class, config_class, options, tmp_path):
    agents = [lm(0), lm(1)]
    start = [parameters(agent) for agent in agents]
    trainer = trainer_class(
        agents=agents,
        tokenizer=tok(),
        reward_func=word_reward,
        train_dataset=dataset(),
        args=team_args(
            config_class,
            tmp_path,
            beta=0.1,
            sync_ref_model=True,
            ref_model_sync_steps=1,
            ref_model_mixup_alpha=0.25,
            **options,
        ),
    )
    trainer.train()
    for agent, before, own in zip(trainer.agent_trainers, start, trainer.agents, strict=True):
        moved = torch.cat([p.detach().reshape(-1) for name, p in own.named_parameters() if "value_head" not in name])
        assert not torch.equal(moved, before)
        torch.testing.assert_close(parameters(agent.ref_model), 0.25 * moved + 0.75 * before)
        assert hasattr(own, "value_head") == ("use_separate_critic" in options)
