"""Levels 2 to 5: from a layer to training, against plain torch."""
