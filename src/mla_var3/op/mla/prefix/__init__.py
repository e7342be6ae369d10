"""Requests that share their first tokens."""
