"""A run as a whole: its context, its directory, its entry from Python, and its watchdog."""
