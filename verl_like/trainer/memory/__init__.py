"""How much memory a run takes, added up before anything starts, and the keys that lower it."""
