"""Relays: how snapshots travel from node to node."""
