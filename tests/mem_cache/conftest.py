"""Random inputs that can be drawn again: every test begins with a seed that its failure shows."""

import os
import random
import sys

import numpy as np
import pytest


def _seed():
    """TEST_SEED where it is set, 0 in CI, where a red run has to be the same the next time, and else a fresh one."""
    given = os.environ.get("TEST_SEED") or ("0" if os.environ.get("CI") else None)
    return int(given) if given else int(np.random.SeedSequence().generate_state(1)[0])


@pytest.fixture(autouse=True)
def seed():
    """Seeds `random`, numpy's own generator and torch, where a test has it. In an example of hypothesis the first two
    are hypothesis's to seed."""
    seed = _seed()
    print(f"TEST_SEED={seed} repeats this test's random numbers")
    random.seed(seed)
    np.random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)
    return seed


@pytest.fixture
def rng(seed):
    """numpy's generator, from the test's seed."""
    return np.random.default_rng(seed)
