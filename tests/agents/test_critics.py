# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""What may be given as critics, and what is refused at construction with the reason."""

import copy
import math

import pytest
import torch
from peft import LoraConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from tiny import dataset, gpt2, llama, lm, logged, parameters, team_args, tok, word_reward
from transformers import (
    AutoModelForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
    Qwen2ForSequenceClassification,
)

from trl_multiagent import IACConfig, IACTrainer, MAACConfig, MAACTrainer, ValueHead
from trl_multiagent.models.value_head import save_value_head


KINDS = ["MAAC", "IAC separate", "IAC shared"]
WITH_CRITICS = KINDS[:2]
PROMPT_TUNING = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
PREFIX_TUNING = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)


def lora():
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


@pytest.fixture
def build(tmp_path):
    """A team of two actors; arguments of the trainer in `kwargs`, options of the config by name."""

    def build(kind, kwargs=None, **options):
        kwargs = {
            "agents": [lm(0), lm(1)],
            "tokenizer": tok(),
            "reward_func": word_reward,
            "train_dataset": dataset(4),
            **(kwargs or {}),
        }
        if kind == "IAC shared":
            options["use_separate_critic"] = False
        elif not {"critic_model", "critics"} & set(kwargs):
            kwargs["critic_model"] = lm(5)
        config_class, trainer_class = (MAACConfig, MAACTrainer) if kind == "MAAC" else (IACConfig, IACTrainer)
        options = {"critic_learning_rate": 1e-2, "influence_steps": 0, **options}
        return trainer_class(args=team_args(config_class, tmp_path / "out", **options), **kwargs)

    return build


def sources(kind, *given):
    """One source for each critic, the last one again where there are too few; for heads on actors they are actors."""
    if kind == "MAAC":
        return {"critics": [given[0]]}
    return {"agents" if kind == "IAC shared" else "critics": [given[0], given[-1]]}


def backbones(trainer):
    return [critic.backbone for critic in trainer.critics] or list(trainer.agents)


def heads(trainer):
    return [module.value_head for module in trainer.critics or trainer.agents]


def entities(trainer):
    return {name: parameters(module) for name, module in trainer.model.entities()}


def assert_all_learn(trainer):
    before = entities(trainer)
    trainer.train()
    for name, after in entities(trainer).items():
        assert torch.isfinite(after).all() and not torch.equal(after, before[name]), name


def assert_one_optimizer_entry_each(trainer):
    """Every parameter that learns is in one group of the optimizer, once, and no other is."""
    trainer.create_optimizer()
    listed = [id(p) for group in trainer.optimizer.param_groups for p in group["params"]]
    assert sorted(listed) == sorted(id(p) for p in trainer.model.parameters() if p.requires_grad)


