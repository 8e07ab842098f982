"""The protocol's own conformance suite against `/mcp`; `make mcp-conformance` installs and runs it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from gateway_server import served
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from worker_fleet import Fleet

from gateway.app import create_app
