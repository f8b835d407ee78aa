# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Log-probabilities of completions. B rows, T completion tokens."""

import inspect

import torch
from torch import nn

from .language_model import base_language_model


def completion_logps(
    model: nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    completion_mask: torch.Tensor,
    average: bool = False,
) -> torch.Tensor:
    """
    `log pi(completion | prompt)` of whole completions, at temperature 1.

    Args:
        model ([`~torch.nn.Module`]):
            A causal language model.
        input_ids, attention_mask (`torch.Tensor` of shape `(B, L + T)`):
            Prompts padded at the left, completions at the right.
        completion_mask (`torch.Tensor` of shape `(B, T)`, bool):
            Which completion tokens there are.
        average (`bool`, *optional*, defaults to `False`):
            Whether to take the mean over a completion's tokens instead of their sum.

    Returns:
        `torch.Tensor` of shape `(B,)`, float32; 0 for a completion without tokens.
    """
    num_tokens = completion_mask.size(1)
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
    if "logits_to_keep" in inspect.signature(base_language_model(model).forward).parameters:
        inputs["logits_to_keep"] = num_tokens + 1
    logits = model(**inputs).logits[:, -num_tokens - 1 : -1].float()  # (B, T, V); a token's are at the one before it
    chosen = logits.gather(-1, input_ids[:, -num_tokens:, None]).squeeze(-1)
    per_token_logps = (chosen - logits.logsumexp(dim=-1)).masked_fill(~completion_mask, 0.0)
    sums = per_token_logps.sum(dim=1)
    return sums / completion_mask.sum(dim=1).clamp(min=1) if average else sums
