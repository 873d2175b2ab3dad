"""The command line, one module per command; the only place that prints. stdout is data, stderr is talk."""
