# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Values on every causal language model that transformers has, each built tiny from its own config."""

import dataclasses
import functools
from pathlib import Path

import pytest
import torch
import transformers
from tiny import team_args
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from trl_multiagent import IACConfig
from trl_multiagent.agents.critics import add_value_head, load_critic
from trl_multiagent.models.critic import recorded_hidden_states


# By the names that configs have for them, or by what a config's `attribute_map` calls them
SMALL = {
    "vocab_size": 32,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "max_position_embeddings": 64,
    "is_decoder": True,
    # Width. Embeddings of another width are projected (OPT), or a transform before the logits has it (Electra)
    "hidden_size": 32,
    "hidden_size_global": 32,
    "intermediate_size": 32,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "word_embed_proj_dim": 24,
    "embedding_size": 24,
    "input_embedding_size": 24,
    "output_embedding_size": 40,
    "vocab_size_per_layer_input": 32,
    "hidden_size_per_layer_input": 8,
    # Layers
    "num_hidden_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    # Attention
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "head_dim": 8,
    "d_kv": 8,
    "rotary_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "index_head_dim": 16,
    "index_n_heads": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    # State spaces
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_expand": 2,
    "mamba_d_head": 8,
    "mamba_head_dim": 8,
    "mamba_d_state": 8,
    "mamba_d_ssm": 64,
    "ssm_state_size": 8,
    # Experts
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
OVERRIDES = {
    "blt": {
        "encoder_hash_byte_group_vocab": 64,
        "encoder_hash_byte_group_size": [3],
        "patch_in_forward": False,
    },
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 32},
    },
    "dots1": {"n_shared_experts": 1},
    "gemma3n_text": {"num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "inkling_text": {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"num_layers": 2, "moe_topk": 2, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8},
    "mimo_v2_flash": {"num_key_value_heads": 2, "head_dim": 16, "v_head_dim": 16},
    "reformer": {
        "attn_layers": ["local", "lsh"],
        "axial_pos_embds": False,
        "attention_head_size": 8,
        "feed_forward_size": 32,
    },
    "roc_bert": {"pronunciation_vocab_size": 32, "shape_vocab_size": 32},
    "xlm": {"causal": True},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}
LEFT_OUT = {
    "dots3_note": "the parts of its config are checked against each other; dots3_note_text is the same model",
    "gemma3n": "its picture tower needs another library; gemma3n_text is the same model for text",
    "gemma4_assistant": "a draft model, which reads the hidden states of another one and no tokens",
    "gemma4_unified_assistant": "a draft model, which reads the hidden states of another one and no tokens",
    "musicgen": "several streams of audio codes",
    "musicgen_melody": "several streams of audio codes",
}
BOTH_WAYS = [
    "bert",
    "big_bird",
    "cpmant",
    "electra",
    "megatron-bert",
    "rembert",
    "roberta",
    "roformer",
    "xlnet",
    "xmod",
]

# Where `hidden_states[-1]` is not what the logits are made of
OTHER_STATES = {
    "gemma3n_text": "has its parallel streams",
    "reformer": "has its two streams one by one",
}

# Parts of weights' names that a short text does not reach, or reaches without a gradient
NOT_REACHED = [
    "encoder_attn",  # of decoders whose encoder is not there
    "cross_attn",
    "pooler",
    "image",
    "visual",
    "audio",
    "indexer",  # chooses what to attend to, with a loss of its own
    "compressor",  # takes in several tokens at once, more than are here
    "message_input",  # of a loop that is not run
]

# The first is the beginning of the second
TEXTS = [[5, 9, 4, 7], [5, 9, 4, 7, 3, 8]]
PINNED = Path(__file__).parents[2].joinpath("constraints.txt").read_text(encoding="utf-8")
TYPES = [kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind not in {*LEFT_OUT, "cpmant", "xlnet"}]


def small_config(config_class, model_type, **options):
    """The config of a type with all that its fields offer set to small numbers."""
    fields = {field.name for field in dataclasses.fields(config_class)}
    names = {config_class.attribute_map.get(name, name): number for name, number in SMALL.items()}
    options = {**{n: v for n, v in names.items() if n in fields}, **OVERRIDES.get(model_type, {}), **options}
    for name in getattr(config_class, "sub_configs", {}):
        if name.endswith("_config") and name not in options:
            part = type(getattr(config_class(), name))
            if part is not type(None):
                options[name] = small_config(part, part.model_type)
    return config_class(**options)


def small_model(model_type, **options):
    config = small_config(CONFIG_MAPPING[model_type], model_type, **options)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    assert size < 2e7, f"{model_type} is not small: {size} parameters"
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@functools.cache
def critic_of(model_type, output_dir):
    """A critic whose head has weights of size 1, or None where a type of other versions cannot be built."""
    try:
        model = small_model(model_type)
    except Exception:
        if f"transformers=={transformers.__version__}\n" in PINNED:
            raise
        return None
    critic = load_critic("critic", model, None, team_args(IACConfig, output_dir)).eval()
    with torch.no_grad():
        for parameter in critic.value_head.parameters():
            parameter.normal_()
    return critic


