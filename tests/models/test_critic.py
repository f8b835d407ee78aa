# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""The value of a text: read at its last real token, whatever stands beside it."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import gpt2, llama, lm, parameters
from torch import nn
from transformers import (
    BertConfig,
    BertLMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    set_seed,
)

from trl_multiagent import ValueHead, ValueModel
from trl_multiagent.models.language_model import hidden_width


TEXTS = [[5, 9, 4], [7, 3, 8, 12, 20, 6, 11], [10], [3, 4, 5, 6, 7]]
PAD = 1


def opt(width=16, projected=16):
    """OPT takes and gives embeddings of `projected` width, and computes in `width`."""
    set_seed(0)
    config = OPTConfig(
        vocab_size=32,
        hidden_size=width,
        word_embed_proj_dim=projected,
        ffn_dim=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
        init_std=0.5,
        dropout=0.0,
        bos_token_id=2,
        eos_token_id=2,
        pad_token_id=PAD,
    )
    return OPTForCausalLM(config)


def mistral():
    set_seed(0)
    return MistralForCausalLM(
        MistralConfig(
            vocab_size=32,
            hidden_size=20,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=128,
            pad_token_id=PAD,
        )
    )


def neox():
    set_seed(0)
    return GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=32,
            hidden_size=12,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=128,
        )
    )


def bert():
    """Its logits come of a transform of the last states, and tied embeddings with a bias."""
    set_seed(0)
    return BertLMHeadModel(
        BertConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=128,
            is_decoder=True,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            pad_token_id=PAD,
        )
    )


BACKBONES = {
    "qwen2": (lambda: lm(0), 16),
    "qwen2, tied": (lambda: lm(0, tie=True), 16),
    "llama": (lambda: llama(1), 24),
    "gpt2": (lambda: gpt2(2), 16),
    "OPT": (lambda: opt(), 16),
    "OPT, projected down": (lambda: opt(width=24, projected=8), 8),
    "OPT, projected up": (lambda: opt(width=16, projected=20), 20),
    "mistral": (mistral, 20),
    "gpt neox": (neox, 12),
    "BERT": (bert, 16),
}


def critic(name, hidden_dim=None, dtype=torch.float32):
    backbone = BACKBONES[name][0]().to(dtype)
    torch.manual_seed(3)
    model = ValueModel(backbone, hidden_dim).eval()
    with torch.no_grad():  # a fresh head gives values near 0, and differences would not be seen
        for parameter in model.value_head.parameters():
            parameter.add_(torch.randn_like(parameter))
    return model


def padded(texts):
    """Ids and mask of several texts, padded on the right to the longest."""
    length = max(map(len, texts))
    ids = [text + [PAD] * (length - len(text)) for text in texts]
    mask = [[1] * len(text) + [0] * (length - len(text)) for text in texts]
    return torch.tensor(ids), torch.tensor(mask)


def values_of(model, texts):
    with torch.no_grad():
        return model(*padded(texts))


def by_hand(model, text):
    """The head on the last layer's state of the last token of a text alone; the head is written out."""
    with torch.no_grad():
        output = model.backbone(torch.tensor([text]), output_hidden_states=True)
        state = output.hidden_states[-1][0, -1].float()
        head = {name: tensor.detach() for name, tensor in model.value_head.state_dict().items()}
        if "net.2.weight" in head:
            state = torch.tanh(head["net.0.weight"] @ state + head["net.0.bias"])
            return (head["net.2.weight"] @ state + head["net.2.bias"]).item()
        return (head["net.0.weight"] @ state + head["net.0.bias"]).item()


# What a value is


@pytest.mark.parametrize("hidden_dim", [None, 6], ids=["linear head", "head with a hidden layer"])
@pytest.mark.parametrize("name", [name for name in BACKBONES if "projected" not in name])
def test_a_value_is_the_head_on_the_last_real_token(name, hidden_dim):
    model = critic(name, hidden_dim)
    expected = [by_hand(model, text) for text in TEXTS]
    assert max(expected) - min(expected) > 0.1
    torch.testing.assert_close(values_of(model, TEXTS), torch.tensor(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in BACKBONES if "projected" in name])
