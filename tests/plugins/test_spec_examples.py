"""Every registering example of the specification documents, run unmodified."""

from __future__ import annotations

import json
import os
import time
from datetime import datetime
from pathlib import Path

import pytest
import spec_blocks
from plugin_world import CHAT, USER, FileServer, World, uploads_dir

from nekro_agent.errors import ArgumentError, ResultError
from nekro_agent.methods import SandboxMethodType
from nekro_agent.ports import MessageKind

both = pytest.mark.parametrize("doc", ["j1", "c1"])

#: Every function that the documents register; each has a test below.
COVERED = {
    "j1": {
        "save_preference", "get_preference", "clear_cache", "add_note", "get_note", "save_log", "save_image",
        "read_config", "init_plugin_resources", "list_exports", "cache_external_resource",
        "cleanup_temp_files", "process_user_file", "export_data", "download_model", "load_model",
    },
    "c2": {"process_image", "generate_report", "get_file_handle", "get_file_content"},
    "j3": {
        "my_sum_function", "get_time", "search_kb", "send_chat_message", "generate_image_with_comment",
        "get_user_preference",
    },
}  # fmt: skip
COVERED["c1"] = COVERED["j1"] | {"on_reset", "cleanup", "migrate_data"}


@pytest.mark.skipif(not spec_blocks.SPEC_DIR.is_dir(), reason="no specification documents")
def test_every_example_of_the_documents_is_tested() -> None:
    found: dict[str, set[str]] = {}
    for block in spec_blocks.all_blocks():
        found.setdefault(block.document, set()).update(block.functions())
    assert found == COVERED


def plugin_dir(world: World, doc: str) -> Path:
    return world.data_dir / "plugins" / f"spec.{doc}"


@both
async def test_preferences_are_stored_per_chat_per_user_and_globally(spec: World, doc: str) -> None:
    before = (await spec.call(f"spec.{doc}.get_preference", "any")).value
    assert before.endswith("{'theme': 'light', 'notifications': False}")

    saved = await spec.call(f"spec.{doc}.save_preference", "theme", "dark")
    assert saved.type is SandboxMethodType.TOOL
    assert saved.value == {"j1": "設定が保存されました", "c1": "偏好设置已保存"}[doc]

    key = f"spec.{doc}"
    assert await spec.stored(key, "last_command", chat_key=CHAT) == "/weather London"
    assert json.loads(await spec.stored(key, "preferences", user_key=USER) or "") == {
        "theme": "dark",
        "notifications": True,
    }
    assert float(await spec.stored(key, "plugin_last_updated") or 0) <= time.time()
    elsewhere = await spec.call(f"spec.{doc}.get_preference", "any", chat_key="another-chat")
    assert elsewhere.value.endswith("{'theme': 'dark', 'notifications': True}")
    stranger = await spec.call(f"spec.{doc}.get_preference", "any", user_id="user-2")
    assert "light" in stranger.value


@both
async def test_a_user_scope_without_a_user_is_an_error_and_writes_nothing(spec: World, doc: str) -> None:
    with pytest.raises(Exception, match="user_key is None"):
        await spec.call(f"spec.{doc}.save_preference", "theme", "dark", user_id=None)
    assert await spec.stored(f"spec.{doc}", "preferences") is None
    assert await spec.stored(f"spec.{doc}", "plugin_last_updated") is None
    assert "light" in (await spec.call(f"spec.{doc}.get_preference", "any", user_id=None)).value


@both
async def test_clearing_the_cache_reports_to_the_history(spec: World, doc: str) -> None:
    outcome = await spec.call(f"spec.{doc}.clear_cache")
    text = {"j1": "キャッシュがクリアされました", "c1": "缓存已清除"}[doc]
    assert (outcome.type, outcome.value, outcome.text) == (SandboxMethodType.BEHAVIOR, text, text)
    assert await spec.texts(CHAT, MessageKind.SYSTEM) == [text]
    assert await spec.woken(CHAT) == 0


@both
async def test_notes_are_models_in_the_users_scope(spec: World, doc: str) -> None:
    missing = (await spec.call(f"spec.{doc}.get_note", "n1")).value
    assert missing == {"j1": "ユーザーにメモがありません", "c1": "用户没有任何笔记"}[doc]

    added = await spec.call(f"spec.{doc}.add_note", "n1", "Title", "Text", "a,b")
    assert added.text in ("メモ 'Title' が追加されました、ID: n1", "笔记 'Title' 已添加，ID: n1")
    assert await spec.texts(CHAT, MessageKind.SYSTEM) == [added.text]

    note = (await spec.call(f"spec.{doc}.get_note", note_id="n1", chat_key="another-chat")).value
    assert [line.split(": ")[1] for line in note.splitlines()] == ["Title", "Text", "a, b"]
    assert "n2" in (await spec.call(f"spec.{doc}.get_note", "n2")).value
    assert (await spec.call(f"spec.{doc}.get_note", "n1", user_id="user-2")).value == missing


