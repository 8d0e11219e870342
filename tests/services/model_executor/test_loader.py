"""What is refused, and how clearly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from services.model_executor.loader import choose_device
from shared.service import StartError
from shared.settings import Settings
from tests.services.model_executor.tiny_models import COMMON, make_runner, save

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "bias instead of positions": ("BloomConfig", {"n_layer": 2, "n_head": 4}, "attention layers"),
    "no attention interface": ("FalconConfig", {}, "its attention cannot be replaced"),
    "arguments that do not arrive": ("StableLmConfig", {}, "arguments do not reach"),
    "a state instead of a cache": ("MambaConfig", {}, "linear_attention"),
    "layers of another kind": (
        "Lfm2Config",
        {"layer_types": ["conv", "full_attention"]},
        "layers of type conv",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_served_are_refused(name: str, tmp_path: Path) -> None:
    config, changes, reason = REFUSED[name]
    info = save(getattr(transformers, config)(**COMMON | changes), tmp_path)
    with pytest.raises(StartError, match=reason) as refusal:
        make_runner(info)
    assert str(refusal.value).startswith(f"--model: {info.model_type} cannot be served: ")
    assert "\n" not in str(refusal.value)


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    info = save(transformers.LlamaConfig(**COMMON), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"is_encoder_decoder": True}))
    with pytest.raises(StartError, match="an encoder and a decoder"):
        make_runner(info)


def test_missing_weights_are_not_made_up(tmp_path: Path) -> None:
    info = save(transformers.LlamaConfig(**COMMON), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(StartError, match=r"missing.*layers\.1\.mlp\.up_proj"):
        make_runner(info)


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    info = save(transformers.LlamaConfig(**COMMON), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "pytorch_model.bin")
    with pytest.raises(StartError):
        make_runner(info)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_an_absent_device_is_named() -> None:
    assert choose_device(Settings(device="auto")).type == "cpu"
    with pytest.raises(StartError, match="--device cuda"):
        choose_device(Settings(device="cuda"))


@pytest.mark.parametrize(
    ("stored", "setting", "used"),
    [
        ("float32", "auto", "float32"),
        ("bfloat16", "auto", "bfloat16"),
        ("float16", "auto", "bfloat16"),
        ("bfloat16", "float32", "float32"),
    ],
)
def test_the_type_of_the_weights(stored: str, setting: str, used: str, tmp_path: Path) -> None:
    info = save(transformers.LlamaConfig(**COMMON), tmp_path, getattr(torch, stored))
    assert make_runner(info, dtype=setting).announce().fingerprint == f"{info.fingerprint}-{used}"
