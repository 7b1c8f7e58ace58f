"""Policies side by side: cells of a sweep, measures of each run, intervals over seeds, reports."""
