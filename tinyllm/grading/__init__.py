"""Planted bugs, and the grader that scores a test suite by how many of them it kills."""
