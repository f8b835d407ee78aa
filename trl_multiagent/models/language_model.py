# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""The parts of a causal language model."""

from torch import nn
from transformers import PreTrainedModel


def base_language_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside a PEFT wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def inner_model(model: nn.Module) -> nn.Module:
    """The part of a causal language model below its output embeddings, which its forward pass calls."""
    language_model = base_language_model(model)
    inner = language_model.base_model
    if inner is language_model:  # Llama 4 and Mllama have it under another name than their prefix
        return getattr(language_model, "model", inner)
    return inner.get_decoder()  # OPT, and decoders of BART's kind, pass over what is around it


def hidden_width(model: nn.Module) -> int:
    """
    Width of a causal language model's last hidden states: what its output embeddings take. It differs from
    `config.hidden_size` where the model projects (OPT), and lies in `text_config` where there are several modalities.
    """
    language_model = base_language_model(model)
    config = language_model.config.get_text_config()
    width = getattr(language_model.get_output_embeddings(), "in_features", None)
    # What a transform between the two narrows them to (Electra, RoFormer, RemBERT)
    narrowed = [getattr(config, name, None) for name in ("embedding_size", "output_embedding_size")]
    return config.hidden_size if width is None or width in narrowed else width
