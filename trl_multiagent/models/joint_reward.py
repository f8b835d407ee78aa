# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""
A reward model on joint responses: one text for what all actors were asked and answered, and one number for the text.

It is a sequence classification model with one label. Such a decoder reads the last token that is not the pad token, so
every text ends with EOS and the pad token is never EOS.
"""

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from .._compat import create_model_from_path, find_file, suppress_seqcls_warning
from ..rollouts.formatters import Prompt, prompt_text
from .language_model import base_language_model
from .positions import num_positions


logger = logging.getLogger(__name__)

# Prompts and completions of one joint response, one of each for each actor, to the text that is scored
Render = Callable[[Sequence[Prompt], Sequence[str]], str]


# Texts


def render_joint_response(
    prompts: Sequence[Prompt], completions: Sequence[str], agent_names: Sequence[str] | None = None
) -> str:
    """
    The default text of a joint response. First come the prompts, then the responses, each under the actor's name:

    ```text
    [agent_0 prompt]
    ...

    [agent_1 prompt]
    ...

    [agent_0 response]
    ...

    [agent_1 response]
    ...
    ```

    Texts that are too long lose their beginning, so the responses, in which two joint responses to the same prompts
    differ, stand at the end. A team of one has no labels: the text is prompt and completion, as in TRL; messages end
    with an `assistant` line that holds the completion.

    Args:
        prompts (sequence of `str` or list of messages):
            What each actor was asked.
        completions (sequence of `str`):
            What each actor answered.
        agent_names (sequence of `str`, *optional*):
            Default: `agent_0`, `agent_1`, ...

    Raises:
        ValueError: the numbers of prompts, completions and names differ, or there is none.
    """
    names = [f"agent_{index}" for index in range(len(prompts))] if agent_names is None else agent_names
    if not len(prompts) == len(completions) == len(names) or not len(prompts):
        raise ValueError(
            f"Got {len(prompts)} prompts, {len(completions)} completions and {len(names)} names, expected one of each "
            f"for each actor."
        )
    if len(prompts) == 1:
        is_text = isinstance(prompts[0], str)
        return (prompts[0] if is_text else f"{prompt_text(prompts[0])}\nassistant: ") + completions[0]
    sections = [
        *(f"[{name} prompt]\n{prompt_text(prompt)}" for name, prompt in zip(names, prompts, strict=True)),
        *(f"[{name} response]\n{completion}" for name, completion in zip(names, completions, strict=True)),
    ]
    return "\n\n".join(sections)


def choose_pad_token(tokenizer: PreTrainedTokenizerBase) -> str:
    """
    A token to pad with that is not EOS: the tokenizer's own pad token if that differs, else another special token
    (unknown, BOS, further ones), else a token of the vocabulary. The tokenizer is left as it is.

    Raises:
        ValueError: the tokenizer has no EOS token, or no other token.
    """
    eos = _eos_id(tokenizer)
    added = [token.content for _, token in sorted(tokenizer.added_tokens_decoder.items()) if token.special]
    special = [tokenizer.pad_token, tokenizer.unk_token, tokenizer.bos_token, *tokenizer.all_special_tokens, *added]
    vocabulary = tokenizer.get_vocab()
    for token in special:
        if token in vocabulary and vocabulary[token] != eos:
            return token
    # A pad token is cut out of texts before anything else is: one that texts do not contain, the longest
    ordinary = sorted((token for token, index in vocabulary.items() if index != eos), key=lambda t: (-len(t), t))
    for token in ordinary:
        if tokenizer(token, add_special_tokens=False)["input_ids"] != [vocabulary[token]]:
            return token
    if not ordinary:
        raise ValueError("The tokenizer has no token besides EOS to pad with. Set `tokenizer.pad_token`.")
    return ordinary[0]


def reward_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A copy that pads on the right, with the token of `choose_pad_token`."""
    tokenizer = copy.deepcopy(tokenizer)
    pad_token = choose_pad_token(tokenizer)
    if tokenizer.pad_token != pad_token:
        logger.info("The pad token was %s, which would be read as EOS; %s is used.", tokenizer.pad_token, pad_token)
        tokenizer.pad_token = pad_token
    tokenizer.padding_side = "right"
    return tokenizer


