"""Pipelines: schedules of micro-batches over stages, their simulation and their pictures."""
