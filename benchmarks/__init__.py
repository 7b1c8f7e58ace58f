"""What was measured of this project, and how to measure it again."""
