"""Notes of a user, kept across chats."""

from __future__ import annotations

import time

from pydantic import BaseModel, Field

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(
    name="Notes",
    module_name="notes",
    description="Keep short notes per user.",
    version="1.0.0",
    author="nekro",
    url="",
)

_STORE_KEY = "notes"


class Note(BaseModel):
    """One note."""

    title: str
    content: str
    tags: list[str] = Field(default_factory=list)
    created_at: float


class Notebook(BaseModel):
    """All notes of one user, by id."""

    notes: dict[str, Note] = Field(default_factory=dict)


async def _load(ctx: AgentCtx) -> Notebook:
    text = await plugin.store.get(user_key=_owner(ctx), store_key=_STORE_KEY)
    return Notebook.model_validate_json(text) if text else Notebook()


async def _save(ctx: AgentCtx, notebook: Notebook) -> None:
    await plugin.store.set(user_key=_owner(ctx), store_key=_STORE_KEY, value=notebook.model_dump_json())


def _owner(ctx: AgentCtx) -> str:
    if ctx.from_user_id is None:
        raise ValueError("notes belong to a user, and no user triggered this")
    return ctx.from_user_id


@plugin.mount_sandbox_method(SandboxMethodType.BEHAVIOR, "Save a note", "Save a note for the current user.")
async def save_note(_ctx: AgentCtx, note_id: str, title: str, content: str, tags: str = "") -> str:
    """Save a note for the current user; a note with the same id is replaced.

    Args:
        note_id (str): Short id, for example "shopping".
        title (str): Title.
        content (str): Text of the note.
        tags (str): Tags, separated by commas.

    Returns:
        str: What was done.

    Example:
        save_note("shopping", "Shopping list", "milk, bread", "home")
    """
    notebook = await _load(_ctx)
    replaced = note_id in notebook.notes
    notebook.notes[note_id] = Note(
        title=title,
        content=content,
        tags=[tag.strip() for tag in tags.split(",") if tag.strip()],
        created_at=time.time(),
    )
    await _save(_ctx, notebook)
    return f"Note {title!r} {'replaced' if replaced else 'saved'} as {note_id!r}."


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "Read a note", "Read a note of the current user.")
async def read_note(_ctx: AgentCtx, note_id: str) -> str:
    """Read a note of the current user.

    Args:
        note_id (str): Id of the note.

    Returns:
        str: Title, text and tags, or a sentence that says there is none.
    """
    note = (await _load(_ctx)).notes.get(note_id)
    if note is None:
        return f"There is no note {note_id!r}."
    return f"{note.title}\n{note.content}\nTags: {', '.join(note.tags) or 'none'}"


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "List notes", "List the notes of the current user.")
async def list_notes(_ctx: AgentCtx, tag: str = "") -> dict[str, str]:
    """List the current user's notes.

    Args:
        tag (str): Only notes with this tag; "" lists all.

    Returns:
        dict[str, str]: Title by id.
    """
    notes = (await _load(_ctx)).notes
    return {key: note.title for key, note in notes.items() if not tag or tag in note.tags}


@plugin.mount_sandbox_method(SandboxMethodType.BEHAVIOR, "Delete a note", "Delete a note of the user.")
async def delete_note(_ctx: AgentCtx, note_id: str) -> str:
    """Delete a note of the current user.

    Args:
        note_id (str): Id of the note.

    Returns:
        str: What was done.
    """
    notebook = await _load(_ctx)
    if notebook.notes.pop(note_id, None) is None:
        return f"There was no note {note_id!r}."
    await _save(_ctx, notebook)
    return f"Note {note_id!r} deleted."
