"""Imports redis-py without OpenTelemetry; import this module before any other of redis-py.

redis-py imports OpenTelemetry's metrics wherever they are installed, which takes a short command a tenth of
its time. None of redis-py's metrics are used here.
"""

from __future__ import annotations

import sys

__all__ = ["redis"]

_HIDDEN = "opentelemetry"
_is_hidden = _HIDDEN not in sys.modules
if _is_hidden:
    sys.modules[_HIDDEN] = None  # type: ignore[assignment]  # an import of it fails
try:
    import redis
finally:
    if _is_hidden:
        del sys.modules[_HIDDEN]