def saved(directory, model, tokenizer=None, head=None):
    """The name of a directory with a model and what belongs to it."""
    model.save_pretrained(directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
    if head is not None:
        save_value_head(head, directory)
    return str(directory)


def drawn_head(seed, *args):
    torch.manual_seed(seed)
    head = ValueHead(*args)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_()
    return head


class TestNumber:
    """E5, E6."""

    def test_without_any_it_is_an_error_that_names_both_ways_and_the_shared_one(self, build):
        with pytest.raises(ValueError, match=r"critic_model.*critics.*use_separate_critic=False"):
            build("IAC separate", {"critics": None})

    @pytest.mark.parametrize("count", [0, 1, 3])
    def test_another_number_than_that_of_actors_is_an_error_with_both(self, build, count):
        with pytest.raises(ValueError, match=f"`critics` has {count} entries, expected 2.*critic_model"):
            build("IAC separate", {"critics": [lm(5 + i) for i in range(count)]})

    @pytest.mark.parametrize("kind", WITH_CRITICS)
    def test_one_that_is_no_list_is_an_error(self, build, kind):
        with pytest.raises(ValueError, match="`critics` must be a list"):
            build(kind, {"critics": lm(5)})

    @pytest.mark.parametrize("kind", WITH_CRITICS)
    @pytest.mark.parametrize("word", ["critic_model", "critics"])
    def test_what_is_neither_a_name_nor_a_model_is_an_error_with_its_type(self, build, kind, word):
        with pytest.raises(TypeError, match=rf"{word}.*got int"):
            build(kind, {word: 5 if word == "critic_model" else [5, 6][: 1 if kind == "MAAC" else 2]})

    def test_critic_model_and_critics_may_name_the_same(self, build, tmp_path):
        directory = saved(tmp_path / "critic", lm(5))
        trainer = build("IAC separate", {"critic_model": directory, "critics": [directory, directory]})
        assert_one_optimizer_entry_each(trainer)

    @pytest.mark.parametrize("others", [("two", "two"), ("one", "two")])
    def test_critic_model_and_critics_that_disagree_are_an_error_that_names_both(self, build, tmp_path, others):
        one, two = (saved(tmp_path / name, lm(5)) for name in ("one", "two"))
        with pytest.raises(ValueError, match=r"`critic_model` is .*one'.*`critics` names .*two'.*pass one of them"):
            build("IAC separate", {"critic_model": one, "critics": [str(tmp_path / name) for name in others]})

    @pytest.mark.parametrize(
        "given",
        [
            {"critic_model": "c"},
            {"critics": ["c", "c"]},
            {"critic_peft_config": lora()},
            {"critic_model": "c", "critics": ["c", "c"]},
        ],
        ids=lambda given: " and ".join(given),
    )
    def test_for_heads_on_actors_any_is_an_error_that_names_it(self, build, tmp_path, given):
        with pytest.raises(ValueError, match=f"use_separate_critic=False.*{' and '.join(given)} was given"):
            build("IAC shared", given)

    def test_a_tokenizer_for_critics_that_read_ids_is_an_error(self, build):
        with pytest.raises(TypeError, match=r"critic_tokenizer.*MAACTrainer"):
            build("IAC separate", {"critic_tokenizer": tok()})

    @pytest.mark.parametrize("separate", [True, False])
    def test_an_actor_that_is_frozen_has_none_that_learns(self, build, separate):
        trainer = build("IAC separate" if separate else "IAC shared", trainable_agents=[True, False], max_steps=2)
        assert [hasattr(agent, "value_head") for agent in trainer.agents] == [not separate, False]
        before = entities(trainer)
        trainer.train()
        moved = {name for name, after in entities(trainer).items() if not torch.equal(after, before[name])}
        assert moved == ({"agent_0", "critic_0"} if separate else {"agent_0"})


class TestIndependence:
    @pytest.mark.parametrize("where", ["object", "directory"])
    def test_copies_of_critic_model_start_equal_share_nothing_and_learn_apart(self, build, tmp_path, where):
        source = lm(5) if where == "object" else saved(tmp_path / "critic", lm(5))
        trainer = build("IAC separate", {"critic_model": source}, critic_type="q", max_steps=2)
        first, second = trainer.critics
        assert torch.equal(parameters(first.backbone), parameters(lm(5)))
        assert torch.equal(parameters(first), parameters(second))
        assert where == "directory" or first.backbone is source
        storages = [{p.data_ptr() for p in critic.parameters()} for critic in trainer.critics]
        assert not storages[0] & storages[1]
        assert_one_optimizer_entry_each(trainer)
        assert_all_learn(trainer)
        assert not torch.equal(parameters(first), parameters(second))

    @pytest.mark.parametrize(
        ("critics", "names"),
        [
            (lambda a, b: [a, lm(5)], "agent_0 and critic_0"),
            (lambda a, b: [lm(5), a], "agent_0 and critic_1"),
            (lambda a, b: [lm(5)] * 2, "critic_0 and critic_1"),
            (lambda a, b: a, "agent_0 and critic_0"),
            (lambda a, b: [copy.deepcopy(a), with_layer_of(b)], "agent_1 and critic_1"),
        ],
        ids=["an actor's", "another actor's", "twice", "an actor as critic_model", "one layer of an actor"],
    )
    @pytest.mark.parametrize("peft_config", [None, lora()], ids=["full", "LoRA"])
    def test_a_weight_of_two_members_is_an_error_that_names_both(self, build, critics, names, peft_config):
        actors = [lm(0), lm(1)]
        given = critics(*actors)
        word = "critics" if isinstance(given, list) else "critic_model"
        with pytest.raises(ValueError, match=f"{names} share weights.*critic_model"):
            build("IAC separate", {"agents": actors, word: given, "peft_config": peft_config})

    def test_a_copy_of_an_actor_is_fine(self, build):
        actor = lm(0)
        trainer = build("IAC separate", {"agents": [actor, lm(1)], "critic_model": copy.deepcopy(actor)})
        assert_one_optimizer_entry_each(trainer)

    def test_actor_and_critic_of_one_directory_are_fine(self, build, tmp_path):
        directory = saved(tmp_path / "model", lm(0), tok())
        trainer = build("IAC separate", {"agents": [directory] * 2, "tokenizer": None, "critic_model": directory})
        assert_one_optimizer_entry_each(trainer)

    def test_the_first_weights_of_a_head_do_not_depend_on_the_team_around_it(self, build):
        """Nor on the random numbers that were drawn before it was built."""
        states = []
        for kind, hidden in (("MAAC", 16), ("IAC separate", 16), ("IAC shared", 16), ("IAC separate", 24)):
            torch.manual_seed(hidden)
            states += [parameters(head) for head in heads(build(kind, {"agents": [lm(0, hidden=16), lm(1)]}))]
        assert len(states) == 7 and all(torch.equal(state, states[0]) for state in states)


def with_layer_of(other):
    model = lm(9)
    model.model.layers[0].mlp = other.model.layers[0].mlp
    return model


class TestVocabulary:
    """An independent critic reads its actor's token ids."""

    def test_one_that_embeds_fewer_tokens_is_an_error_with_both_numbers(self, build):
        critics = {"critics": [lm(5), lm(6, vocab=24)]}
        with pytest.raises(ValueError, match=r"critic_1 .*of coder.* has 32 tokens.*embeds only 24.*MAACTrainer"):
            build("IAC separate", critics, agent_names=["planner", "coder"])

    def test_one_with_other_words_for_the_ids_is_an_error_with_an_example(self, build, tmp_path):
        """29 words in the opposite order, of which the middle one stays where it is."""
        directory = saved(tmp_path / "critic", lm(6), tok(reverse=True))
        with pytest.raises(
            ValueError, match=r"critic_1 .*of agent_1.* 28 of them.*3 is 'w0' for the actor and 'w28' for the critic"
        ):
            build("IAC separate", {"critics": [lm(5), directory]})

    @pytest.mark.parametrize("swapped", [False, True])
    def test_each_is_compared_with_its_own_actor(self, build, tmp_path, swapped):
        critics = [saved(tmp_path / str(flag), lm(5), tok(reverse=flag)) for flag in (False, True)]
        kwargs = {"tokenizer": [tok(), tok(reverse=True)], "critics": critics[::-1] if swapped else critics}
        if swapped:
            with pytest.raises(ValueError, match="critic_0 reads the token ids of agent_0"):
                build("IAC separate", kwargs)
        else:
            assert_all_learn(build("IAC separate", kwargs))

    @pytest.mark.parametrize("tokenizer", [None, tok(48)], ids=["no tokenizer", "more words"])
    def test_one_that_knows_more_tokens_is_fine(self, build, tmp_path, tokenizer):
        directory = saved(tmp_path / "critic", lm(5, vocab=48), tokenizer)
        assert_all_learn(build("IAC separate", {"critic_model": directory}))


class TestKindsOfModels:
    @pytest.mark.parametrize("level", ["turn", "token"])
    @pytest.mark.parametrize(
        "make",
        [lambda seed: lm(seed, hidden=4), lambda seed: llama(seed, hidden=64), lambda seed: gpt2(seed, hidden=8)],
        ids=["smaller", "larger", "of another architecture"],
    )
    def test_one_of_another_size_than_its_actor_learns(self, build, make, level):
        trainer = build("IAC separate", {"critics": [make(5), lm(6)]}, advantage_level=level, max_steps=2)
        widths = [head.net[0].in_features for head in heads(trainer)]
        assert widths == [make(5).config.hidden_size, 16]
        assert_all_learn(trainer)

    @pytest.mark.parametrize("kind", WITH_CRITICS)
    @pytest.mark.parametrize("where", ["object", "directory"])
    @pytest.mark.parametrize("class_", [Qwen2ForSequenceClassification, LlamaForSequenceClassification])
    def test_a_classifier_is_an_error_that_names_its_class(self, build, tmp_path, kind, where, class_):
        causal = {Qwen2ForSequenceClassification: lm, LlamaForSequenceClassification: llama}[class_](5)
        model = class_(causal.config)
        source = model if where == "object" else saved(tmp_path / "critic", model)
        with pytest.raises(ValueError, match=rf"critic.* {class_.__name__}.*causal language model"):
            build(kind, sources(kind, lm(6), source) if kind != "MAAC" else sources(kind, source))

    @pytest.mark.parametrize(("level", "critic_type"), [("turn", "q"), ("token", "v")])
    @pytest.mark.parametrize("positions", [6, 7])
    def test_positions_must_hold_a_completion_and_a_token_of_the_prompt(self, build, positions, level, critic_type):
        critics = [lm(5), lm(6)]
        critics[1].config.max_position_embeddings = positions
        options = {"max_completion_length": 6, "advantage_level": level, "critic_type": critic_type}
        if positions == 6:
            with pytest.raises(ValueError, match="critic_1 reads at most 6 tokens, but completions have up to 6"):
                build("IAC separate", {"critics": critics}, **options)
        else:
            assert_all_learn(build("IAC separate", {"critics": critics}, **options))

    def test_where_the_prompt_alone_is_valued_completions_may_be_longer(self, build):
        critic = lm(5)
        critic.config.max_position_embeddings = 1
        assert_all_learn(build("IAC separate", {"critic_model": critic}))

    @pytest.mark.parametrize("separate", [True, False])
    @pytest.mark.parametrize("options", [{"advantage_level": "token"}, {"critic_type": "q"}, {}], ids=str)
    @pytest.mark.parametrize("hidden_dim", [None, 8])
    def test_in_bf16_they_have_heads_in_float32(self, build, separate, options, hidden_dim):
        """B44"""
        width = "critic_value_head_hidden_dim" if separate else "value_head_hidden_dim"
        kwargs = {"agents": [lm(0).bfloat16(), lm(1)]}
        kwargs |= {"critics": [lm(5), lm(6).bfloat16()]} if separate else {}
        kind = "IAC separate" if separate else "IAC shared"
        trainer = build(kind, kwargs, **options, **{width: hidden_dim}, learning_rate=5e-2, critic_learning_rate=5e-2)
        assert_all_learn(trainer)
        assert [backbone.dtype for backbone in backbones(trainer)] == (
            [torch.float32, torch.bfloat16] if separate else [torch.bfloat16, torch.float32]
        )
        assert {p.dtype for head in heads(trainer) for p in head.parameters()} == {torch.float32}
        for name in ("agent_0", "agent_1"):
            (value,) = logged(trainer, f"{name}/critic/value_mean")
            assert type(value) is float and math.isfinite(value)
        for entry in trainer.state.log_history:
            assert all(type(value) in (int, float) for value in entry.values()), entry


class TestQuantization:
    """Nothing here quantizes: the loading of models is watched for what it was asked for."""

    @pytest.fixture
    def asked(self, monkeypatch):
        """Directory and `quantization_config` of each model that is loaded."""
        asked, from_pretrained = [], PreTrainedModel.from_pretrained.__func__

        def watched(cls, path, *args, quantization_config=None, **kwargs):
            asked.append((str(path), quantization_config))
            return from_pretrained(cls, path, *args, **kwargs)

        monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(watched))
        return asked

    @pytest.mark.parametrize("kind", WITH_CRITICS)
    @pytest.mark.parametrize("where", ["trainer", "config"])
    @pytest.mark.parametrize("adapter", [False, True], ids=["model", "adapter"])
    def test_that_of_the_actors_is_not_that_of_the_critics(self, build, asked, tmp_path, kind, where, adapter):
        actor, base = (saved(tmp_path / name, lm(seed), tok()) for name, seed in (("actor", 0), ("base", 5)))
        critic = base
        if adapter:
            critic = saved(tmp_path / "critic", get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora()))
        asked.clear()
        wanted, kwargs, options = object(), {}, {}
        if where == "trainer":
            kwargs["quantization_config"] = wanted
        else:
            options["model_init_kwargs"] = {"quantization_config": wanted}
        kwargs |= {"agents": [actor] * 2, "tokenizer": None, "critic_model": critic}
        build(kind, kwargs, **options)
        assert asked == [(actor, wanted)] * 2 + [(base, None)] * (1 if kind == "MAAC" else 2)


