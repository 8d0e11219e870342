"""Fixtures for every test: the real default model, prepared once and cached outside the tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.launcher.models import prepare_model


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The prepared directory of SmolLM2-135M-Instruct."""
    return prepare_model("", print)
