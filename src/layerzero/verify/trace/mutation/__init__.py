"""Wrong references: made by changing right ones, and whether the check notices."""
