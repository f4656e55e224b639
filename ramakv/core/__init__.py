"""Pure rules: no trio, no I/O; time is an argument."""
