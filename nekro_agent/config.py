"""``ConfigBase``: a plugin's configuration as a pydantic model in one YAML file."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, SecretBytes, SecretStr, ValidationError
from pydantic_core import to_jsonable_python

from nekro_agent.core.logger import get_sub_logger
from nekro_agent.errors import InvalidValueError

__all__ = ["ConfigBase", "ConfigFile", "ExtraField"]

_log = get_sub_logger("config")


class ExtraField(BaseModel):
    """How a configuration UI shows a field: ``Field(json_schema_extra=ExtraField(…).model_dump())``.

    Unknown attributes are kept, so plugins that were written for a newer reference load.
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

    ``load_to_sysenv`` is not honoured: one worker process serves many plugins, and one
    plugin's configuration must not change the environment of the others.
    """

    # Plugins assign to the object that ``get_config`` returns.
    model_config = ConfigDict(extra="ignore")

    _config_key: ClassVar[str] = ""
    _config_file_path: ClassVar[Path | None] = None

    @classmethod
    def load_config(cls, file_path: Path | str | None = None) -> Self:
        """Read the file, create it with the defaults when missing, and add fields it lacks.

        Raises:
            InvalidValueError: the file is no YAML mapping or a value does not fit its field.
        """
        path = cls._path(file_path)
        config = cls.load_from_path(path) if path.exists() else _build(cls, {}, path)
        known = _read_mapping(path) if path.exists() else {}
        if any(name not in known for name in cls.model_fields):
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
        """Write the file in one step; other processes see the old or the new one, never a half."""
        path = type(self)._path(file_path)
        path.parent.mkdir(parents=True, exist_ok=True)
        values = to_jsonable_python(_revealed(self.model_dump()))
        text = yaml.safe_dump(values, allow_unicode=True, sort_keys=False)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.part")
        try:
            temporary.write_text(text, "utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def get_field_title(cls, field_name: str) -> str:
        """Return the field's title, its name when it has none, "" when there is no such field."""
        field = cls.model_fields.get(field_name)
        return "" if field is None else field.title or field_name

    @classmethod
    def get_field_placeholder(cls, field_name: str) -> str:
        """Return the placeholder of the field's ``ExtraField``; "" when there is none."""
        field = cls.model_fields.get(field_name)
        extra = field.json_schema_extra if field is not None else None
        return str(extra.get("placeholder", "")) if isinstance(extra, dict) else ""

    def load_config_to_env(self) -> None:
        """Do nothing: see the class's note on ``load_to_sysenv``."""

    @classmethod
    def _path(cls, file_path: Path | str | None) -> Path:
        path = file_path or cls._config_file_path
        if path is None:
            raise InvalidValueError(f"{cls.__name__} has no file; mount it with @plugin.mount_config()")
        return Path(path)


C = TypeVar("C", bound=ConfigBase)


class ConfigFile:
    """The one live instance of a mounted configuration class, kept equal to its file.

    The instance never changes its identity: a change made by another process is copied into it
    field by field, so plugin code that holds the object sees it.
    """

    def __init__(self, cls: type[ConfigBase], path: Path) -> None:
        self.cls = cls
        self.path = path
        self.instance = cls.load_config(path)
        self._stamp = self._read_stamp()

    def refreshed(self) -> ConfigBase:
        """Return the instance after taking over a newer file; a broken file changes nothing."""
        stamp = self._read_stamp()
        if stamp is not None and stamp != self._stamp:
            self._stamp = stamp
            try:
                self._copy(self.cls.load_from_path(self.path))
            except InvalidValueError as exc:
                _log.error(f"{exc}; the configuration read before stays in force")
        return self.instance

    def save(self, config: ConfigBase) -> None:
        """Take over ``config`` and write the file."""
        if config is not self.instance:
            self._copy(config)
        self.instance.dump_config(self.path)
        self._stamp = self._read_stamp()

    def _copy(self, source: ConfigBase) -> None:
        for name in self.cls.model_fields:
            setattr(self.instance, name, getattr(source, name))

    def _read_stamp(self) -> tuple[int, int, int] | None:
        try:
            info = os.stat(self.path)
        except OSError:
            return None
        return info.st_mtime_ns, info.st_size, info.st_ino


def _revealed(value: Any) -> Any:
    """Put what ``SecretStr`` and ``SecretBytes`` hide in their place: the file is where it is kept."""
    if isinstance(value, SecretStr | SecretBytes):
        return value.get_secret_value()
    if isinstance(value, dict):
        return {key: _revealed(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_revealed(item) for item in value]
    return value


def _read_mapping(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text("utf-8-sig"))
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
