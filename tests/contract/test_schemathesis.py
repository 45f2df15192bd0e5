"""The contract, tried by a machine: whatever it sends, no answer is a server error or off the document."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
import uvicorn
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from service.api.app import create_app, openapi_document
from service.ledger.session import open_ledger
from service.settings import Settings
from tests.api.conftest import make_key
from tests.servers import SECRET_KEYS, Servers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

schema = schemathesis.openapi.from_dict(openapi_document())


class Serving:
    """The API on a port of its own, in a thread."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url
        self.key = key


@pytest.fixture(scope="module")
def serving(servers: Servers, template_database: str) -> Iterator[Serving]:
    database_url = servers.create_database(template_database)
    app = create_app(
        Settings.model_validate(
            {"database_url": database_url, "redis_url": servers.redis_url, "secret_keys": SECRET_KEYS}
        )
    )
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, ws="none"))
    thread = threading.Thread(target=server.run)
    thread.start()
    asyncio.run(_until_started(server))
    port = server.servers[0].sockets[0].getsockname()[1]
    yield Serving(f"http://127.0.0.1:{port}", asyncio.run(_key(database_url)))
    server.should_exit = True
    thread.join()
    servers.drop_database(database_url)


async def _until_started(server: uvicorn.Server) -> None:
    async with asyncio.timeout(20):
        while not server.started:  # noqa: ASYNC110 — another thread starts it
            await asyncio.sleep(0)


async def _key(database_url: str) -> str:
    ledger = open_ledger(
        database_url, connections_max=1, acquire_timeout_seconds=5, statement_timeout_seconds=5, name="tests"
    )
    try:
        return await make_key(ledger)
    finally:
        await ledger.close()


@schema.parametrize()
@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
def test_no_request_breaks_the_contract(case: Any, serving: Serving) -> None:
    headers = {"authorization": f"Bearer {serving.key}"}
    response = case.call(base_url=serving.url, headers=headers)
    assert response.status_code < 500 or (response.status_code == 503 and case.path == "/readyz")
    case.validate_response(
        response, checks=[status_code_conformance, content_type_conformance, response_schema_conformance]
    )


def test_the_service_still_answers_after_all_that(serving: Serving) -> None:
    answer = httpx.get(f"{serving.url}/deliveries", headers={"authorization": f"Bearer {serving.key}"})
    assert answer.status_code == 200
