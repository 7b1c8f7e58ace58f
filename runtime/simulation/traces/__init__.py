"""Recorded programs: public trace formats and one of our own, read into workloads."""
