"""Real servers for every test that asks for one; see tests/servers.py."""

from __future__ import annotations

pytest_plugins = ["tests.servers", "tests.world"]
