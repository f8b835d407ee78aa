# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""A value function on a causal language model."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from transformers import PreTrainedModel

from ..functional.masking import last_token_index
from .value_head import ValueHead


def base_language_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside a PEFT wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def hidden_width(model: nn.Module) -> int:
    """
    Width of a causal language model's last hidden states: what its output embeddings take. It differs from
    `config.hidden_size` where the model projects (OPT), and lies in `text_config` where there are several modalities.
    """
    head = base_language_model(model).get_output_embeddings()
    if isinstance(head, nn.Linear):
        return head.in_features
    return base_language_model(model).config.get_text_config().hidden_size


def read_values(
    model: nn.Module,
    head: ValueHead,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Values that a head reads at positions of padded texts. Pad on the right: in a causal model no real token then sees
    padding, and positions count from 0 in every architecture.

    Args:
        model ([`~torch.nn.Module`]):
            The backbone, a causal language model.
        head ([`ValueHead`]):
            The head.
        input_ids (`torch.Tensor` of shape `(B, T)`):
            Token ids.
        attention_mask (`torch.Tensor` of shape `(B, T)`):
            1 at real tokens.
        positions (`torch.Tensor` of shape `(B,)` or `(B, K)`, *optional*):
            Where to read. Default: at the last real token of each row.

    Returns:
        `torch.Tensor` of the shape of `positions`, float32.
    """
    hidden = last_hidden_states(model, input_ids, attention_mask)
    return values_at(head, hidden, last_token_index(attention_mask) if positions is None else positions)


def last_hidden_states(model: nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """The last layer's states of a causal language model, after the final norm, `(B, T, H)`."""
    return inner_model(model)(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state


def values_at(head: ValueHead, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Values of hidden states `(B, T, H)` at `positions`, `(B,)` or `(B, K)`; in the shape of `positions`."""
    rows = torch.arange(hidden.size(0), device=hidden.device).view(-1, *[1] * (positions.dim() - 1))
    return head(hidden[rows, positions])


def inner_model(model: nn.Module) -> nn.Module:
    """The part of a causal language model below its output embeddings."""
    language_model = base_language_model(model)
    return language_model.base_model


@contextlib.contextmanager
def recorded_hidden_states(model: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Inside, each forward pass of a causal language model appends its last hidden states `(B, T, H)` to the list."""
    states: list[torch.Tensor] = []
    handle = inner_model(model).register_forward_hook(
        lambda module, args, output: states.append(output.last_hidden_state)
    )
    try:
        yield states
    finally:
        handle.remove()


def is_own_critic(model: nn.Module) -> bool:
    """Whether a causal language model, an actor, has a value head of its own."""
    return "value_head" in model._modules and not isinstance(model, ValueModel)


@contextlib.contextmanager
def without_value_head(model: nn.Module) -> Iterator[None]:
    """Inside, an actor that is its own critic has no head, so that it is saved and loaded as a usual model."""
    head = model._modules.pop("value_head", None)
    try:
        yield
    finally:
        if head is not None:
            model.value_head = head


class ValueModel(nn.Module):
    """
    A causal language model with a value head.

    Args:
        backbone ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            A causal language model. Its own output embeddings are not used; where they are not tied to the input
            embeddings they are frozen, since no gradient reaches them.
        value_head_hidden_dim, critic_type, dtype:
            As for [`ValueHead`].
    """

    def __init__(
        self,
        backbone: nn.Module,
        value_head_hidden_dim: int | None = None,
        critic_type: str = "v",
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        self.backbone = backbone
        self.value_head = ValueHead(hidden_width(backbone), value_head_hidden_dim, critic_type, dtype)
        language_model = base_language_model(backbone)
        output_embeddings = language_model.get_output_embeddings()
        input_weight = language_model.get_input_embeddings().weight
        if output_embeddings is not None and output_embeddings.weight is not input_weight:
            output_embeddings.requires_grad_(False)

    @property
    def config(self):
        return self.backbone.config

    def max_length(self, limit: int | None = None) -> int | None:
        """Most tokens that it reads: its positions, or `limit` if that is less; None where neither limits it."""
        positions = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return min(filter(None, (limit, positions)), default=None)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Values of texts that are padded on the right: see `read_values`."""
        return read_values(self.backbone, self.value_head, input_ids, attention_mask, positions)