class TestAdapters:
    @pytest.mark.parametrize("kind", WITH_CRITICS)
    def test_one_config_serves_all_critics_and_stays_as_it_is(self, build, tmp_path, kind):
        config = lora()
        directory = saved(tmp_path / "critic", lm(5))
        trainer = build(kind, {"critic_model": directory, "critic_peft_config": config}, max_steps=2)
        assert all(isinstance(backbone, PeftModel) for backbone in backbones(trainer))
        assert config.base_model_name_or_path is None
        assert_one_optimizer_entry_each(trainer)
        self.assert_adapters_and_heads_move(trainer, [critic.named_parameters for critic in trainer.critics])

    def test_a_list_is_in_the_order_of_actors_and_may_hold_none(self, build):
        trainer = build("IAC separate", {"critics": [lm(5), lm(6)], "critic_peft_config": [None, lora()]}, max_steps=2)
        assert [isinstance(backbone, PeftModel) for backbone in backbones(trainer)] == [False, True]
        assert_all_learn(trainer)

    @pytest.mark.parametrize("count", [0, 1, 3])
    def test_a_list_of_another_length_is_an_error_with_both_numbers(self, build, count):
        with pytest.raises(ValueError, match=f"`critic_peft_config` has {count} entries, expected 2"):
            build("IAC separate", {"critic_peft_config": [lora()] * count})

    @pytest.mark.parametrize(("kind", "given"), [("MAAC", [lora()]), ("MAAC", "lora"), ("IAC separate", "lora")])
    def test_what_is_no_config_is_an_error_with_its_type(self, build, kind, given):
        with pytest.raises(TypeError, match=f"critic.*critic_peft_config.*{type(given).__name__}"):
            build(kind, {"critic_peft_config": given})

    @pytest.mark.parametrize("kind", WITH_CRITICS)
    def test_an_adapter_on_an_adapter_is_an_error(self, build, kind):
        kwargs = sources(kind, get_peft_model(lm(5), lora()), get_peft_model(lm(6), lora()))
        with pytest.raises(ValueError, match="critic.* has an adapter already.*critic_peft_config"):
            build(kind, {**kwargs, "critic_peft_config": lora()})

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("config", [PROMPT_TUNING, PREFIX_TUNING], ids=lambda config: type(config).__name__)
    @pytest.mark.parametrize("given", ["config", "object", "directory"])
    def test_virtual_tokens_are_an_error_that_names_their_config(self, build, tmp_path, kind, config, given):
        config = copy.deepcopy(config)
        if given == "config":
            kwargs = {"peft_config" if kind == "IAC shared" else "critic_peft_config": config}
        else:
            saved(tmp_path / "base", lm(5))
            model = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), config)
            kwargs = sources(kind, model if given == "object" else saved(tmp_path / "adapter", model), lm(6))
        message = f"{type(config).__name__}, whose virtual tokens.*LoRA"
        if given == "directory":
            message = "prompt learning adapter"  # PEFT does not train one that was saved
        with pytest.raises(ValueError, match=message):
            build(kind, kwargs)

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_directory_with_adapter_and_head_is_restored_and_trained_on(self, build, tmp_path, kind):
        saved(tmp_path / "base", lm(5))
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), lora())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.normal_()
        head = drawn_head(0, 16)
        directory = saved(tmp_path / "critic", model, head=head)
        trainer = build(kind, sources(kind, directory), max_steps=2)
        ids = torch.tensor([[5, 9, 4, 7]])
        with torch.no_grad():
            states = model(ids, output_hidden_states=True).hidden_states[-1][0, -1]
            expected = states @ head.net[0].weight[0] + head.net[0].bias[0]
            for backbone, own in zip(backbones(trainer), heads(trainer), strict=True):
                value = own(backbone(ids, output_hidden_states=True).hidden_states[-1][0, -1])
                assert value.item() == pytest.approx(expected.item(), abs=1e-5)
        assert_one_optimizer_entry_each(trainer)
        owners = trainer.critics or trainer.agents
        self.assert_adapters_and_heads_move(trainer, [owner.named_parameters for owner in owners])

    @staticmethod
    def assert_adapters_and_heads_move(trainer, named_parameters):
        before = [{name: p.detach().clone() for name, p in named()} for named in named_parameters]
        trainer.train()
        for named, old in zip(named_parameters, before, strict=True):
            moved = {name for name, p in named() if not torch.equal(p, old[name])}
            assert moved == {name for name in old if "lora_" in name or name.startswith("value_head.")}
            assert len(moved) == 6  # two matrices of two projections, and a linear head


