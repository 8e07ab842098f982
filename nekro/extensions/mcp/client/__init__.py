"""Sessions with servers of the Model Context Protocol: transports, listings, tools as sandbox methods.

Servers deviate from the protocol; what they send is made such that the SDK reads it. ``hub``, ``plugins``,
``schemas`` and ``tools`` can be imported without the SDK.
"""

from __future__ import annotations
