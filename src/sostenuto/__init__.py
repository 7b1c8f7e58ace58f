"""Sostenuto: a program-aware scheduling runtime for agents and their training.

The public API is re-exported lazily, so a tool server that imports `sostenuto.tools`
never pays for, or needs, the trainer's dependencies.
"""
