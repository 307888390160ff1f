"""A real PostgreSQL for the tests that want one."""

from postgres import server, url

__all__ = ["server", "url"]
