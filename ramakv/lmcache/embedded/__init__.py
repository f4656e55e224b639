"""The embedded engine: an LMCache-compatible cache behind the HTTP API of the real one."""
