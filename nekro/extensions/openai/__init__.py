"""The API of OpenAI, for clients that speak it: one chat per conversation, one turn per request."""

from __future__ import annotations

from fastapi import APIRouter

from nekro.extensions.openai import completions, responses

__all__ = ["router"]

router = APIRouter()
router.include_router(completions.router)
router.include_router(responses.router)
