"""Model groups: named configurations of models, which chats, fallbacks and plugins choose from.

``NEKRO_LLM__…`` is the group ``default``; ``NEKRO_MODELS__<NAME>__…`` define the others. ``model_groups``
returns all of them in one form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, Protocol

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, model_validator
from pydantic_settings import NoDecode

from broker_config.setting_sources import FILE_SUFFIX
from nekro_agent.errors import ModelGroupError, SettingsError
from nekro_agent.runtime import group_name, group_variable

__all__ = [
    "DEFAULT_GROUP",
    "GroupNames",
    "ImageDetail",
    "JsonObject",
    "ModelGroup",
    "ModelGroupSettings",
    "ModelGroups",
    "ModelProtocol",
    "Vision",
    "chat_groups",
    "check_groups",
    "group_or_default",
    "group_variables",
    "model_group",
    "model_groups",
    "vision_of",
]

#: The group of ``NEKRO_LLM__…``.
DEFAULT_GROUP: Final = "default"


def _names(value: object) -> object:
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list | tuple):
        return items
    return tuple(group_name(str(item)) for item in items if str(item).strip())


def _json_object(text: str | None) -> str | None:
    if text is None or not text.strip():
        return None
    try:
        parsed = json.loads(text)
    except ValueError as exc:
        raise ValueError(f"it is not JSON: {exc}") from None
    if not isinstance(parsed, dict):
        raise ValueError("it is not a JSON object")
    if reserved := _RESERVED & parsed.keys():
        raise ValueError(f"{', '.join(sorted(reserved))} cannot be set here; the system sets it")
    return text


def _as_text(value: object) -> object:
    return json.dumps(value) if isinstance(value, Mapping) else value


#: Names of groups, written as `a,b`.
GroupNames = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_names)]
#: Values of a request, written as the text of a JSON object.
JsonObject = Annotated[str | None, NoDecode, BeforeValidator(_as_text), AfterValidator(_json_object)]
#: How closely a model looks at an image, as in requests to its endpoint.
ImageDetail = Literal["auto", "low", "high"]
#: What an endpoint speaks: OpenAI's chat completions, Anthropic's messages or Gemini's generateContent.
ModelProtocol = Literal["openai", "anthropic", "gemini"]
#: Values of requests that the clients set.
_RESERVED: Final = frozenset([
    "model", "messages", "stream", "stream_options", "input", "system", "contents", "systemInstruction",
])  # fmt: skip


class ModelGroupSettings(BaseModel):
    """One model that chats, fallbacks and plugins choose by the name of its group."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(min_length=1, description="Model name.")
    base_url: str | None = Field(
        None,
        description="Endpoint, up to `/v1`; unset means `NEKRO_LLM__BASE_URL`, its key and its protocol.",
    )
    protocol: ModelProtocol | None = Field(
        None, description="Protocol of the endpoint, as `NEKRO_LLM__PROTOCOL`; unset means `openai`."
    )
    api_key: SecretStr | None = Field(None, description="API key of the endpoint.")
    parameters: JsonObject = Field(
        None, description='Further values of requests, as a JSON object: `{"temperature": 0.2}`.'
    )
    vision: bool = Field(True, description="Whether the model sees images.")
    image_detail: ImageDetail = Field(
        "auto", description="How closely it looks at images: `low` (512 pixels, few tokens), `high`, `auto`."
    )
    embedding: bool = Field(False, description="Whether the model returns embeddings and no answers.")
    draw: bool = Field(False, description="Whether the model draws for plugins and does not answer chats.")
    proxy: str | None = Field(None, description="HTTP proxy for requests to the endpoint.")
    input_price: float = Field(0, ge=0, description="Price of a million input tokens.")
    cached_input_price: float | None = Field(
        None, ge=0, description="Price of a million input tokens from the endpoint's cache; unset: as others."
    )
    output_price: float = Field(0, ge=0, description="Price of a million output tokens.")
    context_tokens: int | None = Field(
        None, ge=1, description="Longest context of the model in tokens; unset means unknown."
    )
    fallbacks: GroupNames = Field(
        (), description="Groups that are asked in this order if this one fails, as `a,b`."
    )
    first_token_seconds: float = Field(60, gt=0, description="Longest wait for the first token.")
    idle_seconds: float = Field(
        60, gt=0, description="Longest pause between two pieces of a streamed answer."
    )

    @model_validator(mode="after")
    def _one_kind(self) -> ModelGroupSettings:
        if self.embedding and self.draw:
            raise ValueError("EMBEDDING and DRAW exclude each other")
        if (self.embedding or self.draw) and self.protocol not in (None, "openai"):
            raise ValueError("EMBEDDING and DRAW need PROTOCOL=openai")
        return self


