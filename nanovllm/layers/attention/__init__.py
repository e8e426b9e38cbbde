"""Attention over the paged KV cache: one signature, several backends, chosen by `select_backend`."""
