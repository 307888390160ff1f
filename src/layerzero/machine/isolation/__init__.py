"""Worker processes that serve calls: libraries that cannot live in this process live there."""