class _Settings(Protocol):
    """The part of ``Settings`` that is read here; its module imports this one."""

    @property
    def llm(self) -> Any:
        """The ``LLMSettings``."""

    @property
    def agent(self) -> Any:
        """The ``AgentSettings``."""

    @property
    def models(self) -> Mapping[str, ModelGroupSettings]:
        """The groups besides ``default``."""
        ...


@dataclass(frozen=True, kw_only=True)
class ModelGroup:
    """One model group with everything resolved; fields as in ``ModelGroupSettings``.

    ``base_url`` is None if no endpoint is configured (a scripted model, or none); ``context_tokens`` is None
    if unknown. Prices are per million tokens.
    """

    name: str
    model: str
    base_url: str | None
    protocol: ModelProtocol
    api_key: SecretStr | None = field(repr=False)
    parameters: Mapping[str, Any]
    vision: bool
    image_detail: ImageDetail
    embedding: bool
    draw: bool
    proxy: str | None
    input_price: float
    cached_input_price: float
    output_price: float
    context_tokens: int | None
    fallbacks: tuple[str, ...]
    first_token_seconds: float
    idle_seconds: float

    @property
    def answers_chats(self) -> bool:
        """Whether the group may answer rounds."""
        return not self.embedding and not self.draw


def model_groups(settings: _Settings) -> dict[str, ModelGroup]:
    """Return every group by name; ``default`` is first, also when no model is configured for it."""
    llm = settings.llm
    default = _default(llm)
    groups = {DEFAULT_GROUP: default}
    return groups | {name: _resolved(name, group, llm) for name, group in settings.models.items()}


def model_group(settings: _Settings, name: str) -> ModelGroup:
    """Return one group; case and ``_`` for ``-`` do not matter in the name.

    Raises:
        ModelGroupError: there is none of that name.
    """
    groups = model_groups(settings)
    try:
        return groups[group_name(name)]
    except KeyError:
        raise ModelGroupError(
            f"there is no model group {name!r}; define it with {group_variable(name, 'MODEL')} "
            f"(there are: {', '.join(groups)})"
        ) from None


def group_or_default(settings: _Settings, name: str | None) -> ModelGroup:
    """Return the group that is asked first for a chat: ``default`` if it chose none, or one that is gone."""
    groups = model_groups(settings)
    return groups.get(name or DEFAULT_GROUP, groups[DEFAULT_GROUP])


def chat_groups(settings: _Settings, name: str) -> list[ModelGroup]:
    """Return the group and those that are asked in turn if it fails, each once.

    The fallbacks of a fallback come directly after it.

    Raises:
        ModelGroupError: there is none of that name, or it does not answer chats.
    """
    first = model_group(settings, name)
    if not first.answers_chats:
        kind = "EMBEDDING" if first.embedding else "DRAW"
        raise ModelGroupError(f"model group {first.name} has {kind} set, so it cannot answer chats")
    groups = model_groups(settings)
    found: dict[str, ModelGroup] = {}

    def add(group: ModelGroup) -> None:
        if group.name not in found:
            found[group.name] = group
            for fallback in group.fallbacks:
                add(groups[fallback])

    add(first)
    return list(found.values())


@dataclass(frozen=True, kw_only=True)
class Vision:
    """How the models of a chat see: ``detail`` is None for ``auto``."""

    sees: bool = True
    detail: str | None = None


def vision_of(settings: _Settings, name: str | None) -> Vision:
    """Return whether a group or one of its fallbacks sees images, and the detail of the first that does.

    Args:
        name: None means ``default``, which also answers if there is no such group.
    """
    try:
        groups = chat_groups(settings, name or DEFAULT_GROUP)
    except ModelGroupError:
        groups = chat_groups(settings, DEFAULT_GROUP)
    seeing = [group.image_detail for group in groups if group.vision]
    return Vision(sees=bool(seeing), detail=seeing[0] if seeing and seeing[0] != "auto" else None)


def check_groups(settings: _Settings) -> None:
    """Check what no group can check by itself.

    Raises:
        SettingsError: a group has no endpoint, or a fallback is unknown, of another kind, or leads back to
            its group; or the group of summaries is unknown or of another kind.
    """
    groups = model_groups(settings)
    for name, group in groups.items():
        if name != DEFAULT_GROUP and not group.base_url:
            raise SettingsError(
                f"Model group {name} has no endpoint. Set {group_variable(name, 'BASE_URL')} or "
                "NEKRO_LLM__BASE_URL."
            )
        for fallback in group.fallbacks:
            _check_fallback(group, fallback, groups)
    for name in groups:
        _check_no_cycle(name, groups, ())
    summaries = settings.agent.summary_group
    if summaries is not None:
        try:
            chat_groups(settings, summaries)
        except ModelGroupError as exc:
            raise SettingsError(f"NEKRO_AGENT__SUMMARY_GROUP: {exc}.") from None


