"""Hints: the only importer of arq and Redis."""
