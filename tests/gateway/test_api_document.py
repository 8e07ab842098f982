"""The OpenAPI document: names of operations, and an example of everything that is sent."""

from __future__ import annotations

import html
import json
import re
import shlex
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from broker_config.settings import Settings
from nekro.extensions.openai import bodies
from nekro.extensions.plugin_pages import webhooks
from nekro.gateway.app import create_app
from nekro.gateway.document.openapi import document, examples_of, reference_page
from nekro_client import models

#: With which names begin.
VERBS = {
    "answer", "ask", "call", "cancel", "change", "complete", "connect", "create", "decide", "delete",
    "disable", "enable", "follow", "get", "list", "log", "post", "put", "read", "receive", "renew",
    "replay", "reset", "retry", "revoke", "run", "send", "signal", "test",
}  # fmt: skip
#: Their answers are files of any type.
FILES = {"get_file", "get_linked_file"}


@cache
def api() -> dict[str, Any]:
    return dict(json.loads(document(create_app(Settings.model_construct()))))


@cache
def operations() -> dict[str, dict[str, Any]]:
    found = [one for path in api()["paths"].values() for one in path.values()]
    named = {one["operationId"]: one for one in found}
    assert len(named) == len(found), "two operations have the same id"
    return named


def strict(schema: Any) -> Any:
    """Return a schema whose objects have no unknown fields."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {"additionalProperties": False} if "properties" in schema else {}
    return {**closed, **{key: strict(value) for key, value in schema.items()}}


@cache
def components() -> Any:
    return strict(api()["components"])


def fits(schema: Any, example: Any) -> None:
    from jsonschema import Draft202012Validator  # its import takes 2 s of the collection's 11

    Draft202012Validator({"components": components(), **strict(schema)}).validate(example)


def test_operations_have_readable_names() -> None:
    assert [name for name in operations() if not re.fullmatch(r"[a-z]+(_[a-z]+)*", name)] == []
    assert {name.partition("_")[0] for name in operations()} - VERBS == set()
    assert {"list_jobs", "post_message", "cancel_turn", "decide_approval"} <= operations().keys()


def test_the_document_names_a_server_and_a_version() -> None:
    assert api()["info"]["version"] == "1"
    (server,) = api()["servers"]
    assert server["url"] == "http://127.0.0.1:8600"


def contents(name: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Bodies and answers of an operation: where, media type, content."""
    operation = operations()[name]
    parts = {"body": operation.get("requestBody", {}), **operation["responses"]}
    return [
        (where, kind, content)
        for where, part in parts.items()
        for kind, content in part.get("content", {}).items()
    ]


def model_of(name: str, where: str, content: dict[str, Any]) -> Any:
    """The model of a body or an answer; None if it has none."""
    if name == "post_message" and where == "body":
        return models.MessageBody
    named = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
    if named.startswith("Page_"):
        return models.Page[getattr(models, named.removeprefix("Page_").rstrip("_"))]
    owners = (models, bodies, webhooks)
    return next((getattr(owner, named) for owner in owners if hasattr(owner, named)), None)


def test_each_body_and_answer_has_an_example_that_fits() -> None:
    checked = set()
    for name, operation in operations().items():
        found = contents(name)
        answers = {where for where, _, _ in found if where.startswith("2")}
        assert answers or "204" in operation["responses"] or name in FILES, name
        for where, kind, content in found:
            if kind in ("multipart/form-data", "application/octet-stream"):
                continue  # files of the caller
            fits(content.get("schema", {}), content["example"])
            if kind == "application/json" and (where == "body" or where.startswith("2")):
                model = model_of(name, where, content)
                if model is not None:
                    TypeAdapter(model).validate_python(content["example"])
                    checked.add(model)
    assert {models.MessageBody, models.Page[models.Job], bodies.CompletionBody} <= checked


def test_each_parameter_of_a_path_has_an_example() -> None:
    for operation in operations().values():
        for parameter in operation.get("parameters", ()):
            if parameter["in"] == "path":
                fits(parameter["schema"], parameter["example"])


def test_each_example_is_used() -> None:
    text = json.dumps(api()["paths"])
    names = set(re.findall(r"#/components/schemas/(?:Page_)?(\w+?)_?\"", text))
    examples = examples_of(create_app(Settings.model_construct()))
    assert examples.models.keys() - names == set()
    assert examples.operations.keys() - operations().keys() == set()
    used = {one["name"] for each in operations().values() for one in each.get("parameters", ())}
    assert {name.rpartition(" ")[2] for name in examples.parameters} - used == set()


def test_fields_have_the_descriptions_of_their_models() -> None:
    schemas = api()["components"]["schemas"]
    assert schemas["Approval"]["properties"]["number"]["description"].startswith("By which people name it")
    assert schemas["CreatedKey"]["properties"]["stored_bytes"]["description"] == "What it keeps stored now."
    assert schemas["PluginConfig"]["properties"]["schema"]["description"] == "JSON schema of `values`."


def test_the_page_shows_each_operation_with_a_command_line() -> None:
    page = reference_page(api())
    commands = re.findall(r'<pre class="text">((?:ask|curl) .*?)</pre>', page, re.DOTALL)
    assert len(commands) == len(operations())
    for name in operations():
        assert f'<section class="card" id="{name}"' in page
    for command in commands:
        words = shlex.split(html.unescape(command))
        assert len([word for word in words if word.startswith("$URL/")]) == 1
        for at, word in enumerate(words):
            if word == "-d":
                json.loads(words[at + 1])
