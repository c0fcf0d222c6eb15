"""The response is, or contains, a JSON object that a schema accepts."""

from __future__ import annotations

import functools
import json
from typing import Any, NoReturn

import jsonschema
import referencing

from hybridflow.errors import RewardError
from hybridflow.rewards.verifiers.columns import column, from_json
from hybridflow.rewards.verifiers.fences import fenced_blocks

MAX_OBJECTS = 64  # places in a response where an object may begin that are tried


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")  # NaN and Infinity, which Python's reader takes


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _decoded(text: str, start: int) -> tuple[Any, int] | None:
    """The JSON value at `start` and where it ends; None: there is none."""
    try:
        return _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):  # also numbers of more digits than Python reads, and nesting without end
        return None


def find_object(response: str) -> dict[str, Any] | None:
    """The whole response, or else its last fenced block, or else its last outermost object in the text."""
    fenced = [block.text for block in fenced_blocks(response) if block.language in ("", "json")]
    for text in [response, *fenced[-1:]]:
        text = text.strip()
        found = _decoded(text, 0) if text else None
        if found is not None and found[1] == len(text) and isinstance(found[0], dict):
            return found[0]
    last, position = None, response.find("{")
    for _ in range(MAX_OBJECTS):
        if position < 0:
            break
        found = _decoded(response, position)
        if found is not None:
            last = found[0]
        position = response.find("{", found[1] if found is not None else position + 1)
    return last


@functools.lru_cache(maxsize=256)
def _validator(schema: str) -> jsonschema.protocols.Validator:
    parsed = json.loads(schema)
    kind = jsonschema.validators.validator_for(parsed, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(parsed)
    except jsonschema.SchemaError as error:
        raise RewardError(f"the schema is not valid: {error.message} at {list(error.path)}") from error
    return kind(parsed, registry=referencing.Registry())  # an empty registry: $ref never reaches the network


def score(
    prompt: str, response: str, *, schema: dict[str, Any] | str | None = None, schema_key: str = "schema", **columns: Any
) -> dict[str, float]:
    """1 if the object found is valid, 0 otherwise. The schema is `schema`, or the row's in column `schema_key` (mapping or JSON text).

    "unparsed" = 1: no JSON object was found. "violations": how many rules the object breaks at its top level and below.
    """
    given = from_json(schema if schema is not None else column(columns, schema_key, "schema_key"), schema_key)
    if not isinstance(given, dict):
        raise RewardError(f"a schema is a JSON object, not {type(given).__name__}: {given!r}")
    found = find_object(response)
    if found is None:
        return {"score": 0.0, "unparsed": 1.0, "violations": 0.0}
    try:
        violations = sum(1 for _ in _validator(json.dumps(given, sort_keys=True)).iter_errors(found))
    except referencing.exceptions.Unresolvable as error:
        raise RewardError(f"the schema refers to {error.ref!r}, which is not in it; schemas are not fetched") from error
    return {"score": float(violations == 0), "unparsed": 0.0, "violations": float(violations)}
