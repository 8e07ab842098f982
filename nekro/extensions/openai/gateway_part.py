"""What this extension brings to a gateway; a module of its own, because its routes are in two."""

from __future__ import annotations

import re
from typing import Final

from nekro.extensions.openai import completions, responses
from nekro.extensions.openai.chats import ERROR_FORM
from nekro.gateway.extensions import GatewayPart

__all__ = ["GATEWAY_PART"]

GATEWAY_PART: Final = GatewayPart(
    root=(completions.router, responses.router),
    # Pictures and files are in the JSON.
    limits=((re.compile(r"/v1/(chat/completions|responses)"), lambda settings: settings.media_bytes),),
    errors={"/v1/": ERROR_FORM},
)
