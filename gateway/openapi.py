"""The OpenAPI document of the API, generated from routes and models: ``docs/openapi.json``."""

from __future__ import annotations

import json
from typing import Any, Final

from fastapi import FastAPI

from broker_config.settings import Settings
from gateway.app import create_app
from nekro_client.models import Problem

__all__ = ["document"]

_SECURITY: Final = {
    "key": {"type": "http", "scheme": "bearer", "description": "A key of `nekro keys create`: `nk_…`."}
}
_IDEMPOTENCY: Final = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "A repetition with the same key and body gets the first answer, and has no second effect.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255},
}
_PROBLEM: Final = {
    "description": "An error, as a problem document (RFC 9457).",
    "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}},
}
_OPENAI_ERROR: Final = {
    "description": "An error, in the form of OpenAI's API.",
    "content": {"application/json": {"schema": {"type": "object", "required": ["error"]}}},
}
#: POST operations without idempotency keys: those in the form of Nekro Agent's, whose clients send none, and
#: two that store nothing.
_NOT_ONCE: Final = (
    "/api/adapters/sse/connect", "/api/webhook/{endpoint}", "/api/v1/stream-tickets", "/console/session",
)  # fmt: skip


def document() -> str:
    """Return the document as JSON text with sorted keys."""
    # No environment: the document describes the release, not an installation.
    app = create_app(Settings.model_construct())
    return json.dumps(_completed(app), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _completed(app: FastAPI) -> dict[str, Any]:
    api = app.openapi()
    schemas = api.setdefault("components", {}).setdefault("schemas", {})
    schemas["Problem"] = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    api["components"]["securitySchemes"] = _SECURITY
    api["security"] = [{"key": []}]
    for probe in ("/healthz", "/readyz"):
        api["paths"][probe]["get"]["security"] = []
    api["paths"]["/console/session"]["post"]["security"] = []
    for path, operations in api["paths"].items():
        for method, operation in operations.items():
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = _OPENAI_ERROR if path.startswith("/v1/") else _PROBLEM
            if method == "post" and path not in _NOT_ONCE:
                operation.setdefault("parameters", []).append(_IDEMPOTENCY)
    return api
