"""The embedded Postgres and Redis of dev mode and the tests."""