# A head on disk: hidden width and critic type of the one that is saved, those that are asked for, what is said
MISFITS = {
    "wider": ((16, 8, "v"), (None, "v"), r"\(8, 16\).*asks for.*\(1, 16\)"),
    "linear": ((16, None, "v"), (8, "v"), r"\(1, 16\).*asks for.*\(8, 16\)"),
    "of another width": ((16, 8, "v"), (4, "v"), r"\(8, 16\).*asks for.*\(4, 16\)"),
    "of another backbone": ((24, None, "v"), (None, "v"), r"\(1, 24\).*asks for.*\(1, 16\)"),
    "of a Q": ((16, None, "q"), (None, "v"), "critic_type='q'.*critic_type='v'"),
    "of a V": ((16, None, "v"), (None, "q"), "critic_type='v'.*critic_type='q'"),
}


class TestHeadsOnDisk:
    """S3"""

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("misfit", MISFITS)
    def test_one_that_does_not_fit_is_an_error_with_what_it_is_and_what_is_asked_for(
        self, build, tmp_path, kind, misfit
    ):
        on_disk, (hidden_dim, critic_type), message = MISFITS[misfit]
        directory = saved(tmp_path / "critic", lm(5), head=drawn_head(0, *on_disk))
        width = "value_head_hidden_dim" if kind == "IAC shared" else "critic_value_head_hidden_dim"
        with pytest.raises(ValueError, match=message) as caught:
            build(kind, sources(kind, directory), **{width: hidden_dim}, critic_type=critic_type)
        assert directory in str(caught.value)
        assert (width in str(caught.value)) == ("asks for" in message)

    @pytest.mark.parametrize("kind", KINDS)
    def test_one_that_is_gone_is_an_error_that_names_the_file(self, build, tmp_path, kind):
        directory = saved(tmp_path / "critic", lm(5), head=drawn_head(0, 16))
        (tmp_path / "critic" / "value_head.pt").unlink()
        with pytest.raises(FileNotFoundError, match="critic/value_head.pt is missing"):
            build(kind, sources(kind, directory))

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("given", ["directory", "object"])
    def test_one_that_fits_is_restored_and_the_log_says_whose(self, build, tmp_path, caplog, kind, given):
        saved_heads = [drawn_head(seed, 16, 8) for seed in (0, 1)]
        given_sources = [
            saved(tmp_path / str(index), lm(5 + index), head=head) for index, head in enumerate(saved_heads)
        ]
        if given == "object":
            given_sources = [AutoModelForCausalLM.from_pretrained(path) for path in given_sources]
        width = "value_head_hidden_dim" if kind == "IAC shared" else "critic_value_head_hidden_dim"
        with caplog.at_level("INFO", logger="trl_multiagent"):
            trainer = build(kind, sources(kind, *given_sources), **{width: 8})
        names = {"MAAC": ["critic"], "IAC separate": ["critic_0", "critic_1"], "IAC shared": ["agent_0", "agent_1"]}
        for index, (name, head) in enumerate(zip(names[kind], heads(trainer), strict=True)):
            assert torch.equal(parameters(head), parameters(saved_heads[index]))
            path = tmp_path / str(index) / "value_head.pt"
            assert f"{name}: restored the value head from {path}." in [r.message for r in caplog.records]

    def test_every_copy_of_critic_model_gets_the_same_one(self, build, tmp_path):
        directory = saved(tmp_path / "critic", lm(5), head=drawn_head(0, 16, None, "q"))
        trainer = build("IAC separate", {"critic_model": directory}, critic_type="q", max_steps=2)
        assert all(torch.equal(parameters(head), parameters(drawn_head(0, 16))) for head in heads(trainer))
        assert_all_learn(trainer)
        assert not torch.equal(*(parameters(head) for head in heads(trainer)))
