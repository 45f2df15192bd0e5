"""The network out: the only importer of httpx."""
