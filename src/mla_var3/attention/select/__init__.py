"""Which kernel serves a call, and why."""
