"""Hookledger: a webhook sender whose ledger is the truth."""
