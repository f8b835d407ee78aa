# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""The files around the package agree with each other and with the package."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import trl_multiagent


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
TEST_COMMAND = (
    "python3 -m venv .venv && "
    '.venv/bin/pip install --quiet --constraint constraints.txt --editable ".[test]" && '
    ".venv/bin/python -m pytest"
)
# what takes seconds to import, or need not be installed
HEAVY = ("accelerate", "datasets", "deepspeed", "peft", "torch", "transformers", "wandb")


def pins():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    requirements = [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]
    return {canonicalize_name(requirement.name): str(requirement.specifier) for requirement in requirements}


def requirements(group):
    """The packages of an extra ("" for the dependencies), without the package's own name in front of other extras."""
    lines = PROJECT["optional-dependencies"][group] if group else PROJECT["dependencies"]
    return [r for r in map(Requirement, lines) if canonicalize_name(r.name) != canonicalize_name(PROJECT["name"])]


def test_version_has_one_source():
    assert PROJECT["dynamic"] == ["version"]
    assert PYPROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "trl_multiagent.__version__"}
    # setuptools reads the version without importing the package: it must be a literal
    tree = ast.parse((ROOT / "trl_multiagent" / "__init__.py").read_text(encoding="utf-8"))
    literals = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and [getattr(t, "id", None) for t in node.targets] == ["__version__"]
    ]
    assert literals == [trl_multiagent.__version__]


def test_package_is_typed():
    assert (ROOT / "trl_multiagent" / "py.typed").is_file()
    assert "py.typed" in PYPROJECT["tool"]["setuptools"]["package-data"]["trl_multiagent"]


@pytest.mark.parametrize("group", ["", *PROJECT["optional-dependencies"]])
def test_every_named_package_is_pinned_within_its_range(group):
    pinned = pins()
    for requirement in requirements(group):
        specifier = pinned.get(canonicalize_name(requirement.name))
        assert specifier is not None, f"{requirement.name} is not in constraints.txt"
        assert re.fullmatch(r"==[^*,]+", specifier), f"{requirement.name}{specifier} is not an exact pin"
        assert requirement.specifier.contains(specifier.removeprefix("==")), f"{specifier} is not in {requirement}"


def test_every_pin_is_of_a_named_package():
    named = {
        canonicalize_name(r.name) for group in ["", *PROJECT["optional-dependencies"]] for r in requirements(group)
    }
    assert set(pins()) == named


def test_test_extra_covers_what_the_tests_use():
    own = [Requirement(line) for line in PROJECT["optional-dependencies"]["test"]]
    extras = {extra for r in own if canonicalize_name(r.name) == "trl-multiagent" for extra in r.extras}
    assert extras == {"api", "deepspeed", "examples", "peft", "wandb"}


def test_pre_commit_runs_the_pinned_ruff():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    revisions = [repo["rev"] for repo in config["repos"] if repo["repo"].endswith("/ruff-pre-commit")]
    assert revisions == [pins()["ruff"].replace("==", "v")]


def test_readme_has_the_test_command():
    lines = [line.strip() for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()]
    assert lines.count(TEST_COMMAND) == 1


def test_readme_has_the_command_that_trains():
    lines = [line.strip() for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()]
    pattern = r"python3 -m venv .*accelerate launch .*examples/train_maac\.py\b.*"
    assert [line for line in lines if re.fullmatch(pattern, line)], f"no line of README.md matches {pattern}"
    assert (ROOT / "examples" / "train_maac.py").is_file()


def test_import_loads_nothing_heavy():
    script = (
        "import json, sys\n"
        "import trl\n"
        "before = set(sys.modules)\n"
        "import trl_multiagent\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))\n"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    loaded = json.loads(result.stdout.splitlines()[-1])
    assert "trl_multiagent" in loaded
    assert [name for name in loaded if name.split(".")[0] in HEAVY] == []
