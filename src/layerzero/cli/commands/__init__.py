"""The work of the commands, by the panels of the help. From here on torch is there: `_library` is
what `import layerzero` brings.
"""

from ... import _library  # noqa: F401
