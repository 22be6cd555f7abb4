"""Engines for tests: stand-ins over HTTP, hostile ones, and how real servers are started."""
