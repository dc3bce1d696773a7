"""Finds out why a job failed: records of the ranks' errors, the rank that was the cause, and the report."""
