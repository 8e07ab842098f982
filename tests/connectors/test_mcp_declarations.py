"""Declarations, their secrets, schemas as signatures."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from waiting import cpu_limit

from broker_config.secret_files import secret_paths
from broker_config.settings import Settings
from nekro.extensions.mcp.client.hub import ServerHub
from nekro.extensions.mcp.client.plugins import build_plugin, needs_approval
from nekro.extensions.mcp.client.schemas import arguments_of, identifier, shape, signature_of
from nekro.extensions.mcp.client.tools import ListedTool, read_tools, tools_text
from nekro.extensions.mcp.declarations import module_names, parse, resolve
from nekro.extensions.mcp.servers import (
    MASK,
    ServerSource,
    literal_secrets,
    merged,
    read_file,
    redactor_of,
    shown,
)
from nekro.plugins.registry import LoadedRegistry
from nekro_agent.errors import InvalidValueError
from nekro_agent.methods import describe_signature

OAUTH = ("issuer", "client_id", "client_secret")


def test_an_entry_of_another_host_is_a_declaration() -> None:
    entry = {
        "type": "stdio",
        "command": "uvx",
        "args": ["server"],
        "env": {"A": "1"},
        "autoApprove": [],
        "disabled": True,
    }
    declaration, is_enabled = parse("time", entry)
    assert (declaration.command, declaration.args, is_enabled) == ("uvx", ("server",), False)
    assert parse("time", json.loads(declaration.to_json()))[0] == declaration
    remote, _ = parse("r", {"type": "http", "url": "https://example.org/mcp", "headers": {"X": "${Y}"}})
    assert not remote.is_stdio


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ([], "must be an object"),
        ({}, "either `command`"),
        ({"command": "a", "url": "https://x"}, "either `command`"),
        ({"command": " "}, "`command` is empty"),
        ({"command": "a", "comand": "b"}, "comand: Extra inputs"),
        ({"command": "a", "headers": {"A": "b"}}, "`headers` and `oauth`"),
        ({"url": "ftp://x"}, "http:// or https://"),
        ({"url": "https://x", "env": {"A": "b"}}, "are for servers with a command"),
        ({"type": "sse", "url": "https://x/sse"}, "streamable HTTP"),
        ({"command": "a", "env": {"LD_PRELOAD": "x.so"}}, "LD_PRELOAD is not allowed"),
        ({"command": "a", "env": {"A=B": "x"}}, "is not a valid variable name"),
        ({"command": "a", "nekro": {"files": {"relative": "ro"}}}, "absolute path"),
        ({"command": "a", "nekro": {"files": {"/a/../b": "rw"}}}, "absolute path"),
        ({"command": "a", "nekro": {"files": {"/a": "w"}}}, "'ro' or 'rw'"),
        ({"command": "a", "nekro": {"timeout_seconds": 0}}, "greater than 0"),
        ({"command": "a" * 70_000}, "more than 65536 bytes"),
    ],
)
def test_a_faulty_declaration_names_the_server_and_the_fault(entry: Any, text: str) -> None:
    with pytest.raises(InvalidValueError, match=f"'tool box'.*{text}"):
        parse("tool box", entry)


@pytest.mark.parametrize("name", ["", "a\nb", "\x1b[2J", "-x", "x" * 65, "ä"])
def test_a_name_that_cannot_be_shown_is_refused(name: str) -> None:
    with pytest.raises(InvalidValueError, match="a name has"):
        parse(name, {"command": "a"})


def test_modules_are_identifiers_and_numbered() -> None:
    names = ["a-b", "a.b", "@scope/x", "7zip", "a_b", "..."]
    assert module_names(names) == {
        "...": "server", "7zip": "_7zip", "@scope/x": "scope_x", "a-b": "a_b", "a.b": "a_b_2", "a_b": "a_b_3",
    }  # fmt: skip


def test_references_are_read_from_the_environment() -> None:
    environ = {"KEY": "value"}
    assert resolve("a ${KEY} ${NONE:-other} $KEY", name="s", environ=environ) == "a value other $KEY"
    with pytest.raises(InvalidValueError, match="variable NONE"):
        resolve("${NONE}", name="s", environ=environ)


@pytest.mark.parametrize(
    "entry",
    [
        {"command": "a", "args": ["--key=${NEKRO_SECURITY__SIGNING_KEY}"]},
        {"command": "${NEKRO_DATA_DIR}/a"},
        {"command": "a", "env": {"A": "${nekro_security__signing_key:-none}"}},
        {"url": "https://x/${NEKRO_SECURITY__SIGNING_KEY}"},
        {"url": "https://x", "headers": {"A": "Bearer ${NEKRO_KEY}"}},
        *(
            {
                "url": "https://x",
                "nekro": {"oauth": {**dict.fromkeys(OAUTH, "https://i"), name: "${NEKRO_KEY}"}},
            }
            for name in OAUTH
        ),
    ],
)
def test_variables_of_the_fleet_are_not_passed_to_servers(entry: dict[str, Any]) -> None:
    with pytest.raises(InvalidValueError, match=r"'s'.*the variable (?i:NEKRO_\w+) is not passed to servers"):
        parse("s", entry)
    (server,) = merged({"s": entry}, [], secrets={})
    assert server.declaration is None and "is not passed to servers" in (server.error or "")


def test_references_to_variables_of_the_fleet_are_not_resolved() -> None:
    for text in ("${NEKRO_KEY}", "a ${nekro_key:-b}"):
        with pytest.raises(InvalidValueError, match=r"(?i)variable NEKRO_KEY is not passed"):
            resolve(text, name="s", environ={"NEKRO_KEY": "secret", "nekro_key": "secret"})


@pytest.mark.parametrize(
    "entry",
    [
        {"command": "a", "env": {"A": "b\0--bind\0/\0/host"}},
        {"command": "a", "args": ["b\0c"]},
        {"command": "a", "nekro": {"files": {"/a\0--bind\0/": "ro"}}},
    ],
)
def test_a_value_cannot_become_arguments_of_the_sandbox(entry: dict[str, Any]) -> None:
    with pytest.raises(InvalidValueError, match="NUL character"):
        parse("s", entry)


def test_files_with_secrets_of_the_fleet_are_refused(
    make_settings: Callable[..., Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted = tmp_path / "mounted" / "secrets"
    mounted.mkdir(parents=True)
    (mounted / "url").write_text("sqlite:///nekro.db")
    (tmp_path / "certificates").mkdir()
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / ".env").write_text("NEKRO_SECURITY__SIGNING_KEY=x")
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("NEKRO_QDRANT__API_KEY_FILE", str(mounted / "url"))
    settings = make_settings(
        mcp={"file": tmp_path / "project" / "mcp.json"},
        broker={"tls_key_file": tmp_path / "certificates" / "key"},
        database={"url": f"sqlite:///{tmp_path}/rows/nekro.db"},
    )
    (settings.data_dir / "uploads").mkdir(parents=True)
    (tmp_path / "project").mkdir()
    for name, target in (
        ("to-data", settings.data_dir),
        ("to-work", tmp_path / "work"),
        ("loop", Path("loop")),
    ):
        (tmp_path / "project" / name).symlink_to(target)
    secrets = secret_paths(settings)
    for path, fault in (
        (settings.data_dir, "is the data directory"),
        (settings.data_dir / "uploads" / "none", "lies in the data directory"),
        (tmp_path, "contains"),
        (tmp_path / "project" / "to-data", "is the data directory"),
        (tmp_path / "project" / "to-data" / "uploads", "lies in the data directory"),
        (mounted, "is the directory of the file that NEKRO_QDRANT__API_KEY_FILE names"),
        (
            mounted / "..data" / "key",
            "lies in the directory of the file that NEKRO_QDRANT__API_KEY_FILE names",
        ),
        (mounted.parent, "contains the directory of the file that NEKRO_QDRANT__API_KEY_FILE names"),
        (tmp_path / "certificates" / "key", "that NEKRO_BROKER__TLS_KEY_FILE names"),
        (tmp_path / "project", "contains the file that NEKRO_MCP__FILE names"),
        (tmp_path / "project" / "to-work" / ".env", "is the .env of workers"),
        (tmp_path / "rows" / "nekro.db-wal", "is the database"),
        (Path("/proc/self/environ"), "lies in /proc"),
    ):
        entry = {"command": "a", "nekro": {"files": {str(path): "ro"}}}
        with pytest.raises(
            InvalidValueError, match=f"'s': nekro.files: the path {path} is refused: it .*{fault}"
        ):
            parse("s", entry, secrets=secrets)
        (server,) = merged({"s": entry}, [], secrets=secrets)
        assert server.declaration is None and fault in (server.error or "")
    for path in (tmp_path / "project" / "docs", tmp_path / "work" / "docs", tmp_path / "project" / "loop"):
        parse("s", {"command": "a", "nekro": {"files": {str(path): "rw"}}}, secrets=secrets)


SECRET = "a8Fk2mQz91LxPo4RtY7w"


@pytest.mark.parametrize(
    "entry",
    [
        {"command": "a", "env": {"API_KEY": "short"}},
        {"command": "a", "env": {"OTHER": SECRET}},
        {"command": "a", "env": {"URL": f"postgres://u:{SECRET}@h/d"}},
        {"command": "a", "args": ["--token", "short"]},
        {"command": "a", "args": ["--api-key=short"]},
        {"command": "a", "args": [f"--x={SECRET}"]},
        {"command": "a", "args": ["ghp_0123456789abcdef"]},
        {"url": "https://x/mcp", "headers": {"Authorization": "Bearer short"}},
        {"url": "https://x/mcp", "headers": {"X-Custom": SECRET}},
        {"url": "https://user:short@x/mcp"},
        {"url": "https://x/mcp?api_key=short"},
        {"url": f"https://x/{SECRET}/mcp"},
        {
            "url": "https://x",
            "nekro": {"oauth": {"issuer": "https://i", "client_id": "c", "client_secret": "short"}},
        },
    ],
)
def test_literal_secrets_are_masked_wherever_a_declaration_is_shown(entry: dict[str, Any]) -> None:
    declaration, _ = parse("s", entry)
    assert len(literal_secrets(declaration)) == 1
    text = json.dumps(shown(declaration))
    assert MASK in text and "short" not in text and SECRET not in text and "0123456789abcdef" not in text
    hide = redactor_of(declaration)
    assert SECRET not in hide(f"failed with {SECRET}") or SECRET not in declaration.to_json()


@pytest.mark.parametrize(
    "entry",
    [
        {
            "command": "npx",
            "args": ["-y", "@modelcontextprotocol/server-filesystem@2026.8.31", "/srv/my-documents-2026/a"],
        },
        {"command": "/opt/venv/bin/mcp-server-time", "args": ["--local-timezone", "Europe/Berlin"]},
        {
            "command": "a",
            "env": {"API_KEY": "${KEY}", "LEVEL": "debug", "HOST": "db-01.internal.example.org"},
        },
        {"url": "https://mcp.example.org/v1/mcp", "headers": {"Authorization": "Bearer ${TOKEN}"}},
    ],
)
def test_ordinary_values_and_references_are_shown(entry: dict[str, Any]) -> None:
    declaration, _ = parse("s", entry)
    assert literal_secrets(declaration) == {}
    assert shown(declaration) == json.loads(declaration.to_json())


def test_values_of_references_are_hidden_in_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCP_TEST_TOKEN", "the value")
    declaration, _ = parse("s", {"command": "a", "env": {"A": "${MCP_TEST_TOKEN}"}})
    assert redactor_of(declaration)("got the value") == "got [secret]"


def test_the_file_is_read_and_wins(tmp_path: Path) -> None:
    path = tmp_path / "mcp.json"
    assert read_file(path) == {}
    path.write_text('\ufeff{"mcpServers": {"a": {"command": "x"}, "b": {"command": ""}}, "other": 1}')
    first, second = merged(read_file(path), [], secrets={})
    assert (first.name, first.plugin_key, first.source, first.error) == (
        "a",
        "mcp.a",
        ServerSource.FILE,
        None,
    )
    assert second.declaration is None and "`command` is empty" in (second.error or "")


@pytest.mark.parametrize("text", ["", "[]", '{"servers": {}}', '{"mcpServers": []}', "{", "[" * 100_000])
def test_a_malformed_file_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mcp.json"
    path.write_text(text)
    with pytest.raises(InvalidValueError, match=r"mcp\.json"):
        read_file(path)


# -- schemas --------------------------------------------------------------------------------------


def signature(schema: dict[str, Any]) -> str:
    arguments, is_open = arguments_of(schema)
    made = signature_of(arguments, is_open=is_open, returns="str")

    def function() -> None: ...

    function.__signature__ = made  # type: ignore[attr-defined]
    return describe_signature(function)


def properties(**named: Any) -> dict[str, Any]:
    return {"type": "object", "properties": named}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "object"}, "(**more: Any) -> str"),
        ({"type": "object", "additionalProperties": False}, "() -> str"),
        (properties(), "() -> str"),
        (properties(a={"type": "integer", "default": 3}), "(*, a: int = 3) -> str"),
        (
            {**properties(b={"type": "string"}, a={"type": "number"}), "required": ["a"]},
            "(a: float, *, b: str = None) -> str",
        ),
        (properties(a={"enum": ["x", 'y"', 1, None]}), "(*, a: Literal['x', 'y\"', 1, None] = None) -> str"),
        (properties(a={"type": ["string", "null"]}), "(*, a: str | None = None) -> str"),
        (
            properties(a={"anyOf": [{"type": "null"}, {"type": "integer"}]}),
            "(*, a: int | None = None) -> str",
        ),
        (properties(a={"type": "array", "items": {"type": "object"}}), "(*, a: list[dict] = None) -> str"),
        (
            properties(a={"type": "object", "additionalProperties": {"type": "boolean"}}),
            "(*, a: dict[str, bool] = None) -> str",
        ),
        (properties(a={"type": "string", "default": "x" * 90}), f"(*, a: str = '{'x' * 40}…') -> str"),
        (
            properties(a={"$ref": "#/$defs/T"}) | {"$defs": {"T": {"type": "integer"}}},
            "(*, a: int = None) -> str",
        ),
        (
            properties(a={"$ref": "#/$defs/T"}) | {"$defs": {"T": {"$ref": "#/$defs/T"}}},
            "(*, a: Any = None) -> str",
        ),
        (properties(a={"$ref": "https://example.org/schema"}), "(*, a: Any = None) -> str"),
        (properties(a=True), "(*, a: Any = None) -> str"),
        ({"properties": 3, "required": "a"}, "(**more: Any) -> str"),
    ],
)
def test_a_schema_becomes_a_signature(schema: dict[str, Any], expected: str) -> None:
    assert signature(schema) == expected


def test_deep_and_recursive_schemas_are_read_to_a_bound() -> None:
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(2_000):
        deep = {"type": "array", "items": deep}
    assert signature(properties(a=deep)).count("list") <= 6
    tree: dict[str, Any] = {
        "$defs": {"N": properties(next={"$ref": "#/$defs/N"}, value={"type": "integer"})},
        "$ref": "#/$defs/N",
    }
    assert len(shape(tree)) < 1_000


NODE: dict[str, Any] = {"$ref": "#/$defs/N"}


@pytest.mark.parametrize(
    "node",
    [
        properties(**{f"p{number}": NODE for number in range(100)}),
        {"anyOf": [NODE] * 1_000},
        {"type": ["array"] * 1_000, "items": NODE},
        {"$ref": "#/$defs/" + "/" * 50_000 + "N"},
    ],
    ids=["properties", "union", "types", "reference"],
)
def test_the_work_for_a_schema_grows_no_faster_than_its_size(node: dict[str, Any]) -> None:
    """A part that refers to itself a hundred times has 100 to the power of 6 parts at the largest depth."""
    schema = {**properties(**{f"a{number}": NODE for number in range(100)}), "$defs": {"N": node}}
    tool = ListedTool(name="a", input_schema=schema, output_schema=schema)
    (server,) = merged({"s": {"command": "a"}}, [], secrets={})
    with cpu_limit(10):
        plugin = build_plugin(
            dataclasses.replace(server, tools_text=tools_text([tool])), ServerHub(Settings(), None)
        )
    assert len(plugin.sandbox_methods[0].func.__doc__ or "") < 100_000


def test_shapes_show_the_fields_of_objects() -> None:
    item = {**properties(name={"type": "string"}, size={"type": "integer"}), "required": ["name"]}
    assert shape({"type": "array", "items": item}) == "list[{'name': str, 'size'?: int}]"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("read-file", "read_file"),
        ("class", "class_"),
        ("9x", "_9x"),
        ("", "tool"),
        ("ключ", "tool"),
        ("_ctx", "ctx"),
    ],
)
def test_names_become_identifiers(name: str, expected: str) -> None:
    assert identifier(name) == expected
    assert identifier(name, [expected]) == f"{expected}_2"


def test_listings_are_read_as_they_were_written() -> None:
    tools = [
        ListedTool(name="a", input_schema=properties(z={}, a={}), read_only=True),
        ListedTool(name="b", input_schema={}),
    ]
    assert read_tools(tools_text(tools)) == tuple(tools)
    assert list(read_tools(tools_text(tools))[0].input_schema["properties"]) == ["z", "a"]
    (newer,) = read_tools('[{"name": "a", "input_schema": {}, "from_the_future": 1}]')
    assert newer.name == "a"


def test_no_tool_hides_a_name_that_python_has_in_the_code_of_chats() -> None:
    names = ("print", "print", "open", "exit", "__name__", "_ck", "read", "a-b")
    (server,) = merged({"s": {"command": "a"}}, [], secrets={})
    listed = tools_text([ListedTool(name=name, input_schema={}, read_only=True) for name in names])
    plugin = build_plugin(dataclasses.replace(server, tools_text=listed), ServerHub(Settings(), None))
    registry = LoadedRegistry([plugin])
    bare = [name for entry in registry for name in registry.bare_names(entry)]
    assert bare == ["print_2", "print_3", "open_2", "exit_2", "name", "ck", "read", "a_b"]


@pytest.mark.parametrize(
    ("approval", "expected"),
    [(None, [False, True]), (True, [True, True]), (False, [False, False]), (["w*"], [False, True])],
)
def test_the_declaration_says_which_tools_need_approval(approval: Any, expected: list[bool]) -> None:
    own = {} if approval is None else {"approval": approval}
    (server,) = merged({"s": {"command": "a", "nekro": own}}, [], secrets={})
    tools = [
        ListedTool(name="read", input_schema={}, read_only=True),
        ListedTool(name="write", input_schema={}),
    ]
    assert [needs_approval(server, tool) for tool in tools] == expected
