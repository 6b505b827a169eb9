"""Answers to requests that were not served: dead letters and groups that cannot start."""
