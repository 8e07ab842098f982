"""Servers of the Model Context Protocol as plugins: declarations, sessions, tools as sandbox methods.

``declarations``, ``servers``, ``tools`` and ``masking`` import neither the protocol's SDK nor the sandbox,
because commands and the gateway use them too.
"""
