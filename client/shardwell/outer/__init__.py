"""Outer training: learners make inner steps of their own, and exchange what these moved."""
