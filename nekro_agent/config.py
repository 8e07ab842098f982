"""``ConfigBase``: a plugin's configuration as a pydantic model in one YAML file."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, SecretBytes, SecretStr, ValidationError
from pydantic_core import to_jsonable_python

from nekro_agent import layout, runtime
from nekro_agent.core.logger import get_sub_logger
from nekro_agent.errors import InvalidValueError
from nekro_agent.files.private_files import write_private

__all__ = ["ConfigBase", "ConfigFile", "ExtraField"]

_log = get_sub_logger("config")
#: More than the resolution of the times of files: Linux has 4 ms or 10 ms, some file systems more.
_TICK_NS: Final = 100_000_000


class ExtraField(BaseModel):
    """Display of a field in a configuration UI: ``Field(json_schema_extra=ExtraField(…).model_dump())``.

    Unknown attributes are kept, so that plugins written for a newer reference load.
    """

    model_config = ConfigDict(extra="allow")

    is_hidden: bool = False
    is_secret: bool = False
    placeholder: str = ""
    is_textarea: bool = False
    ref_model_groups: bool = False
    ref_email_accounts_send_enabled: bool = False
    model_type: str = ""
    required: bool = False
    overridable: bool = False
    sub_item_name: str = ""
    load_to_sysenv: bool = False
    load_sysenv_as: str = ""
    load_to_nonebot_env: bool = False
    load_nbenv_as: str = ""
    is_need_restart: bool = False
    ref_presets: bool = False
    ref_presets_no_default: bool = False
    ref_presets_multiple: bool = False
    i18n_category: Any = None
    i18n_title: Any = None
    i18n_description: Any = None


class ConfigBase(BaseModel):
    """Base class of plugin configurations; every field needs a default.

    ``load_to_sysenv`` has no effect: one worker process serves many plugins, and one
    plugin's configuration must not change the environment of the others.
    """

    # Plugins assign to the object that ``get_config`` returns.
    model_config = ConfigDict(extra="ignore")

    #: Key of the plugin that mounted the class; "" for a class that is not mounted.
    _config_key: ClassVar[str] = ""

    @classmethod
    def load_config(cls, file_path: Path | str | None = None) -> Self:
        """Read the file, create it with the defaults if it is missing, and add missing fields.

        Args:
            file_path: None means the plugin's own file, which is written only while a runtime is
                bound, because importing a plugin must not change files.

        Raises:
            InvalidValueError: the file is not a YAML mapping or a value is invalid for its field.
        """
        path = cls._path(file_path)
        known = _read_mapping(path) if path.exists() else {}
        config = _build(cls, known, path)
        may_write = file_path is not None or runtime.is_bound()
        if may_write and any(name not in known for name in cls.model_fields):
            config.dump_config(path)
        return config

    @classmethod
    def load_from_path(cls, path: Path | str) -> Self:
        """Read an existing file.

        Raises:
            InvalidValueError: as for :meth:`load_config`.
        """
        return _build(cls, _read_mapping(Path(path)), Path(path))

    def dump_config(self, file_path: Path | str | None = None) -> None:
        """Write the file atomically: other processes see the old or the new content."""
        write_private(type(self)._path(file_path), self._as_yaml())

    def _as_yaml(self) -> bytes:
        values = to_jsonable_python(_revealed(self.model_dump()))
        return yaml.safe_dump(values, allow_unicode=True, sort_keys=False).encode("utf-8")

    @classmethod
    def get_field_title(cls, field_name: str) -> str:
        """Return the field's title, its name if it has none, "" if there is no such field."""
        field = cls.model_fields.get(field_name)
        return "" if field is None else field.title or field_name

    @classmethod
    def get_field_placeholder(cls, field_name: str) -> str:
        """Return the placeholder of the field's ``ExtraField``; "" if there is none."""
        field = cls.model_fields.get(field_name)
        extra = field.json_schema_extra if field is not None else None
        return str(extra.get("placeholder", "")) if isinstance(extra, dict) else ""

    def load_config_to_env(self) -> None:
        """Do nothing; see the class's docstring on ``load_to_sysenv``."""

    @classmethod
    def _path(cls, file_path: Path | str | None) -> Path:
        if file_path:
            return Path(file_path)
        if not cls._config_key:
            raise InvalidValueError(f"{cls.__name__} has no file; mount it with @plugin.mount_config()")
        return layout.config_file(runtime.data_root(), cls._config_key)


C = TypeVar("C", bound=ConfigBase)


