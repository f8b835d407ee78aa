# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""The import rules of the package, read from its source with `ast`.

The direction of imports keeps the maths, the models and the rollouts usable and testable without a trainer, back ends
in one place, and the names that upstream may change without notice in one file.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pytest


ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "trl_multiagent"
SCRIPT_FOLDERS = ("benchmarks", "examples")

FUNCTIONAL_MAY_IMPORT = ("__future__", "collections", "dataclasses", "math", "torch", "typing")
UPSTREAM = ("accelerate", "datasets", "peft", "transformers", "trl")
UPSTREAM_PRIVATE_MODULES = (
    "trl.chat_template_utils",
    "trl.data_utils",
    "trl.distributed",
    "trl.import_utils",
    "trl.models.utils",
    "trl.trainer.base_trainer",
    "trl.trainer.utils",
)
PATH_CALLS = ("Path", "PurePath", "exists", "glob", "isdir", "isfile", "join", "joinpath", "listdir", "open", "rglob")


# --- Reading a file ---


@dataclass(frozen=True)
class Reference:
    """A dotted name that a file imports, or reaches through an attribute of something it imported."""

    line: int
    name: str
    is_import: bool

    def within(self, *modules: str) -> bool:
        return any(self.name == module or self.name.startswith(module + ".") for module in modules)


@dataclass(frozen=True)
class SourceFile:
    path: str  # relative to the root of the repository, with forward slashes
    text: str

    @property
    def module_parts(self) -> tuple[str, ...]:
        parts = PurePosixPath(self.path).with_suffix("").parts
        return parts[:-1] if parts[-1] == "__init__" else parts

    @property
    def package_parts(self) -> tuple[str, ...]:
        """The package that a relative import of one dot starts from."""
        return PurePosixPath(self.path).parent.parts

    @property
    def area(self) -> str:
        """The module or package right below `trl_multiagent`; empty for the top-level `__init__`, "." elsewhere."""
        if self.module_parts[:1] != (PACKAGE,):
            return "."
        return self.module_parts[1] if len(self.module_parts) > 1 else ""

    def references(self) -> list[Reference]:
        collector = _ReferenceCollector(self)
        tree = ast.parse(self.text, filename=self.path)
        # two passes: an alias may be used above the import that binds it (inside a function)
        collector.visit(tree)
        collector.imports_done = True
        collector.visit(tree)
        return sorted(collector.found, key=lambda reference: (reference.line, reference.name))


class _ReferenceCollector(ast.NodeVisitor):
    def __init__(self, source: SourceFile):
        self.source = source
        self.bound: dict[str, str] = {}  # local name -> dotted name
        self.imports_done = False
        self.found: set[Reference] = set()

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(node, alias.name, is_import=True)
            if alias.asname:
                self.bound[alias.asname] = alias.name
            else:
                top = alias.name.split(".")[0]
                self.bound[top] = top

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = self._absolute("." * node.level + (node.module or ""))
        for alias in node.names:
            name = base if alias.name == "*" else f"{base}.{alias.name}"
            self._add(node, name, is_import=True)
            self.bound[alias.asname or alias.name] = name

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
        if function in ("import_module", "__import__") and node.args and isinstance(node.args[0], ast.Constant):
            self._add(node, self._absolute(str(node.args[0].value)), is_import=True)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        attributes, value = [], node
        while isinstance(value, ast.Attribute):
            attributes.append(value.attr)
            value = value.value
        if not isinstance(value, ast.Name):
            self.generic_visit(node)
        elif self.imports_done and value.id in self.bound:
            self._add(node, ".".join([self.bound[value.id], *reversed(attributes)]), is_import=False)

    def _absolute(self, name: str) -> str:
        level = len(name) - len(name.lstrip("."))
        if level == 0:
            return name
        package = self.source.package_parts
        parts = package[: len(package) - (level - 1)]
        return ".".join([*parts, *filter(None, [name[level:]])])

    def _add(self, node: ast.AST, name: str, is_import: bool) -> None:
        self.found.add(Reference(node.lineno, name, is_import))