def _check_fallback(group: ModelGroup, fallback: str, groups: Mapping[str, ModelGroup]) -> None:
    variable = group_variable(group.name, "FALLBACKS")
    if fallback not in groups:
        raise SettingsError(
            f"{variable} names {fallback}, which is not a model group. There are: {', '.join(groups)}."
        )
    if not group.answers_chats:
        raise SettingsError(f"{variable}: only groups that answer chats have fallbacks; unset it.")
    if not groups[fallback].answers_chats:
        raise SettingsError(f"{variable} names {fallback}, which does not answer chats (EMBEDDING or DRAW).")


def _check_no_cycle(name: str, groups: Mapping[str, ModelGroup], path: tuple[str, ...]) -> None:
    if name in path:
        circle = " -> ".join((*path[path.index(name) :], name))
        raise SettingsError(f"{group_variable(name, 'FALLBACKS')} leads back to {name}: {circle}.")
    for fallback in groups[name].fallbacks:
        _check_no_cycle(fallback, groups, (*path, name))


def _default(llm: Any) -> ModelGroup:
    cached = llm.cached_input_price_per_million
    return ModelGroup(
        name=DEFAULT_GROUP,
        model=llm.model,
        base_url=llm.base_url,
        protocol=llm.protocol,
        api_key=llm.api_key,
        # Without the limit of output tokens, which is one of rounds and not of plugins.
        parameters=_parsed(llm.parameters),
        vision=llm.vision,
        image_detail=llm.image_detail,
        embedding=False,
        draw=False,
        proxy=llm.proxy,
        input_price=llm.input_price_per_million,
        cached_input_price=llm.input_price_per_million if cached is None else cached,
        output_price=llm.output_price_per_million,
        context_tokens=llm.context_tokens,
        fallbacks=llm.fallbacks,
        first_token_seconds=llm.first_token_timeout_seconds,
        idle_seconds=llm.idle_timeout_seconds,
    )


def _resolved(name: str, group: ModelGroupSettings, llm: Any) -> ModelGroup:
    cached = group.cached_input_price
    return ModelGroup(
        name=name,
        model=group.model,
        base_url=group.base_url or llm.base_url,
        protocol=_protocol(group, llm),
        # The agent's key goes to the agent's endpoint only.
        api_key=group.api_key if group.base_url else group.api_key or llm.api_key,
        parameters=_parsed(group.parameters),
        vision=group.vision,
        image_detail=group.image_detail,
        embedding=group.embedding,
        draw=group.draw,
        proxy=group.proxy,
        input_price=group.input_price,
        cached_input_price=group.input_price if cached is None else cached,
        output_price=group.output_price,
        context_tokens=group.context_tokens,
        fallbacks=group.fallbacks,
        first_token_seconds=group.first_token_seconds,
        idle_seconds=group.idle_seconds,
    )


def _protocol(group: ModelGroupSettings, llm: Any) -> ModelProtocol:
    if group.protocol is not None or group.base_url or group.embedding or group.draw:
        return group.protocol or "openai"
    found: ModelProtocol = llm.protocol
    return found


def _parsed(parameters: str | None) -> dict[str, Any]:
    return {} if parameters is None else json.loads(parameters)


def _by_name(value: object) -> object:
    """Convert ``{"text_embedding__model": "m"}`` of variables to ``{"text-embedding": {"model": "m"}}``.

    A variable of one value wins over the JSON text of all.
    """
    if not isinstance(value, Mapping):
        return value
    groups: dict[str, Any] = {}
    for key, item in value.items():
        name, separator, leaf = str(key).rpartition("__")
        if separator:
            groups.setdefault(group_name(name), {})[leaf] = item
    for key, item in value.items():
        if "__" not in str(key):
            name = group_name(str(key))
            groups[name] = {**item, **groups.get(name, {})} if isinstance(item, Mapping) else item
    return groups


def _without_default(groups: Mapping[str, ModelGroupSettings]) -> Mapping[str, ModelGroupSettings]:
    if DEFAULT_GROUP in groups:
        raise ValueError("group default is that of NEKRO_LLM__…; set those, or use another name")
    return groups


#: Written as JSON, or with one variable per value: `NEKRO_MODELS__TEXT_EMBEDDING__MODEL`. It is no `dict`,
#: because pydantic-settings would read the values of a `dict` as JSON, also a key of digits.
ModelGroups = Annotated[
    Mapping[str, ModelGroupSettings], BeforeValidator(_by_name), AfterValidator(_without_default)
]

_FIELDS: Final = "|".join(ModelGroupSettings.model_fields).upper()
_VARIABLE: Final = re.compile(rf"(NEKRO_MODELS__.+__(?:{_FIELDS}))(?:{FILE_SUFFIX})?")


def group_variables(names: Iterable[str]) -> set[str]:
    """Return the settings of model groups that variables set, themselves or by ``…_FILE``, in upper case."""

    def found() -> Iterator[str]:
        for name in names:
            if match := _VARIABLE.fullmatch(name.upper()):
                yield match[1]

    return set(found())