class ConfigFile:
    """The only instance of a mounted configuration class, kept equal to its file.

    The instance never changes its identity: what another process saves is copied into it field by field,
    so plugin code that holds the object, as a module-level name does, sees it. The host reads a newer file
    before each call and hook of the plugin (``NekroPlugin.refresh_config``).

    The file is below the current data root. When another runtime is bound, as in a test, the
    instance takes the values of that runtime's file, or the defaults if there is none.
    Only :meth:`complete` and :meth:`save` write.
    """

    def __init__(self, cls: type[ConfigBase], key: str) -> None:
        """Read the file if there is one.

        Raises:
            InvalidValueError: the file is not a YAML mapping or a value is invalid for its field.
        """
        self.cls = cls
        self._key = key
        self._root = runtime.data_root()
        self._seen = _Seen.of(self.path)
        self.instance = self._built(self._seen)

    @property
    def path(self) -> Path:
        """Path of the file, whether or not it exists."""
        return layout.config_file(self._root, self._key)

    def refreshed(self) -> ConfigBase:
        """Return the instance after reading a newer file; an invalid file changes nothing.

        Raises:
            InvalidValueError: the data root has changed and the file there is invalid.
        """
        if runtime.data_root() != self._root:
            self._move()
        elif not self._seen.is_current(self.path):
            before, self._seen = self._seen, _Seen.of(self.path)
            # Values that the plugin has set without saving them stay until another process saves.
            if self._seen.content not in (None, before.content):
                try:
                    self._copy(self._built(self._seen))
                except InvalidValueError as exc:
                    # The configuration read before stays in effect.
                    _log.bind(error=str(exc)).error("configuration_not_reloaded")
        return self.instance

    def complete(self) -> None:
        """Create the file, or add missing fields; existing values are kept.

        Raises:
            InvalidValueError: as for the constructor.
            OSError: the file cannot be written.
        """
        self.refreshed()
        known = _read_mapping(self.path) if self.path.exists() else {}
        if any(name not in known for name in self.cls.model_fields):
            self.save(self.instance)

    def save(self, config: ConfigBase) -> None:
        """Copy ``config`` into the instance and write the file.

        With files in a store other hosts get it at the end of the call, or within a second outside of calls.
        """
        self._root = runtime.data_root()
        if runtime.is_bound() and (areas := runtime.current().areas).is_synced:
            areas.configs_dir()
        if config is not self.instance:
            self._copy(config)
        content = self.instance._as_yaml()
        write_private(self.path, content)
        # Without times, so that the next use reads the file: another process may have saved after us.
        self._seen = _Seen(content, None)

    def _move(self) -> None:
        """Switch to the file below the current data root."""
        before, self._root = self._root, runtime.data_root()
        try:
            seen = _Seen.of(self.path)
            self._copy(self._built(seen))
        except InvalidValueError:
            self._root = before
            raise
        self._seen = seen

    def _built(self, seen: _Seen) -> ConfigBase:
        known = {} if seen.content is None else _parsed(seen.content, self.path)
        return _build(self.cls, known, self.path)

    def _copy(self, source: ConfigBase) -> None:
        for name in self.cls.model_fields:
            setattr(self.instance, name, getattr(source, name))


@dataclass(frozen=True)
class _Seen:
    """A file as it was read: its content, None without a file, and the times and identity it had before."""

    content: bytes | None
    stamp: tuple[int, int, int] | None

    @classmethod
    def of(cls, path: Path) -> _Seen:
        """Read a file."""
        stamp, is_settled = _stamp(path)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            content = None
        except OSError as exc:
            raise InvalidValueError(f"configuration {path.name} cannot be read: {exc}") from exc
        return cls(content, stamp if is_settled else None)

    def is_current(self, path: Path) -> bool:
        """Whether the file is certainly the one that was read; False requires reading it again."""
        stamp, _ = _stamp(path)
        return self.content is None if stamp is None else stamp == self.stamp


def _stamp(path: Path) -> tuple[tuple[int, int, int] | None, bool]:
    """Return what identifies a file's content, and whether it does: not shortly after a change.

    Two changes within one tick of the file system's clock may leave the same time, and a file that replaces
    another may get the number of one before it.
    """
    try:
        info = os.stat(path)
    except OSError:
        return None, True
    return (info.st_mtime_ns, info.st_size, info.st_ino), time.time_ns() - info.st_mtime_ns > _TICK_NS


def _revealed(value: Any) -> Any:
    """Replace ``SecretStr`` and ``SecretBytes`` with their values, because the file stores them."""
    if isinstance(value, SecretStr | SecretBytes):
        return value.get_secret_value()
    if isinstance(value, dict):
        return {key: _revealed(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_revealed(item) for item in value]
    return value


def _read_mapping(path: Path) -> dict[str, Any]:
    return _parsed(path.read_bytes(), path)


def _parsed(data: bytes, path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(data.decode("utf-8-sig"))
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        raise InvalidValueError(f"configuration {path.name} is not valid YAML: {exc}") from exc
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise InvalidValueError(f"configuration {path.name} must be a mapping, not {type(content).__name__}")
    return content


def _build(cls: type[C], values: dict[str, Any], path: Path) -> C:
    try:
        return cls.model_validate(values)
    except ValidationError as exc:
        faults = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in exc.errors())
        raise InvalidValueError(f"configuration {path.name}: {faults}") from exc
