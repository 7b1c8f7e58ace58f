"""Simulated engines and tool servers on virtual time, driven by the real scheduler."""
