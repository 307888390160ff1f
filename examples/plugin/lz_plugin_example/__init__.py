"""An operation, two kernels and a policy for LayerZero, from outside."""

VERSION = "1.0"
