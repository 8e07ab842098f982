from pydantic import Field

from nekro_agent.api.i18n import i18n_text
from nekro_agent.api.plugin import ConfigBase, ExtraField, NekroPlugin

plugin = NekroPlugin(
    name="画图",
    module_name="sketchbook",
    description="生成图片并让 AI 看到它",
    version="2.0.0",
    author="Ada",
    url="https://example.com/sketch",
    is_package=True,
    i18n_name=i18n_text(zh_CN="画图", en_US="Sketchbook"),
    allow_sleep=True,
    sleep_brief="draws",
)


@plugin.mount_config()
class DrawConfig(ConfigBase):
    USE_DRAW_MODEL_GROUP: str = Field(
        default="default-draw",
        title="绘图模型组",
        json_schema_extra=ExtraField(
            ref_model_groups=True, model_type="draw", i18n_title=i18n_text(zh_CN="绘图", en_US="Draw")
        ).model_dump(),
    )
    ENDPOINT: str = "http://127.0.0.1:9"
    TIMEOUT: float = 5.0