@both
async def test_a_log_is_written_below_the_plugins_directory(spec: World, doc: str) -> None:
    outcome = await spec.call(f"spec.{doc}.save_log", "行 1")
    (log,) = (plugin_dir(spec, doc) / "logs").iterdir()
    assert log.read_text("utf-8") == "行 1"
    assert log.name in (outcome.text or "")


@both
async def test_an_image_arrives_as_bytes(spec: World, doc: str) -> None:
    data = bytes(range(256)) * 4
    await spec.call(f"spec.{doc}.save_image", image_data=data, filename="a.png")
    assert (plugin_dir(spec, doc) / "images" / "a.png").read_bytes() == data


@both
async def test_init_created_directories_and_a_config_that_is_read_back(spec: World, doc: str) -> None:
    root = plugin_dir(spec, doc)
    assert {path.name for path in root.iterdir()} >= {"cache", "models", "exports", "temp", "user_uploads"}
    config = (await spec.call(f"spec.{doc}.read_config")).value
    assert json.loads(config.split(": ", 1)[1]) == {"version": "1.0.0", "enabled": True, "cache_ttl": 3600}


@both
async def test_exports_are_listed_and_reach_the_sandbox(spec: World, doc: str) -> None:
    empty = (await spec.call(f"spec.{doc}.list_exports")).value
    assert empty == {"j1": "利用可能なエクスポートファイルがありません", "c1": "暂无导出文件"}[doc]
    answer = (await spec.call(f"spec.{doc}.export_data", "a;b\n", "table.csv")).value
    assert answer.endswith(": /app/shared/table.csv")
    assert (await spec.shared_dir() / "table.csv").read_text() == "a;b\n"
    assert (await spec.call(f"spec.{doc}.list_exports")).value.splitlines()[1:] == ["- table.csv"]


@both
async def test_an_external_resource_is_downloaded_once(
    spec: World, doc: str, file_server: FileServer
) -> None:
    url = file_server.add("/resource", b"x" * 1234)
    first = (await spec.call(f"spec.{doc}.cache_external_resource", url)).value
    second = (await spec.call(f"spec.{doc}.cache_external_resource", url)).value
    assert "1234" in first and "1234" in second and first != second
    assert file_server.requests == ["/resource"]
    failed = (await spec.call(f"spec.{doc}.cache_external_resource", file_server.base + "/none")).value
    assert failed.startswith({"j1": "ダウンロードに失敗しました", "c1": "下载失败"}[doc])


@both
async def test_only_old_temporary_files_are_removed(spec: World, doc: str) -> None:
    temp = plugin_dir(spec, doc) / "temp"
    old, new = temp / "old", temp / "new"
    for path in (old, new):
        path.touch()
    os.utime(old, (time.time() - 25 * 3600,) * 2)
    outcome = await spec.call(f"spec.{doc}.cleanup_temp_files", max_age_hours=24)
    assert (old.exists(), new.exists()) == (False, True)
    assert "1" in (outcome.text or "")


@both
async def test_a_file_of_the_sandbox_is_read_by_the_plugin(spec: World, doc: str) -> None:
    await spec.call(f"spec.{doc}.list_exports")
    (await spec.shared_dir() / "input.txt").write_bytes(b"from the sandbox")
    answer = (await spec.call(f"spec.{doc}.process_user_file", "/app/shared/input.txt")).value
    assert "16" in answer
    (saved,) = (plugin_dir(spec, doc) / "user_uploads").iterdir()
    assert saved.name.endswith("_input.txt") and saved.read_bytes() == b"from the sandbox"


@both
async def test_a_model_is_stored_as_a_file_and_its_description_in_the_store(
    spec: World, doc: str, file_server: FileServer
) -> None:
    missing = (await spec.call(f"spec.{doc}.load_model", "tiny")).value
    assert "'tiny'" in missing
    url = file_server.add("/tiny", b"weights")
    downloaded = await spec.call(f"spec.{doc}.download_model", url, "tiny")
    assert downloaded.type is SandboxMethodType.BEHAVIOR and "7" in (downloaded.text or "")
    info = json.loads(await spec.stored(f"spec.{doc}", "model_info:tiny") or "")
    assert (info["file_path"], info["size_bytes"]) == ("models/tiny.model", 7)
    loaded = (await spec.call(f"spec.{doc}.load_model", "tiny")).value
    assert {"j1": str(plugin_dir(spec, doc) / "models/tiny.model"), "c1": "1.0.0"}[doc] in loaded
    (plugin_dir(spec, doc) / "models/tiny.model").unlink()
    assert "tiny.model" in (await spec.call(f"spec.{doc}.load_model", "tiny")).value


