"""Why a kernel failed: a class is named where an experiment confirms it."""
