# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""What `save_model` writes: every entity loads by itself, says the same, and starts a new team."""

import copy
import json
import logging
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from critic_teams import PLACES, head_states, is_same_head, team_with_critics
from datasets import Dataset
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from tiny import dataset, gpt2, llama, lm, parameters, team_args, tok, weights_hash, word_reward
from tokenizers import NormalizedString, PreTokenizedString
from tokenizers.pre_tokenizers import PreTokenizer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Trainer, TrainerCallback

from trl_multiagent import MAACConfig, MAACTrainer, MAGRPOConfig, MAGRPOTrainer, ValueModel
from trl_multiagent.models.critic import read_values


LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
PROMPT = "w1 w2 w5"
MODEL_FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
ADAPTER_FILES = {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def build(tmp_path, agents, tokenizer=None, critic=None, critic_tokenizer=None, reward=word_reward, **kwargs):
    team = {"peft_config", "eval_dataset", "callbacks"} & set(kwargs)
    given = {name: kwargs.pop(name) for name in team}
    given["peft_config"] = copy.deepcopy(given.get("peft_config"))  # PEFT writes the base's name into it
    given |= {"agents": agents, "tokenizer": tokenizer, "reward_func": reward, "train_dataset": dataset(4)}
    args = {"num_generations": 4, "max_steps": 2, **kwargs}
    if critic is None:
        return MAGRPOTrainer(args=team_args(MAGRPOConfig, tmp_path / "run", **args), **given)
    args = team_args(MAACConfig, tmp_path / "run", critic_learning_rate=1e-2, **args)
    return MAACTrainer(args=args, critic_model=critic, critic_tokenizer=critic_tokenizer, **given)


def export(trainer, directory):
    trainer.save_model(str(directory))
    return directory


def logits(model, ids=((3, 4, 5, 6, 9),)):
    model.eval()
    with torch.no_grad():
        return model(torch.tensor(ids)).logits


def answer(model, tokenizer):
    """The greedy answer to a prompt, as text."""
    model.eval()
    encoded = tokenizer(PROMPT, return_tensors="pt")
    ids = model.generate(**encoded, do_sample=False, max_new_tokens=8)
    return tokenizer.decode(ids[0], skip_special_tokens=False)


def reloaded(directory, **kwargs):
    model = AutoModelForCausalLM.from_pretrained(directory, **kwargs)
    return model, PreTrainedTokenizerFast.from_pretrained(directory)


def values(critic, ids=((3, 4, 5, 6), (7, 8, 1, 1)), mask=((1, 1, 1, 1), (1, 1, 0, 0))):
    critic.eval()
    with torch.no_grad():
        return critic(torch.tensor(ids), torch.tensor(mask))


def files(directory):
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def team(tmp_path_factory):
    """A trained team of two architectures and vocabularies with a critic, and its export."""
    directory = tmp_path_factory.mktemp("team")
    trainer = build(directory, [lm(0), llama(1, vocab=40)], [tok(), tok(40)], gpt2(2, vocab=48), tok(48))
    trainer.train()
    return trainer, export(trainer, directory / "export")


# What is written


def test_nothing_but_models_tokenizers_and_the_head_is_written(team):
    _, directory = team
    expected = {f"{entity}/{name}" for entity in ("agent_0", "agent_1", "critic") for name in MODEL_FILES}
    assert files(directory) == expected | {"critic/value_head.pt", "critic/value_head_config.json"}


def test_save_model_without_a_directory_writes_to_the_output_directory(tmp_path):
    trainer = build(tmp_path, [lm(0)], tok())
    trainer.save_model()
    assert files(tmp_path / "run") == {f"agent_0/{name}" for name in MODEL_FILES}


@pytest.mark.parametrize("index", [0, 1])
def test_an_actor_loads_and_says_the_same(team, index):
    trainer, directory = team
    model, tokenizer = reloaded(directory / f"agent_{index}")
    assert type(model) is type(trainer.agents[index])
    assert weights_hash(model) == weights_hash(trainer.agents[index])
    assert tokenizer.get_vocab() == trainer.tokenizers[index].get_vocab()
    text = answer(trainer.agents[index], trainer.tokenizers[index])
    assert answer(model, tokenizer) == text
    assert len(text.split()) > 4


def test_saving_changes_nothing(tmp_path):
    trainer = build(tmp_path, [lm(0), llama(1)], tok(), gpt2(2), peft_config=[LORA, None])
    trainer.train()
    before, random_state = weights_hash(trainer.model), torch.get_rng_state()
    export(trainer, tmp_path / "export")
    assert weights_hash(trainer.model) == before
    assert torch.equal(torch.get_rng_state(), random_state)


# As the source of a new team


def test_directories_start_a_new_team_with_the_head_restored(team, tmp_path, caplog):
    trainer, directory = team
    with caplog.at_level(logging.INFO, logger="trl_multiagent"):
        again = build(
            tmp_path,
            [str(directory / "agent_0"), str(directory / "agent_1")],
            critic=str(directory / "critic"),
        )
    assert any("restored the value head from" in r.message and "critic" in r.message for r in caplog.records)
    assert weights_hash(again.model) == weights_hash(trainer.model)
    torch.testing.assert_close(values(again.critics[0]), values(trainer.critics[0]), rtol=0, atol=1e-6)
    for tokenizer, old in zip(
        [*again.tokenizers, *again.critic_tokenizers], [*trainer.tokenizers, *trainer.critic_tokenizers], strict=True
    ):
        assert tokenizer.get_vocab() == old.get_vocab()
    again.train()
    assert weights_hash(again.model) != weights_hash(trainer.model)


def test_a_fresh_head_is_not_called_restored(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="trl_multiagent"):
        build(tmp_path, [lm(0)], tok(), gpt2(2))
    assert not any("restored" in record.message for record in caplog.records)


def test_a_head_with_a_hidden_layer_is_restored(tmp_path):
    trainer = build(tmp_path, [lm(0)], tok(), gpt2(2), critic_value_head_hidden_dim=8)
    trainer.train()
    directory = export(trainer, tmp_path / "export")
    again = build(
        tmp_path, [str(directory / "agent_0")], critic=str(directory / "critic"), critic_value_head_hidden_dim=8
    )
    assert torch.equal(values(again.critics[0]), values(trainer.critics[0]))


def test_a_head_of_another_shape_is_an_error_that_names_both(team, tmp_path):
    _, directory = team
    with pytest.raises(ValueError) as error:
        build(tmp_path, [lm(0)], tok(), str(directory / "critic"), critic_value_head_hidden_dim=8)
    assert "(1, 16)" in str(error.value)  # as saved
    assert "(8, 16)" in str(error.value) and "(1, 8)" in str(error.value)  # as asked for


def test_a_head_for_another_kind_of_value_is_an_error(team, tmp_path):
    _, directory = team
    with pytest.raises(ValueError, match="critic_type='v'.*critic_type='q'"):
        build(tmp_path, [lm(0)], tok(), str(directory / "critic"), critic_type="q")


# Heads in every place


HEAD_FILES = {"value_head.pt", "value_head_config.json"}
PARTS = {
    "MAAC": ["agent_0", "agent_1", "critic"],
    "IAC separate": ["agent_0", "agent_1", "agent_0/critic", "agent_1/critic"],
    "IAC shared": ["agent_0", "agent_1"],
}


@dataclass
class Exported:
    """A trained team with value heads, and its export."""

    kind: str
    weights: str
    trainer: Trainer
    directory: Path

    @property
    def tolerance(self) -> float:
        """Of what a reloaded model says: merging rounds."""
        return 1e-4 if self.weights == "merged" else 1e-6

    def restart(self, output_dir, directory=None):
        """A new team from the export alone: no head is named."""
        directory = directory or self.directory
        kwargs = {"agents": [str(directory / f"agent_{index}") for index in range(2)], "tokenizer": None}
        if self.kind != "IAC shared":
            kwargs["critics"] = [str(directory / place) for place in PLACES[self.kind]]
        return team_with_critics(self.kind, output_dir, kwargs=kwargs, max_steps=2)


@pytest.fixture(
    scope="module",
    params=[(kind, weights) for kind in PLACES for weights in ("full", "adapters", "merged")],
    ids=" ".join,
)
def exported(request, tmp_path_factory):
    """Adapters lie on bases that are found by name, or are merged with bases that were never saved."""
    kind, weights = request.param
    directory = tmp_path_factory.mktemp("exported")
    models = {"agents": [lm(0), llama(1)], "critics": [llama(5), lm(6)][: len(PLACES[kind])]}
    if kind == "IAC shared":
        del models["critics"]
    if weights == "adapters":
        for role, bases in models.items():
            for index, model in enumerate(bases):
                model.save_pretrained(directory / f"{role}_{index}")
            models[role] = [
                AutoModelForCausalLM.from_pretrained(directory / f"{role}_{index}") for index in range(len(bases))
            ]
    trainer = team_with_critics(kind, directory / "run", lora=weights != "full", kwargs=models, max_steps=2)
    trainer.train()
    return Exported(kind, weights, trainer, export(trainer, directory / "export"))


def head_file(directory):
    return torch.load(directory / "value_head.pt", map_location="cpu", weights_only=True)


def read(owner, backbone, ids=((3, 4, 5, 6), (7, 8, 9, 2))):
    """What the head of a critic, or of an actor, says of texts."""
    backbone.eval()
    with torch.no_grad():
        return read_values(backbone, owner.value_head, torch.tensor(ids), torch.ones(2, 4, dtype=torch.long))


def live_values(trainer):
    return [read(owner, getattr(owner, "backbone", owner)) for owner in trainer.critics or trainer.agents]


def test_each_part_has_its_directory_with_a_head_beside_what_it_reads(exported):
    own = ADAPTER_FILES | {"README.md"} if exported.weights == "adapters" else MODEL_FILES
    expected = {f"{part}/{name}" for part in PARTS[exported.kind] for name in own}
    expected |= {f"{place}/{name}" for place in PLACES[exported.kind] for name in HEAD_FILES}
    assert files(exported.directory) == expected


def test_a_head_file_is_the_live_head_as_a_plain_state_dict(exported):
    """B38"""
    states = [head_file(exported.directory / place) for place in PLACES[exported.kind]]
    for state, live in zip(states, head_states(exported.trainer), strict=True):
        assert type(state) is dict
        assert {name: tensor.dtype for name, tensor in state.items()} == {
            "net.0.weight": torch.float32,
            "net.0.bias": torch.float32,
            "_extra_state": torch.float64,  # the moments of the returns
        }
        assert is_same_head(state, live)
        assert state["_extra_state"][0] == 8 and state["_extra_state"][2] > 1  # two steps of four samples
    assert len({state["net.0.weight"].sum().item() for state in states}) == len(states)


def test_a_reloaded_backbone_and_the_head_file_give_the_live_values_by_hand(exported):
    for place, live in zip(PLACES[exported.kind], live_values(exported.trainer), strict=True):
        backbone = AutoModelForCausalLM.from_pretrained(exported.directory / place).eval()
        head = head_file(exported.directory / place)
        with torch.no_grad():
            ids = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 2]])
            hidden = backbone(ids, output_hidden_states=True).hidden_states[-1][:, -1]
        count, mean, total_deviation = head["_extra_state"].tolist()
        for state, value in zip(hidden, live, strict=True):
            predicted = (state @ head["net.0.weight"][0] + head["net.0.bias"][0]).item()
            by_hand = predicted * math.sqrt(total_deviation / count) + mean
            assert value.item() == pytest.approx(by_hand, rel=exported.tolerance)


