"""Postgres: the only importer of SQLAlchemy, SQLModel and the driver."""