@pytest.fixture(scope="module")
def output_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("architectures")


def padded(texts):
    """Ids and mask of texts padded on the right, with a word in place of a padding token, so that it would count."""
    length = max(map(len, texts))
    ids = torch.tensor([text + [30] * (length - len(text)) for text in texts])
    return ids, torch.tensor([[1] * len(text) + [0] * (length - len(text)) for text in texts])


def test_every_type_is_tested_or_left_out_for_a_reason():
    if f"transformers=={transformers.__version__}\n" in PINNED:
        assert set(LEFT_OUT) | set(OTHER_STATES) | set(BOTH_WAYS) | set(OVERRIDES) <= set(
            MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        )
    assert all(LEFT_OUT.values())
    assert len(TYPES) > 150


@pytest.mark.parametrize("model_type", TYPES)
def test_a_value_is_the_head_on_the_last_state_of_each_text(model_type, output_dir):
    critic = critic_of(model_type, output_dir)
    if critic is None:
        return
    layer, values = critic.value_head.net[0], critic(*padded(TEXTS))
    assert values.shape == (2,) and (values[0] - values[1]).abs() > 1e-3
    for value, text in zip(values.tolist(), TEXTS, strict=True):
        ids = torch.tensor([text])
        asked = {"attention_mask": torch.ones_like(ids), "output_hidden_states": True, "use_cache": False}
        with torch.no_grad():
            state = critic.backbone(ids, **asked).hidden_states[-1][0, -1].tolist()
        if model_type not in OTHER_STATES:
            expected = sum(w * x for w, x in zip(layer.weight[0].tolist(), state, strict=True)) + layer.bias.item()
            assert value == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("model_type", TYPES)
def test_a_value_depends_on_all_that_comes_before_and_on_nothing_else(model_type, output_dir):
    """Neither on later tokens of its text nor on padding and longer rows beside it."""
    critic = critic_of(model_type, output_dir)
    if critic is None:
        return
    every = torch.arange(6)[None]
    with torch.no_grad():
        together = critic(*padded(TEXTS), every.expand(2, -1))
        alone = critic(*padded(TEXTS[:1]), every[:, :4])
        changed = critic(*padded([[6, *TEXTS[1][1:]]]), every)
    torch.testing.assert_close(together[:1, :4], alone, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(together[1:, :4], alone, rtol=1e-5, atol=1e-5)
    assert ((changed[0] - together[1]).abs() > 1e-6).all()


@pytest.mark.parametrize("model_type", TYPES)
def test_an_actors_own_head_reads_the_same_state_in_the_pass_of_the_log_probabilities(model_type, output_dir):
    critic = critic_of(model_type, output_dir)
    if critic is None:
        return
    actor, (ids, mask) = critic.backbone, padded(TEXTS)
    add_value_head("agent_0", actor, actor, None, team_args(IACConfig, output_dir))
    try:
        with torch.no_grad(), recorded_hidden_states(actor) as states:
            actor(input_ids=ids, attention_mask=mask, use_cache=False)
        (hidden,) = states
        assert hidden.shape == (2, 6, actor.value_head.net[0].in_features)
        actor.value_head.load_state_dict(critic.value_head.state_dict())
        values = actor.value_head(torch.stack([hidden[0, 3], hidden[1, 5]]))
        torch.testing.assert_close(values, critic(ids, mask), rtol=1e-5, atol=1e-5)
    finally:
        del actor.value_head


@pytest.mark.parametrize("model_type", TYPES)
def test_every_weight_that_learns_gets_a_gradient(model_type, output_dir):
    """So that no wrapper waits for one that never comes. What a text does not reach in a model is left out."""
    critic = critic_of(model_type, output_dir)
    if critic is None:
        return
    critic.train()
    critic(*padded(TEXTS)).sum().backward()
    without = [n for n, p in critic.named_parameters() if p.requires_grad and p.grad is None]
    assert [name for name in without if not any(part in name for part in NOT_REACHED)] == []
    grads = [parameter.grad for parameter in critic.parameters() if parameter.grad is not None]
    assert all(grad.isfinite().all() for grad in grads) and sum(bool(grad.any()) for grad in grads) > 5
    critic.zero_grad()
    critic.eval()


@pytest.mark.parametrize("model_type", BOTH_WAYS)
def test_a_model_that_reads_a_text_both_ways_is_an_error(model_type, output_dir):
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return
    model = small_model(model_type, **({} if model_type in ("cpmant", "xlnet") else {"is_decoder": False}))
    args = team_args(IACConfig, output_dir)
    for attempt in (
        lambda: load_critic("critic", model, None, args),
        lambda: add_value_head("actor", model, model, None, args),
    ):
        with pytest.raises(ValueError, match=f"{type(model).__name__} that reads a text in both directions"):
            attempt()