def test_a_projected_state_is_read_after_its_projection(name):
    """There, `output_hidden_states` has the states before the projection."""
    model = critic(name)
    decoder, head = model.backbone.model.decoder, model.value_head.net[0]
    for row, text in enumerate(TEXTS):
        with torch.no_grad():
            state = decoder(torch.tensor([text])).last_hidden_state[0, -1]
            logits = model.backbone(torch.tensor([text])).logits[0, -1]
            torch.testing.assert_close(model.backbone.lm_head.weight @ state, logits)
            value = head.weight[0] @ state + head.bias[0]
        assert values_of(model, TEXTS)[row].item() == pytest.approx(value.item(), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("name", BACKBONES)
def test_padding_is_inert(name):
    model = critic(name)
    together = values_of(model, TEXTS)
    assert together.shape == (len(TEXTS),)
    for row, text in enumerate(TEXTS):
        alone = values_of(model, [text])
        assert together[row].item() == pytest.approx(alone.item(), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("name", BACKBONES)
def test_what_stands_at_the_padding_has_no_effect(name):
    model = critic(name)
    ids, mask = padded(TEXTS)
    with torch.no_grad():
        torch.testing.assert_close(model(ids.masked_fill(mask == 0, 17), mask), model(ids, mask), rtol=0, atol=0)


@pytest.mark.parametrize("name", BACKBONES)
def test_padding_is_inert_in_half_precision(name):
    model = critic(name, dtype=torch.bfloat16)
    together = values_of(model, TEXTS)
    assert together.dtype == torch.float32 and torch.isfinite(together).all()
    for row, text in enumerate(TEXTS):
        assert together[row].item() == pytest.approx(values_of(model, [text]).item(), rel=0.05, abs=0.05)


@pytest.mark.parametrize("name", BACKBONES)
def test_padding_has_no_gradient(name):
    """A text's gradient is that of the text alone, for the backbone and the head."""

    def gradients(ids, mask):
        model = critic(name)
        model(ids, mask)[0].backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None and p.grad.any()}

    alone, beside = gradients(*padded(TEXTS[:1])), gradients(*padded(TEXTS[:2]))
    assert alone.keys() == beside.keys() and len(alone) > 5
    for parameter, gradient in alone.items():
        torch.testing.assert_close(beside[parameter], gradient, rtol=1e-4, atol=1e-5, msg=parameter)


# Parts


@pytest.mark.parametrize("name", BACKBONES)
def test_the_head_is_as_wide_as_the_last_states(name):
    build, width = BACKBONES[name]
    assert hidden_width(build()) == width
    assert critic(name).value_head.net[0].in_features == width


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden_dim", [None, 6])
def test_the_head_is_kept_in_float32(dtype, hidden_dim):
    model = ValueModel(lm(0).to(dtype), hidden_dim)
    assert {parameter.dtype for parameter in model.value_head.parameters()} == {torch.float32}
    assert {parameter.dtype for parameter in model.backbone.parameters()} == {dtype}
    values = values_of(model, TEXTS)
    assert values.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert values_of(model, TEXTS).dtype == torch.float32


def test_the_heads_product_is_not_rounded_under_autocast():
    torch.manual_seed(0)
    head, states = ValueHead(64), torch.randn(5, 64)
    expected = states @ head.net[0].weight[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(head(states), expected, rtol=1e-6, atol=1e-6)


def test_first_values_are_near_zero():
    values = values_of(ValueModel(lm(0)).eval(), TEXTS)
    assert values.abs().max() < 1.0 and not (values == values[0]).all()


@pytest.mark.parametrize("name", BACKBONES)
def test_what_only_logits_need_is_frozen_unless_it_is_tied(name):
    model = critic(name)
    tied = model.backbone.get_output_embeddings().weight is model.backbone.get_input_embeddings().weight
    assert tied == (name in ("qwen2, tied", "gpt2", "OPT", "OPT, projected down", "OPT, projected up", "BERT"))
    assert model.backbone.get_output_embeddings().weight.requires_grad == tied
    of_logits = ("lm_head", "embed_out", "cls.")
    for parameter_name, parameter in model.named_parameters():  # a tied weight goes by its first name
        assert parameter.requires_grad == (not any(part in parameter_name for part in of_logits))


@pytest.mark.parametrize("name", BACKBONES)
def test_every_trainable_parameter_gets_a_gradient(name):
    """So that no wrapper waits for one that never comes."""
    model = critic(name, hidden_dim=6)
    model(*padded(TEXTS)).sum().backward()
    without = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert without == []


def test_a_backbone_with_an_adapter_is_read_the_same_way():
    backbone = lm(0)
    plain = ValueModel(copy.deepcopy(backbone)).eval()
    model = ValueModel(
        get_peft_model(backbone, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    ).eval()
    model.value_head.load_state_dict(plain.value_head.state_dict())
    torch.testing.assert_close(values_of(model, TEXTS), values_of(plain, TEXTS))  # a new adapter adds nothing
    with torch.no_grad():
        for n, parameter in model.named_parameters():
            if "lora_B" in n:
                parameter.normal_()
    assert (values_of(model, TEXTS) - values_of(plain, TEXTS)).abs().max() > 1e-4


@pytest.mark.parametrize("dim", [None, 6])
def test_a_head_maps_the_last_dimension_to_one_number(dim):
    head = ValueHead(8, dim)
    assert head(torch.zeros(3, 4, 8)).shape == (3, 4)
    assert torch.equal(head.net[-1].bias, torch.zeros(1))
    linear = [module for module in head.modules() if isinstance(module, nn.Linear)]
    assert len(linear) == (1 if dim is None else 2)
    assert parameters(head).numel() == (9 if dim is None else 8 * 6 + 6 + 6 + 1)
