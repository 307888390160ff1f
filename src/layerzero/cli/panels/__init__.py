"""The commands as the command line declares them, one file for each panel of the help.

A declaration checks what it is given and then imports what does the work, from commands/: `lz
--help` and completion never import torch, and a wrong argument is told at once.
"""
