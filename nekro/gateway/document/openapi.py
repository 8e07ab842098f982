"""The OpenAPI document of the API, from routes and models: ``docs/openapi.json``, ``/openapi.json``."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Final

from fastapi import APIRouter, FastAPI, Request, Response

from nekro.base.release import release
from nekro.gateway.dependencies import IdentityDep
from nekro.gateway.document.examples import BY_MODEL, BY_OPERATION, PARAMETERS
from nekro_client import models
from nekro_client.models import Problem

__all__ = ["api_of", "document", "router"]

router = APIRouter(tags=["probes"])

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
    "content": {
        "application/json": {
            "schema": {"type": "object", "required": ["error"]},
            "example": {
                "error": {
                    "message": "model: there is one model, 'nekro'",
                    "type": "invalid_request_error",
                    "param": "model",
                    "code": "model_not_found",
                }
            },
        }
    },
}
#: The line of a field, and its description above it.
_FIELD: Final = re.compile(r"((?:^    #: .*\n)+)    (\w+): ", re.MULTILINE)
#: POST operations without idempotency keys: those in the form of Nekro Agent's, whose clients send none, and
#: two that store nothing.
_NOT_ONCE: Final = (
    "/api/adapters/sse/connect", "/api/webhook/{endpoint}", "/api/v1/stream-tickets", "/console/session",
)  # fmt: skip


@router.get("/openapi.json", include_in_schema=False, response_class=Response)
async def served_document(request: Request, identity: IdentityDep) -> Response:
    """Return the document of this gateway, with its release and its address."""
    api = await api_of(request.app)
    served = {
        **api,
        "info": {**api["info"], "version": release()},
        "servers": [{"url": str(request.base_url).rstrip("/")}],
    }
    return Response(json.dumps(served), media_type="application/json")


async def api_of(app: FastAPI) -> dict[str, Any]:
    """Return the document of an application, which is made once, and not on the event loop."""
    if not hasattr(app.state, "api"):
        app.state.api = await asyncio.to_thread(_completed, app)
    api: dict[str, Any] = app.state.api
    return api


def document(app: FastAPI) -> str:
    """Return the document of an application as JSON text with sorted keys."""
    return json.dumps(_completed(app), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _completed(app: FastAPI) -> dict[str, Any]:
    api = deepcopy(app.openapi())
    schemas = api.setdefault("components", {}).setdefault("schemas", {})
    schemas["Problem"] = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    _describe_fields(schemas)
    api["components"]["securitySchemes"] = _SECURITY
    api["security"] = [{"key": []}]
    api["servers"] = [{"url": "http://127.0.0.1:8600", "description": "A gateway with the default settings."}]
    for probe in ("/healthz", "/readyz"):
        api["paths"][probe]["get"]["security"] = []
    api["paths"]["/console/session"]["post"]["security"] = []
    for path, operations in api["paths"].items():
        for method, operation in operations.items():
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = deepcopy(
                _OPENAI_ERROR if path.startswith("/v1/") else _PROBLEM
            )
            if method == "post" and path not in _NOT_ONCE:
                operation.setdefault("parameters", []).append(_IDEMPOTENCY)
            _add_examples(operation)
    return api


def _describe_fields(schemas: dict[str, Any]) -> None:
    """Take the descriptions of fields from the comments above them."""
    texts: dict[tuple[str, str], str] = {}
    for source in re.split(r"^class ", inspect.getsource(models), flags=re.MULTILINE)[1:]:
        owner = re.split(r"\W", source, maxsplit=1)[0]
        for comment, field in _FIELD.findall(source):
            text = " ".join(line.strip().removeprefix("#:").strip() for line in comment.strip().split("\n"))
            texts[owner, field.rstrip("_")] = text.replace("``", "`")
    for name, schema in schemas.items():
        for field, described in schema.get("properties", {}).items():
            for owner in getattr(models, name.partition("_")[0], object).__mro__:
                if (owner.__name__, field) in texts:
                    described.setdefault("description", texts[owner.__name__, field])


def _add_examples(operation: dict[str, Any]) -> None:
    for parameter in operation.get("parameters", ()):
        name = parameter["name"]
        if (example := PARAMETERS.get(f"{operation['tags'][0]} {name}", PARAMETERS.get(name))) is not None:
            parameter["example"] = example
    own = BY_OPERATION.get(operation["operationId"], {})
    if "requestBody" in operation:
        _add_to_content(operation["requestBody"]["content"], own.get("body", {}))
    for status, answer in operation["responses"].items():
        stated = own.get("answer", {}) if status.startswith("2") else {}
        if stated:
            _add_to_content(answer.setdefault("content", {}), stated)
        elif "content" in answer:
            _add_to_content(answer["content"], {})


def _add_to_content(content: dict[str, Any], stated: Mapping[str, Any]) -> None:
    for kind, example in stated.items():
        schema = {"type": "string" if isinstance(example, str) else "object"}
        content.setdefault(kind, {"schema": schema})["example"] = example
    for one in content.values():
        name = one.get("schema", {}).get("$ref", "").rpartition("/")[2]
        if (example := BY_MODEL.get(name)) is not None:
            one.setdefault("example", example)
        elif name.startswith("Page_"):
            item = BY_MODEL[name.removeprefix("Page_").rstrip("_")]
            one["example"] = {"items": [item], "next_cursor": None}
