"""The one immutable snapshot that every call reads, and what changes it."""
