"""A new version of a kernel from an existing one."""
