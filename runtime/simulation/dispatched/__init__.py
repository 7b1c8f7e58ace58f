"""Simulated engines and tool servers behind the real dispatcher, on an event loop of virtual time."""
