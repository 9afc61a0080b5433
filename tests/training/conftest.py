"""The tiny model and its tokenizer, made once; a test that trains gets a copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small import make_model, make_start, make_tokenizer, twin
from torch import nn


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="session")
def first(tokenizer: Any) -> nn.Module:
    """The starting weights; never trained."""
    return make_model(tokenizer)


@pytest.fixture
def model(first: nn.Module) -> nn.Module:
    return twin(first)


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights as a folder."""
    return make_start(tmp_path_factory.mktemp("start") / "model")
