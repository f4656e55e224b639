"""Replays a recorded trace in virtual time, through the real service and an engine of two tiers."""
