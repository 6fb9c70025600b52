"""Adds up the memory that a run takes before anything starts, and names the keys that lower it."""
