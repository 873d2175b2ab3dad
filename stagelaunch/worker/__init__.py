"""One stage process: walks the phases under their locks, measures, reports, then answers."""