# --- The rules: each yields the line and what is wrong there ---


Violations = Iterator[tuple[int, str]]


def functional_sees_only_torch(source: SourceFile) -> Violations:
    if source.area == "functional":
        for reference in source.references():
            if reference.is_import and not reference.within(*FUNCTIONAL_MAY_IMPORT, f"{PACKAGE}.functional"):
                yield reference.line, f"`functional` imports {reference.name}"


def models_and_rollouts_do_not_import_trainers(source: SourceFile) -> Violations:
    if source.area in ("models", "rollouts"):
        yield from _imports_of_trainers(source)


def callbacks_do_not_import_trainers(source: SourceFile) -> Violations:
    if source.area == "callbacks":
        yield from _imports_of_trainers(source)


def only_cli_imports_trainers(source: SourceFile) -> Violations:
    # "" is the top-level `__init__`, which offers the trainers lazily; "." is a script outside the package
    if source.area not in ("cli", "trainers", "", "."):
        yield from _imports_of_trainers(source)


def _imports_of_trainers(source: SourceFile) -> Violations:
    for reference in source.references():
        parts = reference.name.split(".")
        if reference.within(f"{PACKAGE}.trainers"):
            yield reference.line, f"`{source.area}` imports {reference.name}"
        elif parts[0] == PACKAGE and len(parts) > 1 and parts[1][:1].isupper():
            # a class offered by the lazy top-level `__init__`, which may pull in the trainers
            yield reference.line, f"`{source.area}` imports {reference.name}: name the module that defines it"


def upstream_privates_only_in_compat(source: SourceFile) -> Violations:
    if source.path == f"{PACKAGE}/_compat.py":
        return
    for reference in source.references():
        if not reference.within(*UPSTREAM):
            continue
        private = any(part.startswith("_") and not part.startswith("__") for part in reference.name.split("."))
        # the overrides of `GRPOAgent` name private methods of the class that they override
        if not reference.is_import and source.area == "agents":
            private = False
        if private or reference.within(*UPSTREAM_PRIVATE_MODULES):
            yield reference.line, f"private upstream name {reference.name}: take it from `{PACKAGE}._compat`"


def back_ends_only_in_placement(source: SourceFile) -> Violations:
    if source.area != "placement":
        for reference in source.references():
            if reference.within("deepspeed", "torch.distributed"):
                yield reference.line, f"{reference.name}: only `{PACKAGE}.placement` knows back ends"


def no_folder_named_shared(source: SourceFile) -> Violations:
    tree = ast.parse(source.text, filename=source.path)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            is_path = "/" in node.value and not re.search(r"\s", node.value)
            if is_path and "shared" in node.value.split("/"):
                yield node.lineno, f"reads {node.value!r}"
        for operand in _path_operands(node):
            if isinstance(operand, ast.Constant) and operand.value == "shared":
                yield operand.lineno, "reads a folder named 'shared'"


