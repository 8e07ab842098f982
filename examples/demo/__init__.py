"""The scripted tour of `nekro demo`: scenes, a plugin, services of its own, and checks.

It is loaded from its folder, or as a part of the installed wheel; see ``nekro.cli.commands.demo``.
"""
