"""向量问答: asks for models by the names of their groups."""

from pydantic import Field

from nekro_agent.api.plugin import ConfigBase, ExtraField, NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx
from nekro_agent.core.config import ModelConfigGroup
from nekro_agent.core.config import config as core_config
from nekro_agent.services.agent.creator import OpenAIChatMessage
from nekro_agent.services.agent.openai import gen_openai_chat_response, gen_openai_embeddings

plugin = NekroPlugin(
    name="向量问答",
    module_name="model_user",
    description="",
    version="1.0.0",
    author="Bob",
    url="",
)


@plugin.mount_config()
class ModelConfig(ConfigBase):
    """配置"""

    EMBEDDING_GROUP: str = Field(
        default="text-embedding",
        title="嵌入模型组",
        json_schema_extra=ExtraField(ref_model_groups=True, model_type="embedding").model_dump(),
    )


config: ModelConfig = plugin.get_config(ModelConfig)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, name="嵌入", description="")
async def embed(_ctx: AgentCtx, text: str) -> list:
    """Return the embedding of a text."""
    group: ModelConfigGroup = core_config.get_model_group_info(config.EMBEDDING_GROUP)
    if group.MODEL_TYPE != "embedding":
        raise ValueError(f"{group.GROUP_NAME} is of type {group.MODEL_TYPE}")
    return await gen_openai_embeddings(
        model=group.CHAT_MODEL, input=text, api_key=group.API_KEY, base_url=group.BASE_URL, dimensions=2
    )


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, name="提问", description="")
async def ask(_ctx: AgentCtx, group_name: str, question: str) -> str:
    """Ask a model."""
    group = core_config.MODEL_GROUPS[group_name]
    response = await gen_openai_chat_response(
        model=group.CHAT_MODEL,
        messages=[OpenAIChatMessage.from_text("user", question)],
        temperature=group.TEMPERATURE,
        top_p=group.TOP_P,
        extra_body=group.EXTRA_BODY,
        api_key=group.API_KEY,
        base_url=group.BASE_URL,
        proxy_url=group.CHAT_PROXY,
        stream_mode=False,
    )
    return f"{response.response_content} ({response.use_model}, {response.token_consumption})"


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, name="模型组", description="")
async def groups(_ctx: AgentCtx) -> list:
    """Return the names of all groups."""
    return sorted(f"{name}:{group.MODEL_TYPE}" for name, group in core_config.MODEL_GROUPS.items())
