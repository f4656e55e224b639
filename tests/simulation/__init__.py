"""Histories of events and faults, played to the whole service in virtual time, and judged."""
