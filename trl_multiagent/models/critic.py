# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""A value function on a causal language model."""

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


class ValueModel(nn.Module):
    """
    A causal language model with a value head: the value of a text is read at its last real token.

    Args:
        backbone ([`~transformers.PreTrainedModel`]):
            A causal language model. Its own output embeddings are not used; where they are not tied to the input
            embeddings they are frozen, since no gradient reaches them.
        value_head_hidden_dim (`int`, *optional*):
            Width of the head's hidden layer. `None` is a linear head.
    """

    def __init__(self, backbone: PreTrainedModel, value_head_hidden_dim: int | None = None):
        super().__init__()
        self.backbone = backbone
        self.value_head = ValueHead(hidden_width(backbone), value_head_hidden_dim)
        language_model = base_language_model(backbone)
        output_embeddings = language_model.get_output_embeddings()
        input_weight = language_model.get_input_embeddings().weight
        if output_embeddings is not None and output_embeddings.weight is not input_weight:
            output_embeddings.requires_grad_(False)

    @property
    def config(self):
        return self.backbone.config

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """
        Values of padded texts. Pad on the right: in a causal model no real token then sees padding, and positions
        count from 0 in every architecture.

        Args:
            input_ids (`torch.Tensor` of shape `(B, T)`):
                Token ids of the critic's own tokenizer.
            attention_mask (`torch.Tensor` of shape `(B, T)`):
                1 at real tokens.

        Returns:
            `torch.Tensor` of shape `(B,)`, float32.
        """
        # The inner model (without the language-model head) gives the last layer's states, after the final norm
        inner = base_language_model(self.backbone).base_model
        hidden = inner(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
        rows = torch.arange(hidden.size(0), device=hidden.device)
        return self.value_head(hidden[rows, last_token_index(attention_mask)])  # (B,)