def _path_operands(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return [node.left, node.right]
    if isinstance(node, ast.Call):
        function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
        return node.args if function in PATH_CALLS else []
    return []


RULES = {
    rule.__name__: rule
    for rule in (
        functional_sees_only_torch,
        models_and_rollouts_do_not_import_trainers,
        callbacks_do_not_import_trainers,
        only_cli_imports_trainers,
        upstream_privates_only_in_compat,
        back_ends_only_in_placement,
        no_folder_named_shared,
    )
}


# --- The package obeys them ---


def read_sources(*folders: str) -> list[SourceFile]:
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [SourceFile(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in paths]


def test_the_package_was_found():
    assert f"{PACKAGE}/__init__.py" in [source.path for source in read_sources(PACKAGE)]


@pytest.mark.parametrize("rule", RULES)
def test_import_rule(rule):
    # scripts are users of the package: of the rules, only the last one is about them
    folders = (PACKAGE, *SCRIPT_FOLDERS) if rule == "no_folder_named_shared" else (PACKAGE,)
    violations = [
        f"{source.path}:{line}: {message}"
        for source in read_sources(*folders)
        for line, message in RULES[rule](source)
    ]
    assert not violations, "\n" + "\n".join(violations)


# --- The checker itself ---


def lines_found(rule: str, path: str, text: str) -> list[int]:
    return sorted({line for line, _ in RULES[rule](SourceFile(path, text))})


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        ("functional_sees_only_torch", "functional/returns.py", "import numpy as np"),
        ("functional_sees_only_torch", "functional/returns.py", "import torchvision"),
        ("functional_sees_only_torch", "functional/returns.py", "from ..models import team"),
        ("functional_sees_only_torch", "functional/__init__.py", "from .. import models"),
        ("functional_sees_only_torch", "functional.py", "from .models import team"),
        ("models_and_rollouts_do_not_import_trainers", "models/team.py", "from ..trainers import MAGRPOTrainer"),
        ("models_and_rollouts_do_not_import_trainers", "models/team.py", "from .. import trainers"),
        ("models_and_rollouts_do_not_import_trainers", "models/team.py", "from .. import MAGRPOTrainer"),
        ("models_and_rollouts_do_not_import_trainers", "rollouts.py", "from .trainers.x import y"),
        ("models_and_rollouts_do_not_import_trainers", "rollouts/tree.py", "import trl_multiagent.trainers.x as x"),
        ("models_and_rollouts_do_not_import_trainers", "rollouts/__init__.py", "from ..trainers import x"),
        (
            "models_and_rollouts_do_not_import_trainers",
            "models/team.py",
            "import importlib; importlib.import_module('trl_multiagent.trainers')",
        ),
        (
            "models_and_rollouts_do_not_import_trainers",
            "models/team.py",
            "import importlib; importlib.import_module('..trainers', __package__)",
        ),
        ("callbacks_do_not_import_trainers", "callbacks/wandb.py", "from ..trainers import x"),
        ("callbacks_do_not_import_trainers", "callbacks.py", "from trl_multiagent.trainers.x import y"),
        ("only_cli_imports_trainers", "agents/grpo_agent.py", "from ..trainers import x"),
        ("only_cli_imports_trainers", "rewards.py", "from .trainers import x"),
        ("only_cli_imports_trainers", "rewards.py", "import trl_multiagent; trl_multiagent.trainers.x"),
        ("only_cli_imports_trainers", "rewards.py", "import trl_multiagent as t; t.MAGRPOTrainer"),
        ("upstream_privates_only_in_compat", "trainers/x.py", "from trl.trainer.grpo_trainer import _x"),
        ("upstream_privates_only_in_compat", "trainers/x.py", "from transformers.utils import _LazyModule"),
        ("upstream_privates_only_in_compat", "trainers/x.py", "from trl._lazy_module import X"),
        ("upstream_privates_only_in_compat", "trainers/x.py", "from trl.trainer.utils import pad"),
        ("upstream_privates_only_in_compat", "trainers/x.py", "from trl.trainer import utils"),
        ("upstream_privates_only_in_compat", "trainers/x.py", "from trl import data_utils"),
        ("upstream_privates_only_in_compat", "trainers/x.py", "import trl.chat_template_utils"),
        ("upstream_privates_only_in_compat", "trainers/x.py", "import trl; trl.models.utils.unwrap"),
        ("upstream_privates_only_in_compat", "trainers/x.py", "from trl import GRPOTrainer; GRPOTrainer._generate"),
        ("upstream_privates_only_in_compat", "agents/grpo_agent.py", "from trl.distributed import x"),
        ("upstream_privates_only_in_compat", "agents/_compat.py", "from trl.distributed import x"),
        ("back_ends_only_in_placement", "trainers/x.py", "import deepspeed"),
        ("back_ends_only_in_placement", "_compat.py", "from deepspeed.zero import GatheredParameters"),
        ("back_ends_only_in_placement", "trainers/x.py", "import torch.distributed as dist"),
        ("back_ends_only_in_placement", "trainers/x.py", "from torch import distributed as dist"),
        ("back_ends_only_in_placement", "trainers/x.py", "import torch; torch.distributed.barrier()"),
        ("back_ends_only_in_placement", "rollouts/x.py", "import torch; torch.distributed.get_world_size() > 1"),
        ("no_folder_named_shared", "rewards.py", "open('shared/data.json')"),
        ("no_folder_named_shared", "rewards.py", "path = f'{root}/shared/data.json'"),
        ("no_folder_named_shared", "rewards.py", "path = root / 'shared' / 'data.json'"),
        ("no_folder_named_shared", "rewards.py", "os.path.join(root, 'shared', 'data.json')"),
        ("no_folder_named_shared", "rewards.py", "Path('shared')"),
    ],
)
def test_checker_catches(rule, path, text):
    assert lines_found(rule, f"{PACKAGE}/{path}", f"x = 0\n{text}\ny = 1\n") == [2]


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        ("functional_sees_only_torch", "functional/returns.py", "import math\nimport torch\nfrom .masking import x"),
        ("functional_sees_only_torch", "functional/returns.py", "from trl_multiagent.functional.masking import x"),
        ("functional_sees_only_torch", "functional/returns.py", "import torch.nn.functional as F\nF.softmax(x, -1)"),
        ("functional_sees_only_torch", "models/team.py", "import numpy"),
        ("models_and_rollouts_do_not_import_trainers", "models/team.py", "from ..agents import trainers_of"),
        ("models_and_rollouts_do_not_import_trainers", "models/team.py", "from .. import __version__, functional"),
        ("models_and_rollouts_do_not_import_trainers", "models/team.py", "from .trainers_like import x"),
        ("only_cli_imports_trainers", "cli/main.py", "from ..trainers import x"),
        ("only_cli_imports_trainers", "trainers/x.py", "from .multi_agent_trainer import MultiAgentTrainer"),
        ("only_cli_imports_trainers", "__init__.py", "from .trainers import x"),
        ("only_cli_imports_trainers", "agents/x.py", "from trl.trainer.grpo_trainer import GRPOTrainer"),
        ("upstream_privates_only_in_compat", "_compat.py", "from trl.trainer.utils import pad"),
        ("upstream_privates_only_in_compat", "trainers/x.py", "from .._compat import pad\nfrom . import _private"),
        ("upstream_privates_only_in_compat", "trainers/x.py", "import trl\ntrl.__version__\nself._x"),
        ("upstream_privates_only_in_compat", "trainers/x.py", "from trl.trainer.utils_of_ours import x"),
        ("upstream_privates_only_in_compat", "agents/x.py", "from trl import GRPOTrainer\nGRPOTrainer._generate"),
        ("back_ends_only_in_placement", "placement/x.py", "import deepspeed\nimport torch.distributed as dist"),
        ("back_ends_only_in_placement", "trainers/x.py", "from torch.distributions import Categorical"),
        ("back_ends_only_in_placement", "trainers/x.py", "from transformers.integrations.deepspeed import x"),
        ("no_folder_named_shared", "rewards.py", "'''Critics: shared/separate.'''\nmode = 'shared'"),
        ("no_folder_named_shared", "rewards.py", "raise ValueError('a shared/separate critic')"),
        ("no_folder_named_shared", "rewards.py", "path = root / 'shared_base'"),
    ],
)
def test_checker_lets_pass(rule, path, text):
    assert lines_found(rule, f"{PACKAGE}/{path}", text) == []


def test_checker_sees_an_alias_that_is_bound_below_its_use():
    text = "def f():\n    return torch.distributed.is_initialized()\n\nimport torch\n"
    assert lines_found("back_ends_only_in_placement", f"{PACKAGE}/rewards.py", text) == [2]
