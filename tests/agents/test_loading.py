# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""What a user may pass for a team, and what is refused before training with the reason."""

import copy
import math
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from tiny import (
    dataset,
    gpt2,
    llama,
    lm,
    logged,
    parameters,
    record_batches,
    stub_rollouts,
    team_args,
    tok,
    weights_hash,
    word_reward,
)
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from trl_multiagent import MAACConfig, MAACTrainer, MAGRPOConfig, MAGRPOTrainer


CHAT = (
    "{{ '<bos> ' }}{% if messages[0]['role'] != 'system' %}{{ 'w20 w21 ' }}{% endif %}"
    "{% for message in messages %}{% if message['role'] == 'system' %}{{ 'w20 ' + message['content'] + ' ' }}"
    "{% else %}{{ 'w22 ' + message['content'] + ' ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'w23 ' }}{% endif %}"
)
"""Writes `<bos>`, a system block that begins with w20 (a default one if none is given), and w22 for the user."""


@pytest.fixture
def build(tmp_path):
    def build(config=None, **kwargs):
        kwargs = {"reward_func": word_reward, "train_dataset": dataset(4), **kwargs}
        return MAGRPOTrainer(args=team_args(MAGRPOConfig, tmp_path / "out", **(config or {})), **kwargs)

    return build


@pytest.fixture
def build_maac(tmp_path):
    def build(config=None, **kwargs):
        kwargs = {"reward_func": word_reward, "train_dataset": dataset(4), **kwargs}
        if not {"agents", "agent_model"} & set(kwargs):
            kwargs |= {"agents": [lm(0), lm(1)], "tokenizer": kwargs.get("tokenizer", tok())}
        return MAACTrainer(args=team_args(MAACConfig, tmp_path / "out", **(config or {})), **kwargs)

    return build


