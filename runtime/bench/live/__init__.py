"""Policies side by side on live engines: planned programs, real tokens."""
