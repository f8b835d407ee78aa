# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Texts of joint responses, and where a reward model reads them."""

import copy

import pytest
import torch
from tiny import lm, reward_model, tok, weights_hash
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2ForSequenceClassification,
    PreTrainedTokenizerFast,
    set_seed,
)

from trl_multiagent.models.joint_reward import (
    JointRewardScorer,
    check_reward_model,
    choose_pad_token,
    encode_joint_texts,
    head_names,
    render_joint_response,
    reward_tokenizer,
)


EOS = 2


def byte_level(**special):
    """A byte-level BPE tokenizer whose one special token is EOS, as GPT-2's is."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    inner.train_from_iterator(["hello the world!! the cat", "wow!! hello there"] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, **{"eos_token": "<|end|>", **special})


def with_tool_token(**special):
    tokenizer = byte_level(**special)
    tokenizer.add_tokens(["<tool>"], special_tokens=True)
    return tokenizer


def with_template(template, **tokens):
    """The word-level tokenizer, with special tokens around every text."""
    tokenizer = tok()
    vocab = tokenizer.get_vocab()
    names = [part for part in template.split() if part != "$A"]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        template, special_tokens=[(name, vocab[name]) for name in names]
    )
    for name, token in tokens.items():
        setattr(tokenizer, name, token)
    return tokenizer


def read_by_hand(model, ids):
    """The head on the last hidden state of one unpadded text."""
    with torch.no_grad():
        hidden = model.model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
        return (model.score.weight[0] @ hidden).item()


# The text


def test_a_team_of_one_has_no_labels():
    assert render_joint_response(["Say: "], ["yes"]) == "Say: yes"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert render_joint_response([messages], ["Hey"]) == "system: Be brief.\nuser: Hi\nassistant: Hey"


def test_prompts_come_before_responses_under_each_actors_name():
    prompts = ["Write f.", [{"role": "user", "content": "Write g."}]]
    assert render_joint_response(prompts, ["f = 1", "g = 2"]) == (
        "[agent_0 prompt]\nWrite f.\n\n[agent_1 prompt]\nuser: Write g.\n\n"
        "[agent_0 response]\nf = 1\n\n[agent_1 response]\ng = 2"
    )
    named = render_joint_response(["p", "q"], ["a", "b"], agent_names=["coder", "tester"])
    assert named == "[coder prompt]\np\n\n[tester prompt]\nq\n\n[coder response]\na\n\n[tester response]\nb"


@pytest.mark.parametrize("lists", [(["p"], ["a", "b"]), (["p", "q"], ["a"]), ([], []), (["p"], ["a"], ["x", "y"])])
def test_lists_that_do_not_match_are_refused(lists):
    with pytest.raises(ValueError, match=rf"Got {len(lists[0])} prompts, {len(lists[1])} completions"):
        render_joint_response(*lists)


# The pad token


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        (tok(), "<pad>"),
        (tok(pad="<eos>"), "<unk>"),
        (tok(pad=None), "<unk>"),
        (with_template("$A", pad_token=None, unk_token=None, bos_token="w3"), "w3"),
        (with_tool_token(pad_token="<|end|>", unk_token="<|end|>"), "<tool>"),
    ],
    ids=["own", "own is EOS", "none", "BOS", "additional"],
)
def test_the_pad_token_is_another_special_token_than_eos(tokenizer, expected):
    own = tokenizer.pad_token, tokenizer.padding_side
    assert choose_pad_token(tokenizer) == expected
    prepared = reward_tokenizer(tokenizer)
    assert (prepared.pad_token, prepared.padding_side) == (expected, "right")
    assert (tokenizer.pad_token, tokenizer.padding_side) == own


@pytest.mark.parametrize(
    "special", [{}, {"pad_token": "<|end|>"}, {"bos_token": "<|end|>", "unk_token": "<|end|>"}], ids=str
)
def test_an_ordinary_pad_token_leaves_texts_alone_also_after_loading(special, tmp_path):
    tokenizer = byte_level(**special)
    prepared = reward_tokenizer(tokenizer)
    assert prepared.pad_token_id not in (None, tokenizer.eos_token_id)
    prepared.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.pad_token == prepared.pad_token
    texts = ["hello!! the cat", "the the!", "wow there world", "".join(map(chr, range(32, 127)))]
    assert loaded(texts)["input_ids"] == prepared(texts)["input_ids"] == tokenizer(texts)["input_ids"]


def test_where_every_token_is_a_text_the_longest_pads():
    inner = Tokenizer(models.WordLevel({"<eos>": 0, "ab": 1, "abcd": 2, "abc": 3}, unk_token="ab"))
    assert choose_pad_token(PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")) == "abcd"
    inner = Tokenizer(models.WordLevel({"<eos>": 0}, unk_token="<eos>"))
    with pytest.raises(ValueError, match="no token besides EOS"):
        choose_pad_token(PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>"))


def test_without_eos_nothing_can_be_read():
    tokenizer = tok()
    tokenizer.eos_token = None
    for call in (choose_pad_token, lambda t: encode_joint_texts(t, ["w1"], None)):
        with pytest.raises(ValueError, match=r"no EOS token.*Set `tokenizer\.eos_token`"):
            call(tokenizer)


# Token ids


@pytest.mark.parametrize("template", ["$A", "$A <eos>"], ids=["plain", "adds EOS"])
def test_every_text_ends_with_one_eos(template):
    texts = ["w0 w1", "w0 w1<eos>", "w0 w1 <eos>", "", "<eos>"]
    rows = encode_joint_texts(with_template(template), texts, None)
    assert rows == [[3, 4, EOS], [3, 4, EOS], [3, 4, EOS], [EOS], [EOS]]


def test_a_longer_text_keeps_its_end():
    rows = encode_joint_texts(tok(), ["w0 w1 w2 w3", "w0 w1", "w0 w1 w2"], 3)
    assert rows == [[5, 6, EOS], [3, 4, EOS], [4, 5, EOS]]
    assert encode_joint_texts(tok(), ["w0 w1"], 1) == [[EOS]]


def test_a_bos_that_the_tokenizer_adds_is_kept():
    tokenizer = tok(bos=True)
    bos = tokenizer.bos_token_id
    texts = ["w0 w1 w2 w3", "", "w0"]
    assert encode_joint_texts(tokenizer, texts, 3) == [[bos, 6, EOS], [bos, EOS], [bos, 3, EOS]]
    assert encode_joint_texts(tokenizer, texts, 1) == [[EOS]] * 3
    # One that is the text's own is its beginning
    tokenizer = with_template("$A", bos_token="w0")
    assert encode_joint_texts(tokenizer, ["w0 w1 w2 w3"], 3) == [[5, 6, EOS]]


def test_one_token_may_be_both_bos_and_eos():
    tokenizer = with_template("<eos> $A", bos_token="<eos>")
    rows = encode_joint_texts(tokenizer, ["w0 w1", "", "w0 w1 w2"], 3)
    assert rows == [[EOS, 4, EOS], [EOS, EOS], [EOS, 5, EOS]]


def test_what_is_no_text_is_refused():
    with pytest.raises(ValueError, match="rendered as int"):
        encode_joint_texts(tok(), ["w0", 3], None)
    assert encode_joint_texts(tok(), [], None) == []


# Scores

PROMPTS = [["w1 w2", "w3"], ["w1", "w4 w5 w6 w7 w8"], ["w9", "w9"], ["w1 w2", "w3"], ["w20", "w0 w0 w0 w0"]]
COMPLETIONS = [["w3", "w4 w5"], ["w6 w7", ""], ["", ""], ["w3", "w4 w6"], ["w1 " * 30, "w2"]]


def plain(prompts, completions):
    return " ".join([*prompts, *completions])


@pytest.mark.parametrize("pad", ["<pad>", "<eos>", None])
def test_the_reward_is_read_at_the_eos_whatever_the_tokenizer_pads_with(pad):
    tokenizer = tok(pad=pad)
    model = reward_model(pad_token_id=tokenizer.pad_token_id)
    scores = JointRewardScorer(model, tokenizer, plain, batch_size=3).score(PROMPTS, COMPLETIONS)
    assert (scores.dtype, scores.shape, scores.device.type) == (torch.float32, (5,), "cpu")
    words = [" ".join(plain(*joint).split()) for joint in zip(PROMPTS, COMPLETIONS, strict=True)]
    expected = [read_by_hand(model, [*(int(word[1:]) + 3 for word in text.split()), EOS]) for text in words]
    torch.testing.assert_close(scores, torch.tensor(expected), rtol=0, atol=1e-5)
    assert scores.unique().numel() == 5


def test_a_long_text_is_read_at_its_end():
    model, words = reward_model(), [f"w{i % 20}" for i in range(300)]
    scorer = JointRewardScorer(model, tok(pad="<eos>"), plain, max_length=10)
    score = scorer.score([[" ".join(words)], ["w1"]], [["w5 w6"], ["w2"]])[0].item()
    ids = [3 + int(word[1:]) for word in [*words, "w5", "w6"]][-9:] + [EOS]
    assert score == pytest.approx(read_by_hand(model, ids), abs=1e-5)


def test_without_a_limit_a_text_is_cut_to_the_models_positions():
    set_seed(0)
    model = GPT2ForSequenceClassification(
        GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=8, num_labels=1, pad_token_id=1)
    )
    long, short = JointRewardScorer(model, tok(), plain).score([["w3 " * 20], ["w3 " * 5]], [["w1 w2"], ["w1 w2"]])
    assert long.item() == pytest.approx(short.item(), abs=1e-6)


def test_a_score_does_not_depend_on_the_batch():
    model = reward_model()
    alone = torch.cat(
        [JointRewardScorer(model, tok(), plain).score([p], [c]) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    )
    for batch_size in (1, 2, 5):
        scores = JointRewardScorer(model, tok(), plain, batch_size=batch_size).score(PROMPTS, COMPLETIONS)
        torch.testing.assert_close(scores, alone, rtol=0, atol=1e-5)
    backwards = JointRewardScorer(model, tok(), plain, batch_size=2).score(PROMPTS[::-1], COMPLETIONS[::-1])
    torch.testing.assert_close(backwards.flip(0), alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_scoring_leaves_the_model_as_it_was(training):
    model = reward_model(pad_token_id=EOS).train(training)
    before = weights_hash(model), copy.deepcopy(model.config)
    scores = JointRewardScorer(model, tok(pad="<eos>")).score([["w1", "w2"]], [["w3", "w4"]])
    assert not scores.requires_grad
    assert (weights_hash(model), model.training, model.config.pad_token_id) == (before[0], training, EOS)
    assert model.config.to_dict() == before[1].to_dict()


def test_nothing_to_score_gives_nothing():
    assert JointRewardScorer(reward_model(), tok()).score([], []).shape == (0,)


def test_lists_of_different_lengths_are_not_scored():
    with pytest.raises(ValueError, match="prompts of 2 joint responses and completions of 1"):
        JointRewardScorer(reward_model(), tok()).score([["w1"], ["w2"]], [["w3"]])
    with pytest.raises(ValueError, match="batch_size=0"):
        JointRewardScorer(reward_model(), tok(), batch_size=0)


# Models


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lm(), "Qwen2ForCausalLM, a language model without a reward head.*num_labels=1"),
        (reward_model(num_labels=2), "num_labels=2, expected 1"),
        (torch.nn.Linear(2, 1), "is a Linear, expected"),
    ],
    ids=["language model", "two labels", "no transformer"],
)
def test_what_is_no_reward_model_is_refused(model, message):
    with pytest.raises(ValueError, match=message):
        check_reward_model(model)


def test_the_head_is_what_is_around_the_backbone():
    assert head_names(reward_model()) == ["score"]
    with pytest.raises(ValueError, match="cannot be told apart"):
        head_names(reward_model().model)
