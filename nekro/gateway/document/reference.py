"""Serves ``/reference``: the OpenAPI document as one page for people, without scripts."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final
from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from nekro.base.release import release
from nekro.gateway.console.files import ConsoleFile
from nekro.gateway.console.pages import file_answer, require_console
from nekro.gateway.dependencies import ServicesDep
from nekro.gateway.document.openapi import api_of
from nekro.gateway.web.responses import EVENT_STREAM

__all__ = ["reference_page", "router"]

router = APIRouter(tags=["console"])

#: Stands for the address of the gateway, which depends on the request.
_ADDRESS: Final = "gateway-address"
_CODE: Final = re.compile(r"``?([^`]+)``?")


@router.head("/reference", include_in_schema=False)
@router.get("/reference", include_in_schema=False)
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
