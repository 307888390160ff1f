"""Files: where they are, how those of others are read, and how text and files become code."""
