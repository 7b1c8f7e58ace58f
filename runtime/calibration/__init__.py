"""An engine profile measured on a running engine."""
