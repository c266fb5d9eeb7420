"""Fitting the student to the teacher."""
