"""`./run bench`: measures the HTTP engine against others, on one receiver, in one run."""

from __future__ import annotations

from bench.engine import main

main()
