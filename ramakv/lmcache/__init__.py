"""LMCache: the client that speaks to it, and the engine that answers like it."""
