"""ramakv: the session-aware side of an LLM KV cache."""

__version__ = "0.1.0"
