"""Servers that generate: what each engine is asked, which of them lives, who gets the next request."""
