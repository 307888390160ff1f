"""The nouns, pure data. Nothing here imports torch or any other room."""
