"""What no client should do, done to the whole daemon over real HTTP."""