def encode_joint_texts(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], max_length: int | None
) -> list[list[int]]:
    """
    Token ids of texts, each with the special tokens that the tokenizer adds, and with one EOS at the end.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Its EOS must be set.
        texts (sequence of `str`):
            The texts. One that ends with EOS gets no other; an empty one is EOS alone.
        max_length (`int`, *optional*):
            Most tokens of a text; a longer one loses its beginning, but not a BOS that the tokenizer adds.

    Raises:
        ValueError: the tokenizer has no EOS token, or an entry is no text.
    """
    eos = _eos_id(tokenizer)
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(f"A joint response was rendered as {type(text).__name__}, expected a text (`str`).")
    if not len(texts):
        return []
    ended = [text if text.endswith(tokenizer.eos_token) else text + tokenizer.eos_token for text in texts]
    rows = tokenizer(ended, verbose=False)["input_ids"]
    if _adds(tokenizer, eos, -1):
        rows = [row[:-1] if row[-2:] == [eos, eos] else row for row in rows]
    rows = [row if row[-1] == eos else [*row, eos] for row in rows]
    return [keep_end(tokenizer, row, max_length) for row in rows]


def keep_end(tokenizer: PreTrainedTokenizerBase, ids: list[int], max_length: int | None) -> list[int]:
    """The last `max_length` token ids of a text; the first is still BOS, where the tokenizer adds it."""
    if max_length is None or len(ids) <= max_length:
        return ids
    bos = tokenizer.bos_token_id
    if max_length > 1 and bos is not None and ids[0] == bos and _adds(tokenizer, bos, 0):
        return [bos, *ids[len(ids) - max_length + 1 :]]
    return ids[len(ids) - max_length :]


def _eos_id(tokenizer: PreTrainedTokenizerBase) -> int:
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "The tokenizer has no EOS token, at which a reward model reads the reward. Set `tokenizer.eos_token`."
        )
    return tokenizer.eos_token_id


def _adds(tokenizer: PreTrainedTokenizerBase, token_id: int, place: int) -> bool:
    """Whether the tokenizer adds a token to each text, as its first (0) or last (-1)."""
    with_special = tokenizer("a")["input_ids"]
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    return len(with_special) > len(plain) and with_special[place] == token_id and plain[place:][:1] != [token_id]


# Models


def load_reward_model(source: str, **kwargs) -> nn.Module:
    """
    A sequence classification model with one label, from a hub id or a directory: a reward model, a language model
    (which gets a new head), or the adapter of a reward model alone, which is then a trainable PEFT model.

    Args:
        source (`str`):
            Hub id or directory.
        **kwargs:
            For `from_pretrained`. `dtype` is float32 by default.
    """
    kwargs = {"device_map": None, **kwargs, "num_labels": 1}
    if find_file(source, "config.json") is None and find_file(source, "adapter_config.json") is not None:
        from peft import AutoPeftModelForSequenceClassification

        return AutoPeftModelForSequenceClassification.from_pretrained(
            source, is_trainable=True, **{"dtype": torch.float32, **kwargs}
        )
    with suppress_seqcls_warning():
        return create_model_from_path(source, AutoModelForSequenceClassification, **kwargs)


def check_reward_model(model: nn.Module) -> None:
    """Raise a `ValueError` for what is no sequence classification model with one label."""
    base = base_language_model(model)
    how = "`AutoModelForSequenceClassification.from_pretrained(identifier, num_labels=1)`"
    if not isinstance(base, PreTrainedModel):
        raise ValueError(f"The reward model is a {type(base).__name__}, expected what {how} loads, or an identifier.")
    if base.get_output_embeddings() is not None:
        raise ValueError(
            f"The reward model is a {type(base).__name__}, a language model without a reward head. Pass its "
            f"identifier as `model=`, or load it with {how}."
        )
    if base.config.num_labels != 1:
        raise ValueError(
            f"The reward model has num_labels={base.config.num_labels}, expected 1: a reward is one number. Load it "
            f"with {how}."
        )


