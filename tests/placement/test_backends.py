# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""What the back ends share."""

from types import SimpleNamespace

import torch
from torch import nn

from trl_multiagent.placement.backends import clip_grad_norms


def test_norms_are_on_one_device_where_a_module_has_no_gradient():
    """In a critic's warm-up the actors have none, and torch's norm of nothing is a number on the CPU."""
    device = torch.device("meta")
    without, with_gradient = nn.Linear(2, 1, device=device), nn.Linear(2, 1, device=device)
    for parameter in with_gradient.parameters():
        parameter.grad = torch.zeros_like(parameter)
    accelerator = SimpleNamespace(device=device, unscale_gradients=lambda: None)
    norms = clip_grad_norms(accelerator, [without, with_gradient], 1.0)
    assert [norm.device for norm in norms] == [device, device]
    torch.stack(norms)


def test_each_module_is_clipped_by_its_own_norm():
    small, large = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
    small.weight.grad, large.weight.grad = torch.tensor([[0.3, 0.4]]), torch.tensor([[30.0, 40.0]])
    accelerator = SimpleNamespace(device=torch.device("cpu"), unscale_gradients=lambda: None)
    norms = clip_grad_norms(accelerator, [small, large], 1.0)
    torch.testing.assert_close(torch.stack(norms), torch.tensor([0.5, 50.0]))
    torch.testing.assert_close(small.weight.grad, torch.tensor([[0.3, 0.4]]))
    torch.testing.assert_close(large.weight.grad, torch.tensor([[0.6, 0.8]]))
