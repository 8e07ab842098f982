"""The Model Context Protocol, in both directions.

``client`` connects workers to declared servers, whose tools become methods of plugins; ``server`` shows the
system to clients. The modules beside them import neither the protocol's SDK nor the sandbox, because commands
and workers without servers use them.
"""

from __future__ import annotations
