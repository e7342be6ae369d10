"""Requests that share their first tokens: groups, how to find them, and attention over them."""
