"""A definition answered: by lz, by independent libraries, by its own reference."""
