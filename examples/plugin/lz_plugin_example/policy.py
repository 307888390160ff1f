"""What the package advises.

Everything its user says, in a file, the environment or the program, wins over it.
"""

from __future__ import annotations

from layerzero import PolicyRule

POLICY = {"rules": (
    PolicyRule.of("boost", "example.addcmul", "scale_shift", factor=1.5),
    # too little work in a row
    PolicyRule.of("deny", "example.rms_norm", "rms_norm", {"hidden": "< 4"}),
)}