def saved(directory, model, tokenizer=None):
    """Save a model, and a tokenizer beside it, and give the directory's name."""
    model.save_pretrained(directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
    return str(directory)


def logits(model, ids=((3, 4, 5, 6),)):
    model.eval()
    with torch.no_grad():
        return model(torch.tensor(ids)).logits


class TestHomogeneous:
    """E1: one source, N independent actors with equal start weights."""

    @pytest.mark.parametrize("where", ["constructor", "config", "both"])
    def test_num_agents_may_stand_in_the_constructor_or_the_config(self, build, where):
        trainer = build(
            {} if where == "constructor" else {"num_agents": 3},
            agent_model=lm(0),
            tokenizer=tok(),
            **({} if where == "config" else {"num_agents": 3}),
        )
        assert len(trainer.agents) == 3

    def test_two_different_numbers_are_an_error_with_both(self, build):
        with pytest.raises(ValueError, match="num_agents.* 3 .* 2 "):
            build({"num_agents": 2}, agent_model=lm(0), tokenizer=tok(), num_agents=3)

    def test_without_a_number_it_is_an_error(self, build):
        with pytest.raises(ValueError, match="num_agents"):
            build(agent_model=lm(0), tokenizer=tok())

    @pytest.mark.parametrize("number", [0, -1])
    def test_fewer_than_one_is_an_error(self, build, number):
        with pytest.raises(ValueError, match="num_agents"):
            build(agent_model=lm(0), tokenizer=tok(), num_agents=number)

    @pytest.mark.parametrize("as_directory", [True, False])
    def test_copies_start_equal_share_nothing_and_learn_apart(self, build, tmp_path, as_directory):
        source = lm(3)
        if as_directory:
            source = saved(tmp_path / "model", source, tok())
        trainer = build(
            agent_model=source,
            num_agents=2,
            tokenizer=None if as_directory else tok(),
            reward_func=lambda a, b: [[0.0, 1.0], [1.0, 0.0]],
        )
        first, second = trainer.agents
        assert torch.equal(parameters(first), parameters(second)) and torch.equal(parameters(first), parameters(lm(3)))
        assert not {p.data_ptr() for p in first.parameters()} & {p.data_ptr() for p in second.parameters()}
        trainer.train()
        assert not torch.equal(parameters(first), parameters(second))

    def test_one_actor_is_a_team_too(self, build):
        trainer = build(agent_model=lm(0), tokenizer=tok(), num_agents=1)
        trainer.train()
        assert math.isfinite(logged(trainer, "loss")[0])


class TestHeterogeneous:
    """E2, B43: a list with one source for each actor."""

    def test_directories_and_objects_may_be_mixed(self, build, tmp_path):
        directory = saved(tmp_path / "model", lm(0, hidden=32), tok())
        other = llama(1)
        trainer = build(agents=[directory, other], tokenizer=[None, tok(reverse=True)])
        assert trainer.agents[1] is other
        assert torch.equal(parameters(trainer.agents[0]), parameters(lm(0, hidden=32)))
        assert trainer.tokenizers[0].get_vocab() == tok().get_vocab()
        assert trainer.tokenizers[1].get_vocab() == tok(reverse=True).get_vocab()
        trainer.train()

    def test_actors_keep_their_own_architecture_and_config(self, build):
        trainer = build(agents=[lm(0), lm(1, hidden=32), gpt2(2)], tokenizer=tok())
        assert [actor.config.model_type for actor in trainer.agents] == ["qwen2", "qwen2", "gpt2"]
        assert [actor.config.hidden_size for actor in trainer.agents] == [16, 32, 16]

    def test_swapped_lists_give_swapped_actors(self, build):
        straight = build(agents=[lm(0), llama(1)], tokenizer=[tok(), tok(reverse=True)])
        swapped = build(agents=[llama(1), lm(0)], tokenizer=[tok(reverse=True), tok()])
        for one, two in ((0, 1), (1, 0)):
            assert torch.equal(parameters(straight.agents[one]), parameters(swapped.agents[two]))
            assert straight.tokenizers[one].get_vocab() == swapped.tokenizers[two].get_vocab()

    def test_a_list_of_another_length_than_num_agents_is_an_error(self, build):
        with pytest.raises(ValueError, match="agents.* 2 .*expected 3"):
            build(agents=[lm(0), lm(1)], tokenizer=tok(), num_agents=3)

    def test_an_empty_list_is_an_error(self, build):
        with pytest.raises(ValueError, match="agents"):
            build(agents=[], tokenizer=tok())

    @pytest.mark.parametrize("agents", ["a/model", 3, {"a": 1}])
    def test_what_is_no_list_is_an_error(self, build, agents):
        with pytest.raises(ValueError, match="list of models"):
            build(agents=agents, tokenizer=tok())

    def test_paths_may_be_path_objects(self, build, tmp_path):
        directory = Path(saved(tmp_path / "model", lm(0), tok()))
        assert len(build(agents=[directory, directory]).agents) == 2
        assert len(build(agent_model=directory, num_agents=2).agents) == 2

    @pytest.mark.parametrize("given", [{"agent_model": [lm(0)]}, {"agents": [lm(0), {"a": 1}]}])
    def test_what_is_no_model_is_an_error(self, build, given):
        with pytest.raises(TypeError, match=r"agent(_model|s\[1\])` must be a hub id.* got (list|dict)\."):
            build(tokenizer=tok(), **given)

    @pytest.mark.parametrize("path", ["./nowhere", "/nowhere/model", "outputs/nowhere/agent_0"])
    def test_a_path_that_leads_nowhere_is_an_error(self, build, path):
        with pytest.raises(ValueError, match=f"agents\\[0\\]`: there is no directory '{path}'"):
            build(agents=[path])

    def test_the_export_of_a_team_is_no_model(self, build, build_maac, tmp_path):
        export = str(tmp_path / "team")
        build_maac(agents=[lm(0), lm(1)], tokenizer=tok(), critic_model=lm(2)).save_model(export)
        with pytest.raises(ValueError, match="is the export of a team.*team/agent_0, .*team/agent_1, .*team/critic"):
            build(agents=[export])

    def test_without_any_model_it_is_an_error(self, build):
        with pytest.raises(ValueError, match="agent_model"):
            build(tokenizer=tok())

    def test_agent_model_and_agents_may_name_the_same(self, build, tmp_path):
        directory = saved(tmp_path / "model", lm(0), tok())
        trainer = build(agent_model=directory, agents=[directory, directory])
        assert len(trainer.agents) == 2

    def test_agent_model_and_agents_that_name_different_ones_are_an_error(self, build, tmp_path):
        one, two = (saved(tmp_path / name, lm(0), tok()) for name in ("one", "two"))
        with pytest.raises(ValueError, match="one.*two"):
            build(agent_model=one, agents=[one, two])

    def test_agent_model_and_agents_with_the_wrong_length_are_an_error(self, build, tmp_path):
        directory = saved(tmp_path / "model", lm(0), tok())
        with pytest.raises(ValueError, match="expected 3"):
            build(agent_model=directory, agents=[directory] * 2, num_agents=3)

    def test_an_agent_model_that_is_not_among_the_agents_is_an_error_where_none_has_a_name(self, build):
        with pytest.raises(ValueError, match="agent_model"):
            build(agent_model=lm(0), agents=[lm(1, hidden=32), gpt2(2)], tokenizer=tok())

    def test_one_object_twice_is_an_error_that_names_both(self, build):
        """One weight must not stand in the optimizer twice."""
        model = lm(0)
        with pytest.raises(ValueError, match="agent_0 and agent_2 share weights"):
            build(agents=[model, lm(1), model], tokenizer=tok())

    def test_two_objects_that_share_one_layer_are_an_error(self, build):
        one, two = lm(0), lm(1)
        two.set_input_embeddings(one.get_input_embeddings())
        with pytest.raises(ValueError, match="share weights"):
            build(agents=[one, two], tokenizer=tok())

    def test_a_critic_that_is_an_actor_is_an_error(self, build_maac):
        model = lm(0)
        with pytest.raises(ValueError, match="agent_0 and critic.* share weights"):
            build_maac(agents=[model, lm(1)], tokenizer=tok(), critic_model=model)


class TestTokenizers:
    """E3."""

    def test_they_load_by_themselves_for_directories(self, build, tmp_path):
        one = saved(tmp_path / "one", lm(0), tok())
        two = saved(tmp_path / "two", llama(1, vocab=64), tok(64, reverse=True))
        trainer = build(agents=[one, two])
        for tokenizer, expected in zip(trainer.tokenizers, [tok(), tok(64, reverse=True)], strict=True):
            assert tokenizer.get_vocab() == expected.get_vocab()
        assert all(tokenizer.padding_side == "left" for tokenizer in trainer.tokenizers)

    def test_a_loaded_model_without_one_is_an_error_that_names_the_agent(self, build, tmp_path):
        directory = saved(tmp_path / "model", lm(0), tok())
        with pytest.raises(ValueError, match="agent_1.*tokenizer"):
            build(agents=[directory, lm(1)])

    def test_one_serves_all_actors(self, build):
        trainer = build(agents=[lm(0), gpt2(1)], tokenizer=tok())
        assert [t.get_vocab() for t in trainer.tokenizers] == [tok().get_vocab()] * 2

    def test_a_list_is_in_actor_order(self, build):
        trainer = build(agents=[lm(0), lm(1, vocab=64)], tokenizer=[tok(), tok(64)])
        assert [len(t) for t in trainer.tokenizers] == [32, 64]

    @pytest.mark.parametrize("count", [1, 3])
    def test_a_list_of_the_wrong_length_is_an_error(self, build, count):
        with pytest.raises(ValueError, match=rf"tokenizer.* {count} entries, expected 2"):
            build(agents=[lm(0), lm(1)], tokenizer=[tok()] * count)

    def test_processing_class_is_another_word_for_it(self, build):
        shared = tok()
        assert len(build(agents=[lm(0), lm(1)], processing_class=shared).tokenizers) == 2
        assert len(build(agents=[lm(0), lm(1)], tokenizer=shared, processing_class=shared).tokenizers) == 2

    def test_two_different_ones_under_both_words_are_an_error(self, build):
        with pytest.raises(ValueError, match="tokenizer.*processing_class"):
            build(agents=[lm(0), lm(1)], tokenizer=tok(), processing_class=tok(reverse=True))

    def test_one_whose_ids_the_model_does_not_embed_is_an_error_that_names_the_agent(self, build):
        with pytest.raises(ValueError, match="agent_1.*64.*32"):
            build(agents=[lm(0, vocab=64), lm(1, vocab=32)], tokenizer=tok(64))

    def test_actors_of_different_vocabularies_train_together(self, build):
        trainer = build(agents=[lm(0, vocab=64), lm(1, vocab=40)], tokenizer=[tok(64), tok(32, reverse=True)])
        trainer.train()
        assert math.isfinite(logged(trainer, "loss")[0])

    def test_the_users_objects_stay_as_they_are(self, build_maac):
        """B14: an actor pads on the left with a pad token of its own, a critic on the right."""
        shared = tok(pad=None)
        shared.padding_side = "right"
        critics = tok(pad=None)
        critics.padding_side = "left"
        for critic_tokenizer in (None, shared, critics):
            trainer = build_maac(tokenizer=shared, critic_model=lm(5), critic_tokenizer=critic_tokenizer)
            trainer.train()
            assert shared.pad_token is None and shared.padding_side == "right"
            assert critics.pad_token is None and critics.padding_side == "left"
            assert trainer.critic_tokenizers[0].padding_side == "right"


class TestRewardWords:
    def test_reward_funcs_is_another_word_for_reward_func(self, build):
        assert build(agents=[lm(0)], tokenizer=tok(), reward_func=None, reward_funcs=word_reward).reward.names == [
            "word_reward"
        ]
        both = build(agents=[lm(0)], tokenizer=tok(), reward_func=word_reward, reward_funcs=word_reward)
        assert both.reward.names == ["word_reward"]

    def test_two_different_ones_under_both_words_are_an_error(self, build):
        with pytest.raises(ValueError, match="reward_func.*reward_funcs"):
            build(agents=[lm(0)], tokenizer=tok(), reward_func=word_reward, reward_funcs=lambda a: [0.0])

    def test_none_at_all_is_an_error(self, build):
        with pytest.raises(ValueError, match="reward"):
            build(agents=[lm(0)], tokenizer=tok(), reward_func=None)


class TestCritic:
    """E4 and, for MAAC, E7."""

    @pytest.mark.parametrize("word", ["critic_model", "critics"])
    def test_it_comes_as_critic_model_or_as_a_list_of_one(self, build_maac, word):
        critic = lm(5)
        trainer = build_maac(**{word: critic if word == "critic_model" else [critic]})
        assert len(trainer.critics) == 1 and trainer.critics[0].backbone is critic

    def test_it_may_be_a_directory(self, build_maac, tmp_path):
        directory = saved(tmp_path / "critic", lm(5), tok(reverse=True))
        trainer = build_maac(critic_model=directory)
        assert torch.equal(parameters(trainer.critics[0].backbone), parameters(lm(5)))
        assert trainer.critic_tokenizers[0].get_vocab() == tok(reverse=True).get_vocab()

    def test_without_one_it_is_an_error(self, build_maac):
        with pytest.raises(ValueError, match="critic_model"):
            build_maac()

    @pytest.mark.parametrize("count", [0, 2])
    def test_any_other_number_is_an_error(self, build_maac, count):
        with pytest.raises(ValueError, match=f"critics.* {count} entries, expected 1"):
            build_maac(critics=[lm(5 + i) for i in range(count)])

    def test_both_words_may_name_the_same(self, build_maac, tmp_path):
        directory = saved(tmp_path / "critic", lm(5), tok())
        assert len(build_maac(critic_model=directory, critics=[directory]).critics) == 1

    def test_both_words_with_different_models_are_an_error(self, build_maac, tmp_path):
        one, two = (saved(tmp_path / name, lm(5), tok()) for name in ("one", "two"))
        with pytest.raises(ValueError, match="one.*two"):
            build_maac(critic_model=one, critics=[two])

    def test_a_model_that_is_no_causal_language_model_is_an_error_that_names_its_class(self, build_maac):
        with pytest.raises(ValueError, match="critic.*Qwen2Model.*causal"):
            build_maac(critic_model=lm(5).model)

    def test_it_has_a_value_head(self, build_maac):
        trainer = build_maac(critic_model=lm(5, hidden=32))
        values = trainer.critics[0](torch.tensor([[3, 4, 5], [3, 1, 1]]), torch.tensor([[1, 1, 1], [1, 0, 0]]))
        assert values.shape == (2,) and values.dtype == torch.float32

    @pytest.mark.parametrize("critic_type", ["v", "q"])
    def test_both_types_train(self, build_maac, critic_type):
        trainer = build_maac({"critic_type": critic_type}, critic_model=lm(5))
        before = parameters(trainer.critics[0])
        trainer.train()
        assert math.isfinite(logged(trainer, "loss")[0])
        assert not torch.equal(parameters(trainer.critics[0]), before)

    @pytest.mark.parametrize("critic_type", ["V", "value", "", None])
    def test_another_type_is_an_error_that_names_both_types(self, tmp_path, critic_type):
        with pytest.raises(ValueError, match=f"critic_type={critic_type!r}, expected one of 'v', 'q'"):
            team_args(MAACConfig, tmp_path, critic_type=critic_type)

    @pytest.mark.parametrize(
        ("config", "kwargs", "shapes"),
        [
            ({}, {}, [(1, 16)]),
            ({}, {"model_config": {"critic_value_head_hidden_dim": None}}, [(1, 16)]),
            ({}, {"model_config": {"critic_value_head_hidden_dim": 8}}, [(8, 16), (1, 8)]),
            ({"critic_value_head_hidden_dim": 8}, {}, [(8, 16), (1, 8)]),
            ({"critic_value_head_hidden_dim": 8}, {"model_config": {}}, [(8, 16), (1, 8)]),
            (
                {"critic_value_head_hidden_dim": 8},
                {"model_config": {"critic_value_head_hidden_dim": 8}},
                [(8, 16), (1, 8)],
            ),
        ],
    )
    def test_the_heads_width_comes_from_model_config_or_the_config(self, build_maac, config, kwargs, shapes):
        head = build_maac(config, critic_model=lm(5), **kwargs).critics[0].value_head
        assert [tuple(p.shape) for p in head.parameters() if p.dim() == 2] == shapes

    def test_two_different_widths_are_an_error(self, build_maac):
        with pytest.raises(ValueError, match="critic_value_head_hidden_dim"):
            build_maac(
                {"critic_value_head_hidden_dim": 8},
                critic_model=lm(5),
                model_config={"critic_value_head_hidden_dim": 4},
            )

    def test_an_unknown_entry_of_model_config_is_an_error_that_names_it(self, build_maac):
        with pytest.raises(ValueError, match="hidden_width"):
            build_maac(critic_model=lm(5), model_config={"hidden_width": 4})

    def test_its_vocabulary_must_fit_the_first_actors_tokenizer_where_it_has_none(self, build_maac):
        """B17."""
        with pytest.raises(ValueError, match="critic.*64.*32"):
            build_maac(agents=[lm(0, vocab=64), lm(1)], tokenizer=[tok(64), tok(32)], critic_model=lm(5, vocab=32))

    def test_it_reads_with_the_first_actors_tokenizer_where_it_has_none(self, build_maac):
        trainer = build_maac(agents=[lm(0), lm(1)], tokenizer=[tok(reverse=True), tok()], critic_model=lm(5, vocab=64))
        assert trainer.critic_tokenizers[0].get_vocab() == tok(reverse=True).get_vocab()


def critic_words(trainer, batch):
    """What the critic read in each row: ids without padding, and the words that they are in its vocabulary."""
    ids, mask = batch["critic/input_ids"], batch["critic/attention_mask"].bool()
    kept = [row[keep].tolist() for row, keep in zip(ids, mask, strict=True)]
    return kept, [trainer.critic_tokenizers[0].convert_ids_to_tokens(row) for row in kept]


class TestVocabularies:
    """B17: a critic reads text with its own tokenizer, never an actor's ids."""

    def test_an_actor_with_a_larger_vocabulary_than_the_critic(self, build_maac, monkeypatch):
        trainer = build_maac(
            {"critic_type": "q", "max_steps": 2},
            agents=[lm(0, vocab=64), lm(1, vocab=64)],
            tokenizer=tok(64),
            critic_model=lm(5, vocab=32),
            critic_tokenizer=tok(32),
            train_dataset=Dataset.from_dict({"prompt": ["w0 w1"] * 4}),
        )
        stub_rollouts(monkeypatch, trainer, [[[40, 5]], [[6, 63]]])  # w37 w2, and w3 w60
        batches = record_batches(trainer)
        trainer.train()
        ids, words = critic_words(trainer, batches[0])
        assert max(max(row) for row in ids) < 32
        assert [word for word in words[0] if word.startswith("w")] == ["w0", "w1", "w0", "w1", "w2", "w3"]
        assert all(math.isfinite(loss) for loss in logged(trainer, "loss"))

    def test_an_actor_with_a_smaller_vocabulary_in_another_order(self, build_maac, monkeypatch):
        """The dangerous one: the actor's ids are valid for the critic, but mean other words."""
        trainer = build_maac(
            {"critic_type": "q"},
            agents=[lm(0, vocab=32), lm(1, vocab=32)],
            tokenizer=tok(32),
            critic_model=lm(5, vocab=64),
            critic_tokenizer=tok(64, reverse=True),
            train_dataset=Dataset.from_dict({"prompt": ["w0 w1"] * 4}),
        )
        stub_rollouts(monkeypatch, trainer, [[[5, 6]], [[7]]])  # w2 w3, and w4
        batches = record_batches(trainer)
        trainer.train()
        ids, words = critic_words(trainer, batches[0])
        assert [word for word in words[0] if word.startswith("w")] == ["w0", "w1", "w0", "w1", "w2", "w3", "w4"]
        last = {f"w{i}": 3 + 60 - i for i in range(61)}  # the reversed order, counted by hand
        assert [i for i in ids[0] if i >= 3] == [last[w] for w in ("w0", "w1", "w0", "w1", "w2", "w3", "w4")]

    def test_equal_text_has_equal_value_whoever_wrote_it(self, build_maac, monkeypatch):
        """The same words from actors with different ids for them."""
        values = []
        for reverse in (False, True):
            trainer = build_maac(
                {"critic_type": "q"},
                agents=[lm(0), lm(1)],
                tokenizer=tok(reverse=reverse),
                critic_model=lm(5, vocab=64),
                critic_tokenizer=tok(64),
                train_dataset=Dataset.from_dict({"prompt": ["w0 w1"] * 4}),
            )
            said = [
                [trainer.tokenizers[0].convert_tokens_to_ids(w) for w in words] for words in (["w5", "w6"], ["w7"])
            ]
            stub_rollouts(monkeypatch, trainer, [[ids] for ids in said])
            batches = record_batches(trainer)
            trainer.train()
            values.append((batches[0]["critic/old_values"], batches[0]["critic/input_ids"]))
        assert torch.equal(values[0][0], values[1][0])
        assert torch.equal(values[0][1], values[1][1])


class TestAddedTokens:
    """B18: tokens are added and embeddings resized before training, and the export still loads."""

    @staticmethod
    def extended(model):
        tokenizer = tok()
        tokenizer.add_tokens(["<a>", "<b>"])
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        return model, tokenizer

    def train_and_reload(self, build, tmp_path, model, tokenizer, **kwargs):
        trainer = build(
            agents=[model, lm(1, vocab=len(tokenizer))],
            tokenizer=tokenizer,
            train_dataset=Dataset.from_dict({"prompt": ["w0 <a> w1", "<b> w2"] * 2}),
            **kwargs,
        )
        trainer.train()
        trainer.save_model(str(tmp_path / "export"))
        directory = tmp_path / "export" / "agent_0"
        reloaded = AutoModelForCausalLM.from_pretrained(directory)
        words = PreTrainedTokenizerFast.from_pretrained(directory)
        return trainer, reloaded, words

    @staticmethod
    def assert_same(trainer, reloaded, words):
        assert len(words) == 34
        assert reloaded.get_input_embeddings().num_embeddings >= len(words)
        ids = words("w0 <a> <b> w1")["input_ids"]
        assert 32 in ids and 33 in ids
        torch.testing.assert_close(logits(reloaded, [ids]), logits(trainer.agents[0], [ids]), rtol=0, atol=1e-5)

    @pytest.mark.parametrize("make", [lm, lambda seed: lm(seed, tie=True), gpt2], ids=["qwen2", "tied", "gpt2"])
    def test_full_training(self, build, tmp_path, make):
        model, tokenizer = self.extended(make(0))
        self.assert_same(*self.train_and_reload(build, tmp_path, model, tokenizer))

    @pytest.mark.parametrize("from_directory", [False, True])
    def test_lora(self, build, tmp_path, from_directory):
        from peft import LoraConfig

        model = lm(0)
        if from_directory:
            model = AutoModelForCausalLM.from_pretrained(saved(tmp_path / "base", model, tok()), dtype=torch.float32)
        model, tokenizer = self.extended(model)
        config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        self.assert_same(*self.train_and_reload(build, tmp_path, model, tokenizer, peft_config=[config, None]))

    def test_a_model_that_was_not_resized_is_an_error_with_both_numbers(self, build):
        tokenizer = tok()
        tokenizer.add_tokens(["<a>", "<b>"])
        with pytest.raises(ValueError, match="agent_0.*34.*32"):
            build(agents=[lm(0), lm(1)], tokenizer=tokenizer)

    def test_lora_on_weights_that_differ_from_their_directory(self, build, tmp_path):
        """An adapter alone would load onto the directory's weights."""
        from peft import LoraConfig

        model = AutoModelForCausalLM.from_pretrained(saved(tmp_path / "base", lm(0), tok()), dtype=torch.float32)
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.mul_(2.0)
        config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        trainer = build(agents=[model], tokenizer=tok(), peft_config=config)
        trainer.train()
        trainer.save_model(str(tmp_path / "export"))
        reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export" / "agent_0", dtype=torch.float32)
        torch.testing.assert_close(logits(reloaded), logits(trainer.agents[0]), rtol=0, atol=1e-5)


class TestChatTemplates:
    """B20: messages are rendered once, whole, and with what the template and the tokenizer need."""

    conversation = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"w{i} w{i + 1}"}] for i in range(4)]})

    def prompts_of(self, build, **kwargs):
        trainer = build(**{"agents": [lm(0), lm(1)], "tokenizer": tok(bos=True, chat_template=CHAT), **kwargs})
        batches = record_batches(trainer)
        trainer.train()
        rows = []
        for index, tokenizer in enumerate(trainer.tokenizers):
            ids, mask = batches[0][f"agent_{index}/prompt_ids"], batches[0][f"agent_{index}/prompt_mask"].bool()
            rows.append(
                [tokenizer.convert_ids_to_tokens(row[keep].tolist()) for row, keep in zip(ids, mask, strict=True)]
            )
        return rows

    def test_messages_without_a_template_are_an_error_at_construction_that_names_the_agent(self, build):
        with pytest.raises(ValueError, match="agent_1.*chat template"):
            build(
                agents=[lm(0), lm(1)],
                tokenizer=[tok(chat_template=CHAT), tok()],
                train_dataset=self.conversation,
            )

    def test_so_are_messages_from_a_formatter(self, build):
        with pytest.raises(ValueError, match="agent_0.*chat template"):
            build(
                agents=[lm(0), lm(1)],
                tokenizer=tok(),
                formatters=[lambda row: [{"role": "user", "content": row["prompt"]}], lambda row: row["prompt"]],
            )

    def test_and_messages_of_the_evaluation_data(self, build):
        with pytest.raises(ValueError, match="agent_0.*chat template"):
            build(agents=[lm(0), lm(1)], tokenizer=tok(), eval_dataset=self.conversation)

    def test_a_conversation_begins_with_one_bos_and_has_one_system_block(self, build):
        for rows in self.prompts_of(build, train_dataset=self.conversation):
            for words in rows:
                assert words[0] == "<bos>" and words.count("<bos>") == 1
                assert words.count("w20") == 1 and words[1:3] == ["w20", "w21"]  # the default system block
                assert words.count("w22") == 1 and words[-1] == "w23"

    def test_a_system_message_replaces_the_default_one(self, build):
        rows = self.prompts_of(
            build,
            formatters=lambda row: [
                {"role": "system", "content": "w9"},
                {"role": "user", "content": row["prompt"]},
            ],
        )
        for words in rows[0] + rows[1]:
            assert words.count("<bos>") == 1 and words.count("w20") == 1
            assert words[:3] == ["<bos>", "w20", "w9"]

    def test_a_text_gets_the_tokenizers_bos_and_no_template(self, build):
        for words in self.prompts_of(build)[0]:
            assert words.count("<bos>") == 1 and words[0] == "<bos>"
            assert "w20" not in words and "w23" not in words

    def test_a_formatter_that_renders_the_template_itself_gets_one_bos(self, build):
        tokenizer = tok(bos=True, chat_template=CHAT)

        def rendered(row):
            return tokenizer.apply_chat_template(
                [{"role": "user", "content": row["prompt"]}], tokenize=False, add_generation_prompt=True
            )

        for words in self.prompts_of(build, tokenizer=tokenizer, formatters=rendered)[0]:
            assert words.count("<bos>") == 1 and words.count("w20") == 1

    def test_each_actor_has_its_own_template(self, build):
        other = CHAT.replace("w20", "w24")
        rows = self.prompts_of(
            build,
            train_dataset=self.conversation,
            tokenizer=[tok(bos=True, chat_template=CHAT), tok(bos=True, chat_template=other)],
        )
        assert "w20" in rows[0][0] and "w24" not in rows[0][0]
        assert "w24" in rows[1][0] and "w20" not in rows[1][0]

    def test_a_conversation_and_a_text_can_stand_side_by_side(self, build):
        rows = self.prompts_of(
            build, formatters=[lambda row: [{"role": "user", "content": row["prompt"]}], lambda row: row["prompt"]]
        )
        assert "w22" in rows[0][0] and "w22" not in rows[1][0]

    def test_reward_functions_see_the_texts_of_conversations(self, build, monkeypatch):
        seen = []

        def reward(first, second):
            seen.append((first, second))
            return [0.0, 1.0]

        trainer = build(
            agents=[lm(0), lm(1)],
            tokenizer=tok(bos=True, chat_template=CHAT),
            train_dataset=self.conversation,
            reward_func=reward,
        )
        stub_rollouts(monkeypatch, trainer, [[[5, 6, 2]], [[7], []]])
        trainer.train()
        assert seen[0] == (["w2 w3", "w2 w3"], ["w4", ""])