def head_names(model: nn.Module) -> list[str]:
    """
    Names of the modules around the backbone of a sequence classification model, such as `["score"]`.

    Raises:
        ValueError: head and backbone cannot be told apart.
    """
    base = base_language_model(model)
    children = {name: child for name, child in base.named_children() if next(child.parameters(), None) is not None}
    backbone = children.pop(base.base_model_prefix, None)
    if backbone is None or not children:
        raise ValueError(
            f"In a {type(base).__name__} head and backbone cannot be told apart: expected a module named "
            f"{base.base_model_prefix!r}, and others, got {[name for name, _ in base.named_children()]}."
        )
    return list(children)


class JointRewardScorer:
    """
    Scores joint responses with a frozen reward model. The score of a joint response does not depend on the others.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            A sequence classification model with one label. It stays on its device, and is as before after each call.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Its tokenizer, which is copied. The copy's pad token is that of `choose_pad_token`.
        render (`Callable`, *optional*):
            `(prompts, completions) -> str`, as in training. Default: [`render_joint_response`].
        max_length (`int`, *optional*):
            Most tokens of a text, of which the end is kept. Default: what the model has positions for.
        batch_size (`int`, *optional*, defaults to `8`):
            Joint responses in a forward pass.

    Raises:
        ValueError: `model` is no such model, or the tokenizer has no EOS token.

    Example:

    ```python
    >>> tokenizer = AutoTokenizer.from_pretrained("outputs/reward")
    >>> scorer = JointRewardScorer(load_reward_model("outputs/reward"), tokenizer)
    >>> scorer.score([["Write a.", "Write b."]], [["a = 1", "b = 2"]])
    tensor([0.3127])
    ```
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        render: Render = render_joint_response,
        max_length: int | None = None,
        batch_size: int = 8,
    ):
        check_reward_model(model)
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}, expected at least 1.")
        self.model = model
        self.tokenizer = reward_tokenizer(tokenizer)
        self.render = render
        self.max_length = length_limit(model, max_length)
        self.batch_size = batch_size

    @torch.no_grad()
    def score(
        self, prompts_list: Sequence[Sequence[Prompt]], completions_list: Sequence[Sequence[str]]
    ) -> torch.Tensor:
        """
        Rewards of joint responses.

        Args:
            prompts_list (sequence of B sequences):
                For each joint response, the prompt of each actor.
            completions_list (sequence of B sequences):
                For each joint response, the completion of each actor.

        Returns:
            `torch.Tensor` of shape `(B,)`, float32, on the CPU.

        Raises:
            ValueError: the two differ in length.
        """
        if len(prompts_list) != len(completions_list):
            raise ValueError(
                f"Got prompts of {len(prompts_list)} joint responses and completions of {len(completions_list)}, "
                f"expected the same number."
            )
        texts = [self.render(*joint) for joint in zip(prompts_list, completions_list, strict=True)]
        rows = encode_joint_texts(self.tokenizer, texts, self.max_length)
        # Texts of about the same length go together, so that little is padded
        order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
        scores = torch.empty(len(rows))
        with _reading(self.model, self.tokenizer.pad_token_id):
            for start in range(0, len(order), self.batch_size):
                batch = order[start : start + self.batch_size]
                scores[batch] = self._read([rows[index] for index in batch])
        return scores

    def _read(self, rows: list[list[int]]) -> torch.Tensor:
        device = next(self.model.parameters()).device
        ids = [torch.tensor(row, device=device) for row in rows]
        mask = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
        ids = pad_sequence(ids, batch_first=True, padding_value=self.tokenizer.pad_token_id)
        return self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits.squeeze(-1).float().cpu()


def length_limit(model: nn.Module, max_length: int | None) -> int | None:
    """Most tokens that a reward model reads: its positions, or `max_length` if that is less."""
    limits = (max_length, num_positions(model))
    return min((limit for limit in limits if limit is not None), default=None)


@contextlib.contextmanager
def _reading(model: nn.Module, pad_token_id: int) -> Iterator[None]:
    """Inside, the model is in eval mode, without dropout, and finds the end of a text by this pad token."""
    config = base_language_model(model).config.get_text_config()
    training, own_pad = model.training, config.pad_token_id
    model.eval()
    config.pad_token_id = pad_token_id
    try:
        yield
    finally:
        model.train(training)
        config.pad_token_id = own_pad
