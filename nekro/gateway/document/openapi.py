"""The OpenAPI document of the API, from routes and models, and its page for people, without scripts.

It is ``docs/openapi.json``, ``/openapi.json`` and ``/reference``.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import partial, reduce
from operator import or_
from typing import Any, Final
from urllib.parse import quote

from fastapi import APIRouter, FastAPI, Request, Response
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from nekro.base.release import release
from nekro.gateway.console.pages import ConsoleFile, file_answer, require_console
from nekro.gateway.dependencies import IdentityDep, ServicesDep
from nekro.gateway.document.examples import EXAMPLES, Examples
from nekro.gateway.idempotency import NOT_ONCE
from nekro.gateway.problems import ErrorForm
from nekro.gateway.web.responses import EVENT_STREAM
from nekro_client import models
from nekro_client.models import Problem

__all__ = [
    "api_of",
    "document",
    "examples_of",
    "reference_page",
    "reference_router",
    "router",
]


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

#: The line of a field, and its description above it.
_FIELD: Final = re.compile(r"((?:^    #: .*\n)+)    (\w+): ", re.MULTILINE)


(_NOT_ONCE,) = NOT_ONCE


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
    forms: Mapping[str, ErrorForm] = app.state.error_forms
    examples = examples_of(app)
    for probe in ("/healthz", "/readyz"):
        api["paths"][probe]["get"]["security"] = []
    api["paths"]["/console/session"]["post"]["security"] = []
    for path, operations in api["paths"].items():
        for method, operation in operations.items():
            operation["responses"].pop("422", None)
            form = next((form for prefix, form in forms.items() if path.startswith(prefix)), None)
            operation["responses"]["default"] = deepcopy(_PROBLEM if form is None else form.documented)
            if not operation.pop(_NOT_ONCE, False) and method == "post":
                operation.setdefault("parameters", []).append(_IDEMPOTENCY)
            _add_examples(operation, examples)
    return api


def examples_of(app: FastAPI) -> Examples:
    """Return the examples of an application: those of the gateway, and those of its extensions."""
    examples: Examples = reduce(or_, app.state.examples, EXAMPLES)
    return examples


def _describe_fields(schemas: dict[str, Any]) -> None:
    """Take the descriptions of fields from the comments above them."""
    texts: dict[tuple[str, str], str] = {}
    owners = {name: getattr(models, name.partition("_")[0], object).__mro__ for name in schemas}
    modules = {owner.__module__ for own in owners.values() for owner in own}
    ours = [name for name in modules if name.startswith(f"{models.__name__}.")]
    sources = "\n".join(inspect.getsource(sys.modules[name]) for name in ours)
    for source in re.split(r"^class ", sources, flags=re.MULTILINE)[1:]:
        owner = re.split(r"\W", source, maxsplit=1)[0]
        for comment, field in _FIELD.findall(source):
            text = " ".join(line.strip().removeprefix("#:").strip() for line in comment.strip().split("\n"))
            texts[owner, field.rstrip("_")] = text.replace("``", "`")
    for name, schema in schemas.items():
        for field, described in schema.get("properties", {}).items():
            for one in owners[name]:
                if (one.__name__, field) in texts:
                    described.setdefault("description", texts[one.__name__, field])


def _add_examples(operation: dict[str, Any], examples: Examples) -> None:
    for parameter in operation.get("parameters", ()):
        name = parameter["name"]
        for known in (name, f"{operation['tags'][0]} {name}"):
            if (example := examples.parameters.get(known)) is not None:
                parameter["example"] = example
    own = examples.operations.get(operation["operationId"], {})
    if "requestBody" in operation:
        _add_to_content(operation["requestBody"]["content"], own.get("body", {}), examples)
    for status, answer in operation["responses"].items():
        stated = own.get("answer", {}) if status.startswith("2") else {}
        if stated:
            _add_to_content(answer.setdefault("content", {}), stated, examples)
        elif "content" in answer:
            _add_to_content(answer["content"], {}, examples)


def _add_to_content(content: dict[str, Any], stated: Mapping[str, Any], examples: Examples) -> None:
    for kind, example in stated.items():
        schema = {"type": "string" if isinstance(example, str) else "object"}
        content.setdefault(kind, {"schema": schema})["example"] = example
    for one in content.values():
        name = one.get("schema", {}).get("$ref", "").rpartition("/")[2]
        if (example := examples.models.get(name)) is not None:
            one.setdefault("example", example)
        elif name.startswith("Page_") and (item := examples.models.get(name[5:].rstrip("_"))) is not None:
            one["example"] = {"items": [item], "next_cursor": None}


reference_router = APIRouter(tags=["console"])

#: Stands for the address of the gateway, which depends on the request.
_ADDRESS: Final = "gateway-address"

_CODE: Final = re.compile(r"``?([^`]+)``?")


@reference_router.head("/reference", include_in_schema=False)
@reference_router.get("/reference", include_in_schema=False)
async def show(request: Request, services: ServicesDep) -> Response:
    """Show the operations, models and examples of this release."""
    require_console(services)
    if not hasattr(request.app.state, "reference"):
        api = await api_of(request.app)
        request.app.state.reference = await asyncio.to_thread(reference_page, api)
    page: str = request.app.state.reference
    content = page.replace(_ADDRESS, str(escape(str(request.base_url).rstrip("/")))).encode()
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    return file_answer(
        request, ConsoleFile(content=content, media_type="text/html; charset=utf-8", etag=etag)
    )


def reference_page(api: Mapping[str, Any]) -> str:
    """Return the page of an OpenAPI document."""
    environment = Environment(
        loader=PackageLoader("nekro.gateway"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    models = api["components"]["schemas"]
    environment.filters |= {"prose": _prose, "kind": partial(_kind, models), "sample": _sample}
    tags: dict[str, list[dict[str, Any]]] = {}
    for path, operations in api["paths"].items():
        for method, operation in operations.items():
            shown = {**operation, "path": path, "method": method.upper()}
            shown["curl"] = _curl(shown, is_open=operation.get("security") == [])
            tags.setdefault(operation["tags"][0], []).append(shown)
    template = environment.get_template("reference.html")
    return template.render(
        tags=sorted(tags.items()),
        models={name: model for name, model in models.items() if "properties" in model},
        release=release(),
        address=_ADDRESS,
    )


def _prose(text: str) -> Markup:
    """Return paragraphs; what is between grave accents is code."""
    paragraphs = [_CODE.sub(r"<code>\1</code>", str(escape(part))) for part in text.split("\n\n")]
    return Markup("".join(f"<p>{part}</p>" for part in paragraphs))  # noqa: S704  # escaped above


def _kind(models: Mapping[str, Any], schema: Mapping[str, Any]) -> Markup:
    """Return the type of a value in words, with links to the models that have fields."""
    return Markup(" or ").join(dict.fromkeys(_kinds(models, schema)))


def _kinds(models: Mapping[str, Any], schema: Mapping[str, Any]) -> Iterator[Markup]:
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        for option in options:
            yield from _kinds(models, option)
    elif "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if "properties" in models[name]:
            yield Markup('<a href="#{0}">{0}</a>').format(name)
        else:
            yield from _kinds(models, models[name])
    elif "enum" in schema or "const" in schema:
        for value in schema.get("enum", [schema.get("const")]):
            yield Markup("<code>{}</code>").format(json.dumps(value))
    elif schema.get("type") == "array":
        yield Markup("list of {}").format(_kind(models, schema.get("items", {})))
    else:
        yield escape(schema.get("format") or schema.get("type", "any JSON"))


def _sample(example: Any) -> str:
    return example if isinstance(example, str) else json.dumps(example, indent=2, ensure_ascii=False)


def _curl(operation: Mapping[str, Any], *, is_open: bool) -> str:
    """Return a command line; ``ask`` is curl with the key, as the head of the page defines it."""
    path = operation["path"]
    for parameter in operation.get("parameters", ()):
        if parameter["in"] == "path":
            path = path.replace(f"{{{parameter['name']}}}", quote(parameter["example"], safe=""))
    content = operation.get("requestBody", {}).get("content", {})
    words = ["curl -sS" if is_open else "ask"]
    implied = "POST" if content else "GET"
    if "application/octet-stream" in content:
        words.append("-T report.csv")
        implied = "PUT"
    if operation["method"] != implied:
        words.append(f"-X {operation['method']}")
    if any(EVENT_STREAM in kinds.get("content", ()) and len(kinds["content"]) == 1
           for kinds in operation["responses"].values()):  # fmt: skip
        words.append("-N")
    words.append(f'"$URL{path}"')
    if "application/json" in content:
        body = json.dumps(content["application/json"]["example"], ensure_ascii=False)
        words.append(f"\\\n  -H 'Content-Type: application/json' \\\n  -d {shlex.quote(body)}")
    elif "multipart/form-data" in content:
        words.append("-F file=@report.csv")
    return " ".join(words)
