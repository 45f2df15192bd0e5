"""What `hookledger dev` says when it is ready: everything a first delivery takes, to be pasted as it stands."""

from __future__ import annotations

import json
import os
import secrets
from typing import Final, TextIO

from service.embedded.folder import DataFolder

LISTEN_PORT: Final = 9000


def greet(api_url: str, api_key: str, folder: DataFolder, out: TextIO) -> None:
    """Say where the service is, how to make it deliver, and where to look next."""
    bold, plain = ("\x1b[1m", "\x1b[0m") if out.isatty() and "NO_COLOR" not in os.environ else ("", "")
    authorization = f"-H 'Authorization: Bearer {api_key}'"
    elsewhere = "" if folder.place == folder.path else f", the servers' own in {folder.place}"
    lines = (
        "",
        f"{bold}Hookledger is ready.{plain}",
        "",
        f"  API      {api_url}  (documentation: {api_url}/docs)",
        f"  API key  {api_key}",
        f"  data     {folder.path}{elsewhere}",
        "",
        "In a second terminal, start a receiver that shows what arrives:",
        "",
        f"  {bold}./run listen --port {LISTEN_PORT}{plain}",
        "",
        "In a third, send it a webhook:",
        "",
        f"{bold}{_curl(api_url, authorization)}{plain}",
        "",
        "Then ask what became of it, with the id from the answer:",
        "",
        f"curl -sS {authorization} {api_url}/deliveries/ID",
        "",
        "README.md says how to go on. Ctrl-C stops everything.",
        "",
    )
    out.write("\n".join(lines) + "\n")
    out.flush()


def _curl(api_url: str, authorization: str) -> str:
    """One line, so that it survives any terminal. Its key is new each time: a used one would be answered, not sent."""
    body = {
        "url": f"http://127.0.0.1:{LISTEN_PORT}/",
        "event_type": "shipment.dispatched",
        "payload": {"shipment": "shp_8472", "status": "dispatched"},
    }
    return (
        f"curl -sS {authorization} -H 'Idempotency-Key: try-{secrets.token_hex(4)}' "
        f"-H 'Content-Type: application/json' {api_url}/deliveries -d '{json.dumps(body)}'"
    )
