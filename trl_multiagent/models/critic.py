# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""A value function on a causal language model."""

import contextlib
import os
from collections.abc import Iterator

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from ..functional.masking import last_token_index
from .language_model import base_language_model, hidden_width, inner_model
from .positions import num_positions, position_ids_of
from .value_head import ValueHead, load_value_head, read_value_head_config


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
    positions = position_ids_of(model, attention_mask)
    output = inner_model(model)(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **positions)
    return output.last_hidden_state


def values_at(head: ValueHead, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Values of hidden states `(B, T, H)` at `positions`, `(B,)` or `(B, K)`; in the shape of `positions`."""
    rows = torch.arange(hidden.size(0), device=hidden.device).view(-1, *[1] * (positions.dim() - 1))
    return head(hidden[rows, positions])


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
            A causal language model. What only its logits need is not used: the output embeddings where they are not
            tied to the input embeddings, a bias, a transform. It is frozen, since no gradient reaches it.
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
        used = {id(parameter) for parameter in inner_model(backbone).parameters()}
        for parameter in base_language_model(backbone).parameters():
            if id(parameter) not in used:
                parameter.requires_grad_(False)

    @classmethod
    def from_pretrained(cls, directory: str | os.PathLike, **kwargs) -> "ValueModel":
        """
        The critic of an export, or the values of an actor that is its own critic, to use outside a trainer.

        Args:
            directory (`str` or path):
                A directory with a backbone, or its adapter, and its `value_head.pt`.
            **kwargs:
                For `AutoModelForCausalLM.from_pretrained`, such as `dtype`.

        Raises:
            FileNotFoundError: there is no value head.

        Example: `ValueModel.from_pretrained("outputs/maac/critic")(encoded["input_ids"], encoded["attention_mask"])`.
        """
        config = read_value_head_config(directory)
        backbone = AutoModelForCausalLM.from_pretrained(directory, **kwargs)
        model = cls(backbone, config["hidden_dim"], config["critic_type"])
        load_value_head(model.value_head, directory)
        return model.eval()

    @property
    def config(self):
        return self.backbone.config

    def max_length(self, limit: int | None = None) -> int | None:
        """Most tokens that it reads: its positions, or `limit` if that is less; None where neither limits it."""
        limits = (limit, num_positions(self.backbone))
        return min((number for number in limits if number is not None), default=None)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Values of texts that are padded on the right: see `read_values`."""
        return read_values(self.backbone, self.value_head, input_ids, attention_mask, positions)
