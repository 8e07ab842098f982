"""`nekro` with other limits of the code: ``python limited.py '{"sandbox": {"max_calls": 9}}' worker …``.

Limits have no variables (`broker_config/limits.py`). Tests and benchmarks that need others in processes of
their own start those with this program, which changes what ``Settings.load`` returns.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from broker_config.settings import Settings

__all__ = ["limit", "limited_command", "limits_of"]


def limit(limits: Mapping[str, Mapping[str, Any]]) -> None:
    """Let every later ``Settings.load`` of this process return these limits, by group."""
    # Settings are imported in functions, because the program below is to import them as `nekro` does.
    from broker_config.settings import Settings

    load = Settings.load

    def limited(**given: Any) -> Settings:
        settings = load(**given)
        groups = {
            name: getattr(settings, name).model_copy(update=dict(values)) for name, values in limits.items()
        }
        return settings.model_copy(update=groups)

    setattr(Settings, "load", staticmethod(limited))  # noqa: B010 - the types forbid to assign a method


def limits_of(settings: Settings) -> dict[str, dict[str, Any]]:
    """Return the limits that are not the defaults, by group."""
    from broker_config.limits import SettingGroup, fixed_fields

    found = {}
    for name in type(settings).model_fields:
        group = getattr(settings, name)
        limits = fixed_fields(type(group)) if isinstance(group, SettingGroup) else {}
        changed = {
            leaf: getattr(group, leaf) for leaf in limits if getattr(group, leaf) != limits[leaf].default
        }
        if changed:
            found[name] = changed
    return found


def limited_command(limits: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the beginning of a command line that runs `nekro` with these limits."""
    return [sys.executable, "-P", __file__, json.dumps(limits)]


if __name__ == "__main__":
    from nekro.cli.main import GARBAGE_THRESHOLD, main

    gc.set_threshold(GARBAGE_THRESHOLD)
    limit(json.loads(sys.argv.pop(1)))
    sys.exit(main(sys.argv[1:]))
