"""Real servers for every test that asks for one; see tests/servers.py."""

from __future__ import annotations

import gc

pytest_plugins = ["tests.servers", "tests.world"]


def pytest_collection_finish() -> None:
    """What the tests are made of lives as long as they: the collector need not walk it again and again."""
    gc.collect()
    gc.freeze()
