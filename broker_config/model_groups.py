"""The settings of model groups: models that plugins ask for by name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr

from broker_config.setting_files import FILE_SUFFIX
from nekro_agent.policies import group_name

__all__ = ["ModelGroupSettings", "ModelGroups", "group_variables"]


class ModelGroupSettings(BaseModel):
    """One model that plugins ask for by the name of its group."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(min_length=1, description="Model name.")
    base_url: str | None = Field(
        None,
        description="OpenAI-compatible endpoint, up to `/v1`; unset means `NEKRO_LLM__BASE_URL` and its key.",
    )
    api_key: SecretStr | None = Field(None, description="API key of the endpoint.")
    type: Literal["chat", "embedding", "draw"] = Field(
        "chat", description="What the model does, as plugins read it: `chat`, `embedding` or `draw`."
    )
    vision: bool = Field(True, description="Whether plugins may send images.")
    proxy: str | None = Field(None, description="HTTP proxy that plugins should use for the endpoint.")
    temperature: float | None = Field(None, ge=0, le=2, description="Sampling temperature.")
    top_p: float | None = Field(None, gt=0, le=1, description="Share of the probability to sample from.")
    extra_body: str | None = Field(None, description="Further values of requests, as a JSON object.")


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


#: Written as JSON, or with one variable per value: `NEKRO_MODEL_GROUPS__TEXT_EMBEDDING__MODEL`. It is no
#: `dict`, because pydantic-settings would read the values of a `dict` as JSON, also a key of digits.
ModelGroups = Annotated[Mapping[str, ModelGroupSettings], BeforeValidator(_by_name)]

_FIELDS: Final = "|".join(ModelGroupSettings.model_fields).upper()
_VARIABLE: Final = re.compile(rf"(NEKRO_MODEL_GROUPS__.+__(?:{_FIELDS}))(?:{FILE_SUFFIX})?")


def group_variables(names: Iterable[str]) -> set[str]:
    """Return the settings of model groups that variables set, themselves or by ``…_FILE``, in upper case."""
    found = (_VARIABLE.fullmatch(name.upper()) for name in names)
    return {match[1] for match in found if match}
