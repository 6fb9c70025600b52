"""The parts of every run: its start and end, its record, report and trackers, and the processes it
starts."""