class TestReference:
    """B41: the reference is the start of training, wherever the actor comes from, and stays there."""

    def lora(self, seed, trained):
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(lm(seed), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
        if trained:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "lora_B" in name:
                        parameter.normal_(std=0.5)
        return model

    def changed(self, seed, tmp_path):
        directory = saved(tmp_path / f"start_{seed}", lm(seed), tok())
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        return model

    @pytest.mark.parametrize(
        "start", ["from_config", "changed_after_loading", "directory", "fresh_lora", "fresh_adapter", "trained_lora"]
    )
    def test_at_the_first_step_the_kl_is_zero_and_later_it_is_not(self, build, tmp_path, start):
        kwargs = {}
        if start == "from_config":
            actors = [lm(0), gpt2(1)]
        elif start == "changed_after_loading":
            actors = [self.changed(0, tmp_path), self.changed(1, tmp_path)]
        elif start == "directory":
            actors = [saved(tmp_path / name, lm(i), tok()) for i, name in enumerate(("one", "two"))]
            kwargs["tokenizer"] = None
        elif start == "fresh_lora":
            from peft import LoraConfig

            actors = [lm(0), lm(1)]
            kwargs["peft_config"] = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        else:
            actors = [self.lora(0, start == "trained_lora"), self.lora(1, start == "trained_lora")]
        trainer = build({"beta": 0.1, "max_steps": 3}, **{"agents": actors, "tokenizer": tok(), **kwargs})
        trainer.train()
        for index in range(2):
            kls = logged(trainer, f"agent_{index}/kl")
            assert kls[0] == pytest.approx(0.0, abs=1e-7)
            assert all(kl > 1e-6 for kl in kls[1:])

    def test_a_full_models_reference_does_not_move(self, build):
        actors = [lm(0), gpt2(1)]
        start = [weights_hash(actor) for actor in actors]
        trainer = build({"beta": 0.1, "max_steps": 3}, agents=actors, tokenizer=tok())
        trainer.train()
        assert [weights_hash(agent.ref_model) for agent in trainer.agent_trainers] == start
        assert all(weights_hash(actor) != old for actor, old in zip(trainer.agents, start, strict=True))

    def test_a_trained_adapters_reference_does_not_move(self, build):
        actors = [self.lora(0, trained=True), self.lora(1, trained=True)]
        start = [{n: p.detach().clone() for n, p in actor.named_parameters() if ".default." in n} for actor in actors]
        trainer = build({"beta": 0.1, "max_steps": 3}, agents=actors, tokenizer=tok())
        trainer.train()
        for actor, old in zip(trainer.agents, start, strict=True):
            now = dict(actor.named_parameters())
            for name, value in old.items():
                assert torch.equal(now[name.replace(".default.", ".ref.")], value)
            assert any(not torch.equal(now[name], value) for name, value in old.items())

    def test_a_base_under_an_adapter_does_not_move(self, build):
        actor = self.lora(0, trained=True)
        base = {n: p.detach().clone() for n, p in actor.named_parameters() if "lora" not in n}
        trainer = build({"beta": 0.1, "max_steps": 2}, agents=[actor], tokenizer=tok())
        trainer.train()
        now = dict(trainer.agents[0].named_parameters())
        assert all(torch.equal(now[name], value) for name, value in base.items())

    def test_the_reference_stays_out_of_the_optimizer(self, build):
        trainer = build({"beta": 0.1}, agents=[lm(0), self.lora(1, trained=True)], tokenizer=tok())
        trainer.create_optimizer()
        trained = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
        frozen = [*trainer.agent_trainers[0].ref_model.parameters()]
        frozen += [p for name, p in trainer.agents[1].named_parameters() if ".ref." in name]
        assert frozen and not any(id(p) in trained for p in frozen)

    def test_without_a_kl_term_there_is_no_reference(self, build):
        trainer = build({"beta": 0.0}, agents=[lm(0)], tokenizer=tok())
        assert trainer.agent_trainers[0].ref_model is None


def test_a_model_that_was_passed_is_the_one_that_is_trained(build):
    actors = [lm(0), lm(1)]
    before = [copy.deepcopy(actor) for actor in actors]
    trainer = build(agents=actors, tokenizer=tok())
    assert all(own is given for own, given in zip(trainer.agents, actors, strict=True))
    trainer.train()
    assert all(not torch.equal(parameters(actor), parameters(old)) for actor, old in zip(actors, before, strict=True))


def test_a_tokenizer_without_eos_and_pad_is_an_error_that_names_the_actor(tmp_path):
    tokenizer = tok(pad=None)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="agent_0: its tokenizer has neither an EOS nor a pad token"):
        MAGRPOTrainer(
            agents=[lm(0)],
            tokenizer=tokenizer,
            reward_func=word_reward,
            train_dataset=dataset(),
            args=team_args(MAGRPOConfig, tmp_path),
        )
