"""One small random model and its compiled forward pass for all tests of this folder."""

import jax
import numpy as np
import pytest
from small_model import VOCAB, random_model, small_config

ROWS, LENGTH = 2, 12


@pytest.fixture(scope="session")
def model():
    return random_model(small_config())


@pytest.fixture(scope="session")
def tokens():
    return np.random.default_rng(1).integers(0, VOCAB, (ROWS, LENGTH), np.int32)


@pytest.fixture(scope="session")
def forward():
    """(model, tokens [2, 12], segment_ids) -> Output with selections."""
    return jax.jit(lambda model, tokens, segments: model(tokens, segment_ids=segments, return_selections=True))


@pytest.fixture(scope="session")
def plain(model, tokens, forward):
    """The forward pass of `tokens`, every one real and each row one segment."""
    return forward(model, tokens, np.ones_like(tokens))
