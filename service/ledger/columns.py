"""The rows that a statement is given: by the column, so that one statement takes any number of them.

A single row is given as plain values. To take it from a row of arrays costs Postgres more than to store it,
and it is what most statements carry while there is little to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class Columns:
    """Names and SQL types of such rows, and the two ways of giving them; each name is a placeholder.

    `together` and `alone` stand after FROM or JOIN: `alias` is what the statement calls a row.
    """

    def __init__(self, alias: str, types: Mapping[str, str]) -> None:
        named = f"{alias}({', '.join(types)})"
        arrays = ", ".join(f"CAST(:{name} AS {sql_type}[])" for name, sql_type in types.items())
        values = ", ".join(f"CAST(:{name} AS {sql_type})" for name, sql_type in types.items())
        self.together = f"unnest({arrays}) AS {named}"
        self.alone = f"(VALUES ({values})) AS {named}"


def first_of(columns: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """The values of the first row."""
    return {name: values[0] for name, values in columns.items()}
