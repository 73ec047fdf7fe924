"""Trainings as lists of calls that are cut off after any write, and what their files hold then."""