def test_values_can_be_asked_for_without_a_trainer(exported):
    ids = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 2]])
    for place, live in zip(PLACES[exported.kind], live_values(exported.trainer), strict=True):
        critic = ValueModel.from_pretrained(exported.directory / place)
        with torch.no_grad():
            values = critic(ids, torch.ones_like(ids))
        torch.testing.assert_close(values, live, rtol=exported.tolerance, atol=1e-6)


def test_a_directory_without_a_head_gives_no_values(tmp_path):
    lm(0).save_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match="no model was saved there with a head"):
        ValueModel.from_pretrained(tmp_path)


def test_an_actor_loads_without_a_word_of_the_head(exported):
    for index, live in enumerate(exported.trainer.agents):
        directory = exported.directory / f"agent_{index}"
        model, loading = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
        assert not any(loading[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        torch.testing.assert_close(logits(model), logits(live), rtol=exported.tolerance, atol=exported.tolerance)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
        assert answer(model, tokenizer) == answer(live, exported.trainer.tokenizers[index])


def test_directories_restore_every_head_by_themselves_and_are_trained_on(exported, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="trl_multiagent"):
        again = exported.restart(tmp_path)
    messages = [record.getMessage() for record in caplog.records if "restored" in record.getMessage()]
    assert len(messages) == len(PLACES[exported.kind])
    for message, place in zip(messages, PLACES[exported.kind], strict=True):
        assert str(exported.directory / place / "value_head.pt") in message
    before = head_states(again)
    assert all(map(is_same_head, before, head_states(exported.trainer)))
    for new, old in zip(live_values(again), live_values(exported.trainer), strict=True):
        torch.testing.assert_close(new, old, rtol=exported.tolerance, atol=1e-6)
    assert isinstance(again.agents[0], PeftModel) == (exported.weights == "adapters")
    again.train()
    for early, late in zip(before, head_states(again), strict=True):
        assert not torch.equal(early["net.0.weight"], late["net.0.weight"])
        assert late["_extra_state"][0] == 16  # it goes on counting


def test_a_missing_head_is_an_error(exported, tmp_path):
    """B38"""
    place = PLACES[exported.kind][-1]
    shutil.copytree(exported.directory, tmp_path / "export")
    (tmp_path / "export" / place / "value_head.pt").unlink()
    with pytest.raises(FileNotFoundError, match=f"{place}/value_head.pt is missing.*remove value_head_config.json"):
        exported.restart(tmp_path / "out", tmp_path / "export")


def test_an_export_in_the_place_of_another_leaves_no_head_of_that_one(tmp_path):
    """A later team that learns values on these actors would start from a head that never saw them."""
    directory = export(team_with_critics("IAC shared", tmp_path / "run"), tmp_path / "export")
    assert (directory / "agent_0" / "value_head.pt").is_file()
    export(build(tmp_path, [lm(0), lm(1)], tok()), directory)
    assert files(directory) == {f"agent_{index}/{name}" for index in range(2) for name in MODEL_FILES}


# Kinds of models


def is_tied(model):
    return model.get_input_embeddings().weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()


def test_ties_hold_through_saving_resuming_and_reloading(tmp_path):
    """B37"""

    def make():
        return build(
            tmp_path, [gpt2(0), gpt2(1)], tok(), gpt2(2), save_strategy="steps", save_steps=1, save_total_limit=5
        )

    trainer = make()
    trainer.train()
    assert (tmp_path / "run" / "checkpoint-1").is_dir()
    directory = export(trainer, tmp_path / "export")
    for entity in ("agent_0", "agent_1", "critic"):
        model = AutoModelForCausalLM.from_pretrained(directory / entity)
        assert is_tied(model)
        assert "lm_head.weight" not in load_file(directory / entity / "model.safetensors")
    resumed = make()
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    assert resumed.state.global_step == 2
    again = build(
        tmp_path,
        [str(directory / "agent_0"), str(directory / "agent_1")],
        critic=str(directory / "critic"),
    )
    assert weights_hash(again.model) == weights_hash(trainer.model)
    again.train()
    for team in (trainer, resumed, again):
        models = [*team.agents, team.critics[0].backbone]
        assert all(is_tied(model) for model in models)
        assert len({model.get_input_embeddings().weight.data_ptr() for model in models}) == 3
        assert torch.isfinite(parameters(team.model)).all()


def in_half_precision(model, directory):
    model.save_pretrained(directory)
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)


def test_half_precision_is_kept_with_the_head_in_float32(tmp_path):
    models = [in_half_precision(model, tmp_path / str(i)) for i, model in enumerate([lm(0), llama(1), gpt2(2)])]
    trainer = build(tmp_path, models[:2], tok(), models[2])
    trainer.train()
    directory = export(trainer, tmp_path / "export")
    for index in range(2):
        saved = load_file(directory / f"agent_{index}" / "model.safetensors")
        assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
        model, tokenizer = reloaded(directory / f"agent_{index}")
        assert model.dtype == torch.bfloat16
        assert torch.equal(logits(model), logits(trainer.agents[index]))
        assert answer(model, tokenizer) == answer(trainer.agents[index], trainer.tokenizers[index])
    head = torch.load(directory / "critic" / "value_head.pt", weights_only=True)
    assert {name: tensor.dtype for name, tensor in head.items()} == {
        "net.0.weight": torch.float32,
        "net.0.bias": torch.float32,
        "_extra_state": torch.float64,
    }
    again = build(
        tmp_path,
        [AutoModelForCausalLM.from_pretrained(directory / f"agent_{i}") for i in range(2)],
        tok(),
        AutoModelForCausalLM.from_pretrained(directory / "critic"),
    )
    torch.testing.assert_close(values(again.critics[0]), values(trainer.critics[0]), rtol=0, atol=1e-6)


def named_base(tmp_path, seed=0, name="base"):
    lm(seed).save_pretrained(tmp_path / name)
    return AutoModelForCausalLM.from_pretrained(tmp_path / name)


def test_an_adapter_on_a_base_with_a_name_is_exported_as_the_adapter(tmp_path):
    trainer = build(tmp_path, [named_base(tmp_path), llama(1)], tok(), peft_config=[LORA, None])
    trainer.train()
    directory = export(trainer, tmp_path / "export")
    names = {path.name for path in (directory / "agent_0").iterdir()} - {"README.md"}
    assert names == ADAPTER_FILES
    saved = load_file(directory / "agent_0" / "adapter_model.safetensors")
    assert len(saved) == 4 and all(tensor.numel() for tensor in saved.values())
    assert any(tensor.abs().max() > 0 for name, tensor in saved.items() if "lora_B" in name)
    model, tokenizer = reloaded(directory / "agent_0")
    torch.testing.assert_close(logits(model), logits(trainer.agents[0]))
    assert not torch.equal(logits(model), logits(lm(0)))
    assert answer(model, tokenizer) == answer(trainer.agents[0], trainer.tokenizers[0])
    assert {path.name for path in (directory / "agent_1").iterdir()} == MODEL_FILES


@pytest.mark.parametrize("loaded", [True, False], ids=["models", "directories"])
def test_one_adapter_config_for_all_names_each_actors_own_base(loaded, tmp_path):
    bases = [named_base(tmp_path, seed, f"base_{seed}") for seed in range(2)]
    if not loaded:
        bases = [str(tmp_path / "base_0"), str(tmp_path / "base_1")]
    trainer = build(tmp_path, bases, tok(), peft_config=LORA)
    trainer.train()
    directory = export(trainer, tmp_path / "export")
    for index in range(2):
        config = json.loads((directory / f"agent_{index}" / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == str(tmp_path / f"base_{index}")
        model, _ = reloaded(directory / f"agent_{index}")
        torch.testing.assert_close(logits(model), logits(trainer.agents[index]))


@pytest.mark.parametrize("base", ["never had a name", "is gone"])
def test_an_adapter_on_a_base_that_cannot_be_found_again_is_exported_merged(base, tmp_path):
    model = lm(0) if base == "never had a name" else named_base(tmp_path)
    trainer = build(tmp_path, [model, llama(1)], tok(), peft_config=[LORA, None])
    trainer.train()
    shutil.rmtree(tmp_path / "base", ignore_errors=True)
    directory = export(trainer, tmp_path / "export")
    assert {path.name for path in (directory / "agent_0").iterdir()} == MODEL_FILES
    merged, tokenizer = reloaded(directory / "agent_0")
    torch.testing.assert_close(logits(merged), logits(trainer.agents[0]), rtol=1e-4, atol=1e-4)
    assert (logits(merged) - logits(lm(0))).abs().max() > 1e-2
    assert answer(merged, tokenizer) == answer(trainer.agents[0], trainer.tokenizers[0])


def test_an_exported_adapter_starts_a_new_team_and_is_trained_on(tmp_path):
    trainer = build(tmp_path, [named_base(tmp_path), llama(1)], tok(), peft_config=[LORA, None])
    trainer.train()
    directory = export(trainer, tmp_path / "export")
    again = build(tmp_path, [str(directory / "agent_0"), str(directory / "agent_1")])
    assert isinstance(again.agents[0], PeftModel)
    torch.testing.assert_close(logits(again.agents[0]), logits(trainer.agents[0]))
    before = {name: p.detach().clone() for name, p in again.agents[0].named_parameters()}
    again.train()
    moved = {name for name, p in again.agents[0].named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if "lora_" in name}
    second = export(again, tmp_path / "second")
    model, _ = reloaded(second / "agent_0")
    torch.testing.assert_close(logits(model), logits(again.agents[0]))


def test_a_critic_beside_adapters_keeps_its_head(tmp_path):
    trainer = build(tmp_path, [lm(0), lm(1)], tok(), gpt2(2), peft_config=LORA)
    trainer.train()
    directory = export(trainer, tmp_path / "export")
    again = build(tmp_path, [lm(0), lm(1)], tok(), str(directory / "critic"), peft_config=LORA)
    assert torch.equal(values(again.critics[0]), values(trainer.critics[0]))


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    """A tiny Llama as a GGUF file, with its weights in float32."""
    gguf = pytest.importorskip("gguf")
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    model = llama(1)
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(0)
    layer = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    names |= {f"model.layers.0.{ours}": f"blk.0.{theirs}" for ours, theirs in layer.items()}
    for name, tensor in model.state_dict().items():
        writer.add_tensor(names[name.removesuffix(".weight")] + ".weight", tensor.numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def from_gguf(path):
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 2, 1
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(path.parent / "refused")
    return model


@pytest.mark.parametrize("peft_config", [None, LORA], ids=["full", "LoRA"])
def test_a_model_from_gguf_is_trained_and_saved_as_a_dense_one(gguf_file, peft_config, tmp_path):
    trainer = build(
        tmp_path, [from_gguf(gguf_file), lm(0)], tok(), from_gguf(gguf_file), peft_config=[peft_config, None]
    )
    before = weights_hash(trainer.agents[0])
    trainer.train()
    assert weights_hash(trainer.agents[0]) != before
    directory = export(trainer, tmp_path / "export")
    model, tokenizer = reloaded(directory / "agent_0")
    assert "quantization_config" not in json.loads((directory / "agent_0" / "config.json").read_text())
    torch.testing.assert_close(logits(model), logits(trainer.agents[0]), rtol=1e-4, atol=1e-4)
    assert answer(model, tokenizer) == answer(trainer.agents[0], trainer.tokenizers[0])
    backbone = AutoModelForCausalLM.from_pretrained(directory / "critic")
    assert torch.equal(logits(backbone), logits(trainer.critics[0].backbone))
    again = build(tmp_path, [str(directory / "agent_0"), lm(0)], [None, tok()], str(directory / "critic"))
    again.train()


def test_a_model_from_gguf_whose_weights_are_still_packed_is_refused(gguf_file, tmp_path):
    """With a kernel for it, transformers leaves the weights in their blocks: they cannot be trained nor saved."""
    model = from_gguf(gguf_file)
    model.hf_quantizer.supported = True
    model.hf_quantizer.packed_modules = {"model.layers.0.mlp.up_proj.weight": model.model.layers[0].mlp.up_proj}
    with pytest.raises(ValueError, match="agent_1"):
        build(tmp_path, [lm(0), model], tok())


def grown(model, tokenizer):
    tokenizer.add_tokens(["<a>", "<b>"])
    model.resize_token_embeddings(len(tokenizer))
    with torch.no_grad():
        model.get_input_embeddings().weight[-2:] = 0.5 * torch.randn(2, model.config.hidden_size)
    return model, tokenizer


@pytest.mark.parametrize("peft_config", [None, LORA], ids=["full", "LoRA"])
@pytest.mark.parametrize("base", ["from a config", "from a directory"])
def test_added_tokens_survive(base, peft_config, tmp_path):
    model, tokenizer = grown(lm(0) if base == "from a config" else named_base(tmp_path), tok())
    trainer = build(tmp_path, [model, llama(1)], [tokenizer, tok()], peft_config=[peft_config, None])
    trainer.train()
    directory = export(trainer, tmp_path / "export")
    model, tokenizer = reloaded(directory / "agent_0")
    assert model.get_input_embeddings().num_embeddings >= len(tokenizer) == 34
    ids = tokenizer("w1 <a> w2 <b>")["input_ids"]
    assert ids[1] == 32 and ids[3] == 33
    torch.testing.assert_close(logits(model, [ids]), logits(trainer.agents[0], [ids]), rtol=1e-4, atol=1e-4)
    again = build(tmp_path, [str(directory / "agent_0"), str(directory / "agent_1")])
    torch.testing.assert_close(logits(again.agents[0], [ids]), logits(trainer.agents[0], [ids]), rtol=1e-4, atol=1e-4)


def test_a_base_that_was_changed_after_loading_is_not_replaced_by_the_one_on_disk(tmp_path):
    """An adapter says only the name of its base, so the export must not rely on it where the weights differ."""
    model = named_base(tmp_path)
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
    trainer = build(tmp_path, [model, llama(1)], tok(), peft_config=[LORA, None])
    trainer.train()
    directory = export(trainer, tmp_path / "export")
    model, _ = reloaded(directory / "agent_0")
    torch.testing.assert_close(logits(model), logits(trainer.agents[0]), rtol=1e-4, atol=1e-4)


# What would fail at the end is found at the beginning


@pytest.mark.parametrize("entity", ["agent_1", "critic"])
def test_a_generation_config_that_cannot_be_saved_is_found_at_construction(entity, tmp_path):
    models = {"agent_1": llama(1), "critic": gpt2(2)}
    models[entity].generation_config.do_sample = False
    models[entity].generation_config.temperature = 0.5
    with pytest.raises(ValueError, match=f"(?s){entity}.*temperature"):
        build(tmp_path, [lm(0), models["agent_1"]], tok(), models["critic"])


class Letters:
    """A pre-tokenizer in Python, which no file can hold."""

    def pre_tokenize(self, pretok: PreTokenizedString):
        pretok.split(self.split)

    def split(self, index: int, text: NormalizedString):
        return text.split(" ", "removed")


def test_a_tokenizer_that_cannot_be_saved_is_found_at_construction(tmp_path):
    custom = tok()
    custom.backend_tokenizer.pre_tokenizer = PreTokenizer.custom(Letters())
    with pytest.raises(ValueError, match="agent_1"):
        build(tmp_path, [lm(0), llama(1)], [tok(), custom])


def test_weights_that_cannot_be_saved_are_found_at_construction(tmp_path):
    model = llama(1)
    model.hf_quantizer = SimpleNamespace(
        quantization_config=SimpleNamespace(quant_method="packed"),
        is_serializable=lambda: False,
        is_trainable=True,
        is_qat_trainable=False,
    )
    with pytest.raises(ValueError, match="agent_1.*cannot be saved"):
        build(tmp_path, [lm(0), model], tok())


# The best model


class Snapshots(TrainerCallback):
    """The weights of every entity after each step."""

    def __init__(self):
        self.hashes = {}

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.hashes[state.global_step] = {name: weights_hash(module) for name, module in model.entities()}


@pytest.mark.parametrize("peft_config", [None, LORA], ids=["full", "LoRA"])
def test_the_best_model_is_restored_for_every_entity(peft_config, tmp_path):
    scores, snapshots = {1: 3.6, 2: 3.8, 3: 3.3}, Snapshots()

    def reward(*completions):
        if trainer.model.training:
            return word_reward(*completions)
        return [scores[trainer.state.global_step]] * len(completions[0])

    trainer = build(
        tmp_path,
        [lm(0), lm(1)],
        tok(),
        gpt2(2),
        reward=reward,
        eval_dataset=Dataset.from_dict({"prompt": ["w1 w2"]}),
        peft_config=peft_config,
        callbacks=[snapshots],
        max_steps=3,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_reward",
        greater_is_better=True,
    )
    trainer.train()
    assert trainer.state.best_metric == pytest.approx(3.8)
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*")) == ["checkpoint-2"]
    assert snapshots.hashes[2] != snapshots.hashes[3]
    assert {name: weights_hash(module) for name, module in trainer.model.entities()} == snapshots.hashes[2]
    directory = export(trainer, tmp_path / "export")
    assert (directory / "critic" / "value_head.pt").is_file()
