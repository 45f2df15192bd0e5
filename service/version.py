"""The version, once."""

from __future__ import annotations

from importlib.metadata import version
from typing import Final

VERSION: Final = version("hookledger")
USER_AGENT: Final = f"Hookledger/{VERSION}"
