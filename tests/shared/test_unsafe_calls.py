"""No code of this tree turns bytes from outside into code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("shared", "services", "kernels", "scripts")
MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
BUILTINS = {"eval", "exec", "__import__"}
METHODS = {"send_pyobj", "recv_pyobj", "send_serialized", "recv_serialized"}


def unsafe(source: str) -> Iterator[str]:
    """What in this source can run code that it was not shipped with."""
    for node in ast.walk(ast.parse(source)):
        for name in _imported(node):
            if name.split(".")[0] in MODULES:
                yield f"line {node.lineno}: import of {name}"  # type: ignore[attr-defined]
        if isinstance(node, ast.Call) and (reason := _unsafe_call(node)):
            yield f"line {node.lineno}: {reason}"


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return []


def _unsafe_call(call: ast.Call) -> str | None:
    """Calls by bare name only, since `model.eval()` is harmless; `builtins.eval` is not."""
    name = ast.unparse(call.func)
    if name.removeprefix("builtins.") in BUILTINS:
        return name
    if name.rpartition(".")[2] in METHODS:
        return name
    if name.endswith("import_module") and call.args:
        module = call.args[0]
        if isinstance(module, ast.Constant) and module.value in MODULES:
            return name
    if name == "torch.load" and not any(
        word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in call.keywords
    ):
        return "torch.load without weights_only=True"
    return None


def python_files() -> list[Path]:
    """All Python of the tree, scripts without a suffix included."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    return sorted(path for path in files if path.suffix == ".py" or _has_python_shebang(path))


def _has_python_shebang(path: Path) -> bool:
    with path.open("rb") as content:
        line = content.readline(100)
    return not path.suffix and line.startswith(b"#!") and b"python" in line


@pytest.mark.parametrize("path", python_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_runs_foreign_code(path: Path) -> None:
    assert not list(unsafe(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "import os, marshal as m",
        "from shelve import open",
        "from pickle import loads",
        "importlib.import_module('pickle')",
        "eval(text)",
        "builtins.exec(text)",
        "__import__(name)",
        "socket.send_pyobj(x)",
        "await socket.recv_pyobj()",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
    ],
)
def test_each_unsafe_line_is_found(line: str) -> None:
    assert list(unsafe(f"async def f():\n    {line}"))


@pytest.mark.parametrize(
    "line",
    ["model.eval()", "torch.load(path, weights_only=True)", "json.loads(text)", "import pick"],
)
def test_no_safe_line_is_blamed(line: str) -> None:
    assert not list(unsafe(line))


def test_the_whole_tree_is_read() -> None:
    names = {str(path.relative_to(ROOT)) for path in python_files()}
    assert {"shared/codec.py", "services/scheduler/core.py"} <= names
