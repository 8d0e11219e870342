"""No code of this tree turns bytes from outside into code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("shared", "services", "kernels", "scripts")
MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
MODULES |= {"jsonpickle", "pickletools"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
METHODS = {"send_pyobj", "recv_pyobj", "send_serialized", "recv_serialized", "read_pickle"}
SHELLS = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"}
SHELLS |= {"asyncio.create_subprocess_shell", "commands.getoutput"}
YAML = {"yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "yaml.unsafe_load_all"}
JINJA = {"Environment", "Template", "NativeEnvironment"}  # without a sandbox
TRUE, FALSE = "True", "False"


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
    if name in SHELLS or name.rpartition(".")[2] in JINJA:
        return name
    words = {word.arg: ast.unparse(word.value) for word in call.keywords}
    if name in YAML and "Safe" not in words.get("Loader", ""):
        return f"{name} without a safe loader"
    if name == "torch.load" and words.get("weights_only") != TRUE:
        return "torch.load without weights_only=True"
    if name in ("np.load", "numpy.load") and words.get("allow_pickle", FALSE) != FALSE:
        return f"{name} with pickles"
    wrong = {"shell": TRUE, "trust_remote_code": TRUE}
    return next((f"{one}={words[one]}" for one in wrong if words.get(one, FALSE) != FALSE), None)


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
        "compile(text, '', 'exec')",
        "os.system(command)",
        "subprocess.run(command, shell=True)",
        "subprocess.Popen(command, shell=shell)",
        "await asyncio.create_subprocess_shell(command)",
        "yaml.load(text)",
        "yaml.load(text, Loader=yaml.Loader)",
        "np.load(path, allow_pickle=True)",
        "pandas.read_pickle(path)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
        "jinja2.Environment().from_string(text)",
    ],
)
def test_each_unsafe_line_is_found(line: str) -> None:
    assert list(unsafe(f"async def f():\n    {line}"))


@pytest.mark.parametrize(
    "line",
    [
        *("model.eval()", "torch.load(path, weights_only=True)", "json.loads(text)"),
        *("import pick", "yaml.safe_load(text)", "yaml.load(text, Loader=yaml.SafeLoader)"),
        *("re.compile(text)", "subprocess.run(words, shell=False)", "np.load(path)"),
        *("ImmutableSandboxedEnvironment()", "AutoModel.from_pretrained(path)"),
    ],
)
def test_no_safe_line_is_blamed(line: str) -> None:
    assert not list(unsafe(line))


def test_the_whole_tree_is_read() -> None:
    names = {str(path.relative_to(ROOT)) for path in python_files()}
    some = {"shared/codec.py", "services/scheduler/core.py", "scripts/frames.py", "scripts/soak"}
    assert some <= names
    suffixless = {path for path in (ROOT / "scripts").iterdir() if not path.suffix}
    shells = {path for path in suffixless if path.is_file() and not _has_python_shebang(path)}
    assert all(
        "bash" in path.read_text().split("\n", 1)[0] or path.name == "environment"
        for path in shells
    )