async def test_a_channel_reset_deletes_that_chats_value_only(spec: World) -> None:
    for chat in (CHAT, "another-chat"):
        await spec.store("spec.c1", "temp_cache", "x", chat_key=chat)
    await spec.store("spec.c1", "kept", "y", chat_key=CHAT)
    await spec.reset(CHAT)
    assert await spec.stored("spec.c1", "temp_cache", chat_key=CHAT) is None
    assert await spec.stored("spec.c1", "kept", chat_key=CHAT) == "y"
    assert await spec.stored("spec.c1", "temp_cache", chat_key="another-chat") == "x"


async def test_cleanup_empties_the_temporary_directory(spec: World) -> None:
    temp = plugin_dir(spec, "c1") / "temp"
    (temp / "file").write_text("x")
    (temp / "directory").mkdir()
    await spec.stop()
    assert [path.name for path in temp.iterdir()] == ["directory"]


async def test_the_migration_in_init_has_written_the_version(spec: World) -> None:
    assert await spec.stored("spec.c1_more", "data_version") == "2.0.0"


async def test_an_uploaded_image_is_found_by_its_sandbox_path(spec: World) -> None:
    missing = (await spec.call("spec.c2.process_image", "/app/uploads/none.jpg")).value
    assert "未找到" in missing
    uploads_dir(spec).mkdir(parents=True, exist_ok=True)
    (uploads_dir(spec) / "photo.jpg").write_bytes(b"jpeg")
    assert "'photo.jpg'" in (await spec.call("spec.c2.process_image", "/app/uploads/photo.jpg")).value
    for bad in ("/etc/passwd", "/app/uploads/../../secret", "/app/shared/needs-a-container-key"):
        assert "路径无效" in (await spec.call("spec.c2.process_image", bad)).value


async def test_a_report_is_readable_at_the_returned_sandbox_path(spec: World) -> None:
    path = (await spec.call("spec.c2.generate_report", "内容")).value
    assert path.startswith("/app/uploads/report_") and path.endswith(".txt")
    assert (uploads_dir(spec) / Path(path).name).read_text("utf-8") == "内容"
    assert (await spec.call("spec.c2.get_file_content", path)).value == "内容"


async def test_an_open_file_cannot_be_returned(spec: World, tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    if spec.kind == "memory":  # values are not encoded within one process, so the wrong example works there
        (await spec.call("spec.c2.get_file_handle", str(tmp_path / "f"))).value.close()
    else:
        with pytest.raises(ResultError, match="TextIOWrapper"):
            await spec.call("spec.c2.get_file_handle", str(tmp_path / "f"))


async def test_a_sum_is_called_by_function_name_and_by_label(spec: World) -> None:
    assert (await spec.call("my_sum_function", 2, 3)).value == 5
    assert (await spec.call("calculate_sum", num1=2, num2=3)).value == 5
    with pytest.raises(ArgumentError, match=r"my_sum_function\(num1: int, num2: int\) -> int: missing.*num2"):
        await spec.call("my_sum_function", 2)


async def test_the_time_is_returned_as_text(spec: World) -> None:
    assert isinstance(datetime.fromisoformat((await spec.call("get_time")).value), datetime)


async def test_an_agent_methods_text_wakes_the_agent(spec: World) -> None:
    outcome = await spec.call("search_kb", "cats")
    assert (outcome.type, outcome.value) == (SandboxMethodType.AGENT, None)
    assert outcome.text == "'cats'のナレッジベース検索結果は次のとおりです:\nfound: cats"
    assert await spec.texts(CHAT, MessageKind.SYSTEM) == [outcome.text]
    assert await spec.woken(CHAT) == 1
    assert "見つかりません" in ((await spec.call("search_kb", "nothing")).text or "")


async def test_a_message_is_sent_before_the_method_returns(spec: World) -> None:
    outcome = await spec.call("send_channel_message", "こんにちは")
    assert await spec.texts(CHAT, MessageKind.ASSISTANT) == ["こんにちは"]
    assert outcome.text == "メッセージ 'こんにちは...' が正常に送信されました。"
    assert await spec.woken(CHAT) == 0


async def test_content_parts_wake_the_agent(spec: World) -> None:
    outcome = await spec.call("generate_image_and_comment", "猫")
    assert outcome.type is SandboxMethodType.MULTIMODAL_AGENT
    assert [part["type"] for part in outcome.segments or ()] == ["text", "image_url"]
    assert await spec.woken(CHAT) == 1


async def test_a_users_preference_is_none_until_it_is_stored(spec: World) -> None:
    assert (await spec.call("get_user_preference", "user_123", "theme")).value is None
