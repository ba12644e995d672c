"""A run as a process: its directory, provenance, signals and watchdog."""
