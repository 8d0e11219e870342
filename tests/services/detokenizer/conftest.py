from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from services.detokenizer.core import DetokenizerCore
from services.detokenizer.decoder import Decoders


@pytest.fixture(scope="session")
def real(model_dir: Path) -> Decoders:
    return Decoders(model_dir)


@pytest.fixture(scope="session")
def library(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


@pytest.fixture(scope="session")
def byte_ids(library: Tokenizer) -> list[int]:
    """Ids of the real vocabulary that hold a part of a character."""
    return [i for i in range(library.get_vocab_size()) if "\ufffd" in library.decode([i])]


@pytest.fixture
def core(real: Decoders) -> DetokenizerCore:
    return DetokenizerCore(real, frozenset({2}))
